"""`qwengyre track`: what trackers have not got of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from qwengyre.cli.output import say
from qwengyre.config.installation import to_have
from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError
from qwengyre.core.near import nearest
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.tracking_config import TrackingConfig


def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="tensorboard, wandb, mlflow or trackio; without it, those of the run."),
    ] = None,
) -> None:
    """Send a run to trackers, from where each of them stopped. A run in progress is followed to its end."""
    from qwengyre.journal import is_in_use
    from qwengyre.tracking.feed import Feed
    from qwengyre.tracking.kinds import KINDS
    from qwengyre.tracking.pump import Pump

    folder = RunFolder.open(run)
    config = RecordedConfig(folder.config).table("tracking", TrackingConfig)
    names = tuple(to or config.to)
    if not names:
        raise ConfigError("the run names no tracker: name one with --to", key="tracking.to")
    is_running = folder.controller_journal.exists() and is_in_use(folder.controller_journal)
    for name in names:
        if name not in KINDS:
            near = nearest(name, KINDS)
            raise ConfigError(
                f"no such tracker: {name}. {f'Did you mean {near}?' if near else 'There are: ' + ', '.join(KINDS)}", key="--to"
            )
        if is_running and name in config.to:
            raise ConfigError(f"the run is in progress, and sends to {name} itself", file=str(folder.path), key="--to")
        try:
            tracker = KINDS[name]()
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed: {to_have(name)}", key="--to") from error
        pump = Pump(name, tracker, Feed(folder, msgspec.structs.replace(config, to=names)), config)
        pump.run()
        say(f"{name} has all of {folder.path}")
