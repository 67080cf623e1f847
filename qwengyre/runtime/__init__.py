"""The controller of a run: it drives cells and executions around the pure scheduler."""
