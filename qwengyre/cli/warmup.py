"""`qwengyre warmup RUN.toml`: make the policy that a run on a CPU starts from, ahead of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def warmup(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run file, for its tables warmup, policy and runtime.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. runtime.seed=1.")
    ] = None,
) -> None:
    """Make the small policy that `qwengyre train RUN.toml` starts from, or find it in the cache; print its folder."""
    from qwengyre.cli.output import say, say_progress
    from qwengyre.runtime.run_config import load_run
    from qwengyre.warmup import warm_up

    config = load_run(run_file, overrides or [], say_progress)
    folder = warm_up(config.warmup, Path(config.policy.cache), config.runtime.seed, say_progress)
    say(str(folder))
