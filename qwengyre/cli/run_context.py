"""What `inspect` and `export` need of a run beside its journals: some of its config, role rules and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from qwengyre.cli.options import named_as
from qwengyre.cli.output import say
from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError
from qwengyre.dashboard.tree_rows import Decode
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.tokenizer import FastTokenizer
from qwengyre.recorded.run import RecordedRun
from qwengyre.runtime.config import PolicyConfig, RuntimeConfig
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.harness_rules import HarnessRules


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a run chose its trajectories. The defaults are those of a gateway that ran alone."""

    harness_rules: str = ""

    trajectory: TrajectoryConfig = TrajectoryConfig(j_max=0)
    seed: int = 0
    model: str = ""
    renderer: dict[str, str | bool | int] = msgspec.field(default_factory=lambda: {"name": "auto"})


def open_run(path: Path) -> RecordedRun:
    """Read its scores, and say on stderr what it lacks. Raises ConfigError when `path` is not a run, JournalError."""
    run = RecordedRun.open(path)
    if run.is_before_first_call:
        say("note: this run has not recorded a call yet", err=True)
    if run.has_lost_scores:
        lost = run.controller_journal
        say(f"note: {lost} is missing or empty, and with it every score: rewards and advantages are blank", err=True)
    return run


def run_settings(run: RecordedRun) -> RunSettings:
    """Of a run of any version: keys that this one does not know are named on stderr and left at their defaults."""
    if run.config is None:
        return RunSettings()
    recorded = RecordedConfig(run.config)
    trajectory, own_rules = recorded.table("trajectory", TrajectoryConfig), RunFolder(run.config.parent).harness_rules
    settings = RunSettings(
        trajectory=trajectory,
        harness_rules=str(own_rules) if own_rules.is_file() else trajectory.harness_rules,
        seed=recorded.table("runtime", RuntimeConfig).seed,
        model=recorded.table("policy", PolicyConfig).model,
        renderer=recorded.table("gateway", GatewayConfig).renderer,
    )
    if recorded.ignored:
        say(f"note: {run.config} is of another version; not understood: {', '.join(recorded.ignored)}", err=True)
    return settings


def load_harness_rules(settings: RunSettings, given: Path | None) -> tuple[HarnessRules, ...]:
    """The rules of the file given, else of the run's, then the built-in ones. Raises ConfigError for a file that cannot be read."""
    if given is None:
        return read_harness_rules(settings.harness_rules)
    with named_as("--harness-rules", "trajectory.harness_rules"):
        return read_harness_rules(str(given))


def find_tokenizer(run: RecordedRun, settings: RunSettings, given: Path | None) -> Path | None:
    """Folder of the tokenizer: the one given, the run's own copy, its model, or a checkpoint's; None if there is none.

    Raises ConfigError when there is none in the folder given.
    """
    if given is not None:
        if not (given / "tokenizer.json").is_file():
            raise ConfigError("there is no tokenizer.json in this folder", file=str(given), key="--tokenizer")
        return given
    return next((folder for folder in _tokenizer_folders(run, settings) if (folder / "tokenizer.json").is_file()), None)


def text_decoder(folder: Path | None) -> Decode | None:
    """Tokens to text, special tokens shown. Raises ConfigError when the folder has no tokenizer."""
    return FastTokenizer.from_folder(folder).decode if folder is not None else None


def _tokenizer_folders(run: RecordedRun, settings: RunSettings) -> Iterator[Path]:
    if run.config is not None:
        yield run.config.parent / "policy"
    if settings.model:
        yield Path(settings.model)
    if run.config is not None:
        yield from sorted((run.config.parent / "checkpoints").glob("*"), reverse=True)
