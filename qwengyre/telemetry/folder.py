"""The run folder: where everything of one run lies, and what it is called."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Final

from qwengyre.core.errors import ConfigError

OWNER_ONLY: Final = 0o700
PART: Final = re.compile(r"gateway-([1-9][0-9]*)\.log")


def snapshot_file(snapshots: Path, version: int) -> Path:
    """Where the weights of a version are saved, for the audit and for a new life of the core.

    >>> snapshot_file(Path("snapshots"), 12).name
    'v000012.safetensors'
    """
    return snapshots / f"v{version:06d}.safetensors"


def journal_parts(first: Path) -> list[Path]:
    """`first` is a gateway's journal; the others are those of the gateways beside it."""
    found = {int(match[1]): path for path in first.parent.glob("gateway-*.log") if (match := PART.fullmatch(path.name))}
    return [first, *(found[number] for number in sorted(found))]


def part_name(name: str, number: int) -> str:
    """What gateway number `number` of a run calls its own of a kind of file.

    >>> part_name("gateway.log", 0), part_name("gateway.log", 3)
    ('gateway.log', 'gateway-3.log')
    """
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{number}{dot}{suffix}" if number else name


class RunFolder:
    """Paths of one run.

    config.toml             the config as resolved
    harness-rules.toml      the file that trajectory.harness_rules named, if any
    journal/                controller.log, gateway.log (gateway-1.log, ... of more gateways): the durable truth;
                            trained.log: what each step trained, for the audit;
                            secret, segments: what harnesses' keys are made of, what the run's shared memory is called
    metrics.jsonl           one record a line (telemetry/records.py)
    tensorboard/            the same numbers as event files
    tracking/               what trackers were sent, and their own files
    policy/                 config, tokenizer and renderer of the policy: what every checkpoint has beside its weights
    checkpoints/            step-000004/: a folder that Hugging Face opens; optimizer/: the optimizer's state of each
    snapshots/              weights of every version, for the audit of log-probs; without one, from the published version on
    workspaces/             workspaces and logs of failed executions, and of a few of each kind of reward
    poisoned/               micro-steps whose loss was not finite, if any
    logs/                   what each process printed
    summary.json            the outcome in numbers, rewritten at every step
    report.html             the outcome in pictures, needs no other file
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.harness_rules = self.path / "harness-rules.toml"
        self.journal = self.path / "journal"
        self.controller_journal = self.journal / "controller.log"
        self.gateway_journal = self.journal / "gateway.log"
        self.trained_journal = self.journal / "trained.log"
        self.segments = self.journal / "segments"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.policy = self.path / "policy"
        self.renderer = self.policy / "renderer.json"
        self.checkpoints = self.path / "checkpoints"
        self.snapshots = self.path / "snapshots"
        self.workspaces = self.path / "workspaces"
        self.poisoned = self.path / "poisoned"
        self.logs = self.path / "logs"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"

    def snapshot_files(self) -> dict[int, Path]:
        """The weights that were saved, by the number of steps done."""
        found = sorted(self.snapshots.glob("v*.safetensors"))
        return {int(path.stem.removeprefix("v")): path for path in found if path.stem.removeprefix("v").isdecimal()}

    def gateway_journal_of(self, number: int) -> Path:
        """Of gateway number `number`; `gateway_journal` is the first one's."""
        return self.journal / part_name(self.gateway_journal.name, number)

    @property
    def gateway_journals(self) -> list[Path]:
        """Of all gateways, as far as they are there: the first one always. Sessions have numbers of their own over all of them."""
        return journal_parts(self.gateway_journal)

    @property
    def has_begun(self) -> bool:
        """Whether anything happened that could be resumed."""
        return self.controller_journal.exists()

    def remove(self) -> None:
        """For a run that was refused before it began."""
        shutil.rmtree(self.path)

    @classmethod
    def create(cls, runs_dir: str | Path, name: str, config_toml: str) -> RunFolder:
        """A new folder `runs_dir/NAME-DATE-TIME` with the config in it. Raises ConfigError if it cannot be made."""
        stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name) or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ["", *(f"-{n}" for n in range(2, 100))]:
            folder = cls(Path(runs_dir) / f"{stem}{suffix}")
            try:
                folder.path.mkdir(mode=OWNER_ONLY, parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"cannot make the run folder ({error.strerror}); choose another with --runs-dir", file=str(folder.path)
                ) from error
            folder._make_inner()
            folder.config.write_text(config_toml, encoding="utf-8")
            return folder
        raise ConfigError("a hundred runs started in this second; try again", file=str(runs_dir))

    @classmethod
    def open_to_resume(cls, path: str | Path) -> RunFolder:
        """As `open`. Raises ConfigError, too, when nothing was begun here, or when what tells how far it came is gone.

        A run that was stopped before its first record (while its policy was made) has an empty journal folder: it starts now.
        """
        folder = cls.open(path)
        if not folder.journal.is_dir():
            raise ConfigError(f"no run was begun here: `qwengyre train {folder.config}` begins one", file=str(path))
        if not folder.has_begun and any(journal.exists() for journal in folder.gateway_journals):
            raise ConfigError(
                "the journal of the controller is missing, so the progress of this run is unknown",
                file=str(folder.controller_journal),
            )
        try:
            folder._make_inner()
        except OSError as error:
            raise ConfigError(f"cannot write into this run folder ({error.strerror})", file=str(path)) from error
        return folder

    def _make_inner(self) -> None:
        """A copy may have come without the empty ones, and open to others, who could read every prompt and answer."""
        self.path.chmod(OWNER_ONLY)
        for inner in (self.journal, self.checkpoints, self.snapshots, self.workspaces, self.logs):
            inner.mkdir(exist_ok=True)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The folder of an existing run. Raises ConfigError, which names the runs beside it, when `path` is not a run."""
        folder = cls(path)
        if folder.config.is_file():
            return folder
        what = "no config.toml in it" if folder.path.exists() else "it does not exist"
        parent = folder.path if folder.path.is_dir() else folder.path.parent
        runs = sorted(config.parent.name for config in parent.glob("*/config.toml"))[-3:]
        hint = f"; there are: {', '.join(str(parent / run) for run in runs)}" if runs else ""
        raise ConfigError(f"not the folder of a run: {what}{hint}", file=str(path))
