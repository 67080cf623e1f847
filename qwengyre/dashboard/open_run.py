"""A run folder that somebody looks at: what was read of it so far, and what is needed to read the rest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.config.harness_rules import read_harness_rules
from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError, QwenGyreError
from qwengyre.core.ids import ExecutionId
from qwengyre.dashboard.call_index import RecordedAttempt, RunCalls
from qwengyre.dashboard.conversation import TokenReader
from qwengyre.dashboard.costs import RunCosts, run_costs
from qwengyre.dashboard.executions import ExecutionTable
from qwengyre.dashboard.said import START, ReadAnswer, SaidCall, ShownAnswer, plain_answer, pretty
from qwengyre.dashboard.series import RunSeries, series_of
from qwengyre.dashboard.text_search import Searches
from qwengyre.dashboard.trained_index import TrainedIndex
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.tokenizer import FastTokenizer
from qwengyre.journal import is_in_use
from qwengyre.runtime.config import PolicyConfig, RuntimeConfig
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import MetricsTail
from qwengyre.telemetry.summary import Summary, read_summary
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.harness_rules import HarnessRules

MAX_OPEN_RUNS: Final = 6
"""Runs whose records are held at once; the one not looked at for longest is forgotten."""


class OpenRun:
    """One run. Every method may be called from several threads; `lock` guards what is read on."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.name = folder.path.resolve().name
        self.lock = threading.RLock()
        self.table = ExecutionTable(folder.controller_journal)
        self.calls = RunCalls(lambda: folder.gateway_journals)
        self.trained = TrainedIndex(folder.trained_journal)
        self.searches = Searches()
        self._metrics = MetricsTail(folder.metrics)
        self._series: tuple[object, RunSeries] | None = None

    @property
    def is_running(self) -> bool:
        journal = self.folder.controller_journal
        return journal.exists() and is_in_use(journal)

    @property
    def is_read(self) -> bool:
        """Whether what was asked for of the journals was read to their ends."""
        shares = (self.table.share_read, self.calls.share_read, *self.searches.shares_read)
        return all(share in (0.0, 1.0) for share in shares)

    def series(self) -> RunSeries:
        """What the charts are drawn of. Raises JournalError."""
        with self.lock:
            self._metrics.refresh()
            summary = read_summary(self.folder.summary) or Summary()
            known = (len(self._metrics.records), self.is_running, summary)
            if self._series is None or self._series[0] != known:
                series = series_of(self._metrics.records, summary, label=self.name, is_running=known[1])
                self._series = known, series
            return self._series[1]

    def attempt(self, execution: ExecutionId, attempt: int, budget_s: float) -> RecordedAttempt | None:
        """None while it is not found yet, or was never recorded. Raises JournalError, RecordError."""
        with self.lock:
            self.calls.refresh(budget_s)
            return self.calls.find(execution, attempt)

    @cached_property
    def config(self) -> RecordedConfig:
        return RecordedConfig(self.folder.config)

    @cached_property
    def trajectory(self) -> TrajectoryConfig:
        return self.config.table("trajectory", TrajectoryConfig)

    @cached_property
    def seed(self) -> int:
        return self.config.table("runtime", RuntimeConfig).seed

    @cached_property
    def devices_per_cell(self) -> int:
        return self.config.table("trainer", TrainerConfig).ranks

    @cached_property
    def rules(self) -> tuple[HarnessRules, ...]:
        own = self.folder.harness_rules
        return read_harness_rules(str(own) if own.is_file() else self.trajectory.harness_rules)

    @cached_property
    def reader(self) -> TokenReader | None:
        """How its tokens are read; None when no tokenizer lies in the run."""
        folder = next((one for one in self._tokenizer_folders() if (one / "tokenizer.json").is_file()), None)
        if folder is None:
            return None
        tokenizer = FastTokenizer.from_folder(folder)
        start = tokenizer.convert_tokens_to_ids(START)
        return TokenReader(tokenizer.decode, self._read_answer(folder, tokenizer), start if isinstance(start, int) else None)

    def _tokenizer_folders(self) -> list[Path]:
        model = self.config.table("policy", PolicyConfig).model
        checkpoints = sorted(self.folder.checkpoints.glob("step-*"), reverse=True)
        return [self.folder.policy, *([Path(model)] if model else []), *checkpoints]

    def _read_answer(self, folder: Path, tokenizer: FastTokenizer) -> ReadAnswer:
        """By the run's own renderer, as the gateway read it; as text if that cannot be made any more."""
        from qwengyre.gateway.rendering import Rendering  # takes a second to import, and only conversations need it

        try:
            rendering = Rendering.from_folder(folder, self.config.table("gateway", GatewayConfig).renderer)
        except QwenGyreError:
            return plain_answer(tokenizer.decode)

        def read(ids: Sequence[int], tail: Sequence[int]) -> ShownAnswer:
            parsed = rendering.parse_whole(ids, tail, [])
            calls = tuple(
                SaidCall(block.name or "?", pretty(block.arguments if block.is_valid else block.raw), block.is_valid)
                for block in parsed.blocks
            )
            return ShownAnswer(parsed.text, parsed.reasoning, calls)

        return read


def open_run_costs(run: OpenRun) -> RunCosts:
    """What it cost, as far as its journal was read; whoever asks holds its lock. Raises JournalError."""
    keeps_zero = run.trajectory.keep_zero_advantage
    return run_costs(run.series(), run.table, devices_per_cell=run.devices_per_cell, keeps_zero=keeps_zero)


class RunInFolder(msgspec.Struct, frozen=True):
    """A run as the list of runs needs it."""

    name: str
    path: Path
    modified: float


class RunsDir:
    """The runs of a folder, or one run. New ones appear at the next look."""

    def __init__(self, path: Path):
        self.path = path
        self.is_single = (path / "config.toml").is_file()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()
        self._lock = threading.Lock()

    def found(self) -> list[RunInFolder]:
        """The newest first."""
        folders = [self.path] if self.is_single else [config.parent for config in self.path.glob("*/config.toml")]
        runs = [RunInFolder(folder.resolve().name, folder, _modified(folder)) for folder in folders]
        return sorted(runs, key=lambda run: (run.modified, run.name), reverse=True)

    def open(self, name: str) -> OpenRun:
        """Raises ConfigError when there is no run of this name."""
        with self._lock:
            known = self._open.get(name)
            if known is None:
                found = next((run for run in self.found() if run.name == name), None)
                if found is None:
                    raise ConfigError(f"there is no run {name!r} in this folder", file=str(self.path))
                known = self._open[name] = OpenRun(RunFolder.open(found.path))
                if len(self._open) > MAX_OPEN_RUNS:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            return known


def _modified(folder: Path) -> float:
    files = (folder / "metrics.jsonl", folder / "config.toml")
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
