"""The run file: strict TOML into one frozen Struct per component. Renamed means removed; unknown keys fail.

Each component owns its Struct in `<folder>/config.py`; `run.RunConfig` has one table per component. Nothing here
imports torch.
"""
