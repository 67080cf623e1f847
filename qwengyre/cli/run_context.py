"""What `inspect` and `export` need of a run beside its journals: its config, role rules and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from qwengyre.cli.run_records import RunSources
from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.config.run import RunConfig, load_run
from qwengyre.dashboard.tree_rows import Decode
from qwengyre.gateway.tokenizer import FastTokenizer
from qwengyre.trajectory.harness_rules import HarnessRules


def run_config(sources: RunSources) -> RunConfig | None:
    """None for a gateway that ran alone."""
    return load_run(sources.config) if sources.config is not None else None


def load_harness_rules(config: RunConfig | None, given: Path | None) -> tuple[HarnessRules, ...]:
    """The rules of the file given, else of the run's, then the built-in ones. Raises ConfigError for a file that cannot be read."""
    file = str(given) if given is not None else config.trajectory.harness_rules if config is not None else ""
    return read_harness_rules(file)


def find_tokenizer(sources: RunSources, config: RunConfig | None, given: Path | None) -> Path | None:
    """Folder of the tokenizer: the one given, the run's own copy, its model, or a checkpoint's; None if there is none."""
    if given is not None:
        return given
    return next((folder for folder in _tokenizer_folders(sources, config) if (folder / "tokenizer.json").is_file()), None)


def text_decoder(folder: Path | None) -> Decode | None:
    """Tokens to text, special tokens shown. Raises ConfigError when the folder has no tokenizer."""
    return FastTokenizer.from_folder(folder).decode if folder is not None else None


def _tokenizer_folders(sources: RunSources, config: RunConfig | None) -> Iterator[Path]:
    if sources.config is not None:
        yield sources.config.parent / "policy"
    if config is not None and config.policy.model:
        yield Path(config.policy.model)
    if sources.config is not None:
        yield from sorted((sources.config.parent / "checkpoints").glob("*"), reverse=True)
