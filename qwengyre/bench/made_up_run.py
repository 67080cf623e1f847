"""A run folder that no run made: journals and metrics of any number of executions, written as a run writes them.

What the dashboard is measured and tested with. Executions have tool calls, reasoning, sub-agents, compactions, retries and texts that
attack a page; groups, steps, evaluations and rewards that rise. The same arguments give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from qwengyre.core.arrays import LOGPROB, TOKEN, pack
from qwengyre.core.ids import CallId, ExecutionId, GroupId, ServerId, execution_id
from qwengyre.core.records import End, MicroStep, Outcome, TrainingExecution, Validity
from qwengyre.journal import Journal
from qwengyre.runtime.records import CallCounts, ControllerRecord, Decided, ExecutionDone, RunOpened
from qwengyre.scheduler import commands as cmd
from qwengyre.scheduler import events as ev
from qwengyre.telemetry import records as metric
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import Metrics
from qwengyre.telemetry.summary import Summary, write_summary
from qwengyre.testing.tokenizers import byte_tokenizer, write_byte_tokenizer
from qwengyre.trajectory.advantages import group_advantages
from qwengyre.trajectory.records import (
    BranchCause,
    CallFinished,
    CallStarted,
    Closed,
    GatewayRecord,
    Opened,
    RoleHints,
    TokensSampled,
)

HOSTILE: Final = (
    "</pre></details><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[31m\u202egnp.exe"
)
"""What a policy or a harness may write, to see what becomes of it in a page."""
CONFIG: Final = """\
[tasks]
train = ""
family = "mini-repositories"

[policy]
max_tokens_per_call = 160

[gateway]
renderer = { name = "qwen3", enable_thinking = true }

[scheduler]
policy = "elastic"
num_cells = 3
slots_per_cell = 12
steps = %d
groups_per_step = %d
executions_per_group = %d

[runtime]
name = "made-up"
seed = 0
"""
SECONDS_PER_EXECUTION: Final = 4.0
NUM_CONCURRENT: Final = 32
"""Executions whose records are interleaved in the journal."""


class MadeUpRun(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything there is."""

    num_executions: int
    executions_per_group: int = 8
    groups_per_step: int = 6
    num_tasks: int = 40
    num_calls: int = 5
    """Of the main agent."""
    seed: int = 0
    is_finished: bool = True
    name: str = "made-up"
    learning_rate: float = 1e-5
    num_gateways: int = 1

    @property
    def num_groups(self) -> int:
        return max(1, self.num_executions // self.executions_per_group)

    @property
    def num_steps(self) -> int:
        return self.num_groups // self.groups_per_step


def write_made_up_run(runs_dir: Path, run: MadeUpRun) -> RunFolder:
    """A new run folder `runs_dir/NAME`, as a run of this size leaves it."""
    folder = RunFolder(runs_dir / run.name)
    for inner in (folder.path, folder.journal, folder.workspaces, folder.logs):
        inner.mkdir(parents=True)
    head = CONFIG % (max(1, run.num_steps), run.groups_per_step, run.executions_per_group)
    folder.config.write_text(f"{head}\n[trainer]\nlearning_rate = {run.learning_rate!r}\n", encoding="utf-8")
    write_byte_tokenizer(folder.policy)
    outcomes = [_outcome(run, number) for number in range(run.num_groups * run.executions_per_group)]
    with Journal.open(folder.controller_journal, ControllerRecord) as journal:
        for record in _controller_records(run, outcomes):
            journal.append(record)
    writer = _Conversations(run)
    with contextlib.ExitStack() as stack:
        parts = [folder.gateway_journal_of(number) for number in range(run.num_gateways)]
        journals = [stack.enter_context(Journal.open(part, GatewayRecord)) for part in parts]
        for told in writer.records(len(outcomes)):
            journals[told.session % run.num_gateways].append(told)
    with Journal.open(folder.trained_journal, MicroStep) as journal:
        for micro_step in _micro_steps(run, outcomes):
            journal.append(micro_step)
    with Metrics(folder) as metrics:
        for line in _metrics(run, outcomes):
            metrics.record(line)
    write_summary(folder.summary, _summary(run, outcomes))
    _keep(folder, run)
    return folder


def task_of(run: MadeUpRun, group: int) -> str:
    return f"task-{group % run.num_tasks:03d}"


def _outcome(run: MadeUpRun, number: int) -> Outcome:
    """Rewards rise with the steps and differ by task; every 37th execution fails in one of several ways."""
    draw = np.random.default_rng([run.seed, number])
    group = number // run.executions_per_group
    if number % 37 == 36:
        end = (End.CRASHED, End.NEVER_CALLED, End.OVERALL_TIMEOUT)[number // 37 % 3]
        validity = Validity.DROPPED if end is End.OVERALL_TIMEOUT else Validity.PLACEHOLDER
        return Outcome(
            end, validity, 0.0, "", 3.0, exit_code=1, detail=f"exit 1: the tool is missing {HOSTILE if number == 36 else ''}"
        )
    ease = 0.15 + 0.7 * (group % run.num_tasks) / run.num_tasks
    chance = min(0.98, ease * (0.4 + 0.9 * group / max(1, run.num_groups)))
    score = float(np.round(draw.binomial(4, chance) / 4, 2))
    return Outcome(End.EXITED, Validity.VALID, score, f"{number:032x}", 2.0 + float(draw.random()), exit_code=0)


def _controller_records(run: MadeUpRun, outcomes: Sequence[Outcome]) -> Iterator[ControllerRecord]:
    yield RunOpened(0, 0.0, "2026-01-01T00:00:00+00:00")
    yield ev.RunStarted(0.0)
    N, at = run.executions_per_group, 0.0
    for group in range(run.num_groups):
        step = group // run.groups_per_step
        names = [execution_id(group, index) for index in range(N)]
        yield Decided(
            (
                cmd.Dispatch(GroupId(group), "train", step, N),
                *(cmd.Start(name, 0, ServerId(f"cell-{index % 3}")) for index, name in enumerate(names)),
            )
        )
        for index, name in enumerate(names):
            at += SECONDS_PER_EXECUTION / NUM_CONCURRENT
            outcome = outcomes[group * N + index]
            yield ExecutionDone(name, GroupId(group), 0, task_of(run, group), 1.0, outcome, _counts(run, group * N + index), at)
            yield ev.ExecutionEnded(at, name, 0)
            yield Decided(())
        yield ev.GroupReady(at, GroupId(group), (), N)
        taken = (cmd.TakeGroup(GroupId(group), step, 0),) if step < run.num_steps else ()
        yield Decided(taken)
    if run.is_finished:
        yield ev.CheckpointSaved(at, run.num_steps)
        yield Decided((cmd.FinishRun(run.num_steps),))


def _has_sub_agent(number: int) -> bool:
    return number % 5 == 1


def _is_compacted(number: int) -> bool:
    return number % 7 == 2


def _is_retried(number: int) -> bool:
    return number % 4 == 3


def _counts(run: MadeUpRun, number: int) -> CallCounts:
    sub, compacted = int(_has_sub_agent(number)), int(_is_compacted(number))
    calls = run.num_calls + 2 * sub + 2 * compacted + int(_is_retried(number))
    return CallCounts(calls, calls * 60, calls * 150, compacted, sub, int(number % 11 == 0))


class _Conversations:
    """Makes the records of executions; texts that come again are encoded once."""

    def __init__(self, run: MadeUpRun):
        self._run, self._tokenizer = run, byte_tokenizer()
        self._known: dict[str, np.ndarray] = {}

    def records(self, num_executions: int) -> Iterator[GatewayRecord]:
        """Of `NUM_CONCURRENT` executions side by side."""
        for first in range(0, num_executions, NUM_CONCURRENT):
            open_now = [self.of_execution(number) for number in range(first, min(num_executions, first + NUM_CONCURRENT))]
            while open_now:
                for records in list(open_now):
                    record = next(records, None)
                    if record is None:
                        open_now.remove(records)
                    else:
                        yield record

    def of_execution(self, number: int) -> Iterator[GatewayRecord]:
        run = self._run
        name = execution_id(number // run.executions_per_group, number % run.executions_per_group)
        version = number // (run.executions_per_group * run.groups_per_step)
        yield Opened(number, name, 0, number, 1.0, True, 4096, 160, "policy")
        at = 100.0 + number
        for call, (base, kept, context, answer, hints, cause) in enumerate(self._calls(name, number)):
            context_T, answer_T = self._encoded(context), self._encoded(answer)
            yield CallStarted(
                number, call, base, kept, pack(context_T, TOKEN), BranchCause(cause), hints, at + call, b"", 0, 0, "chat"
            )  # fmt: skip
            draw = np.random.default_rng([run.seed, number, call])
            half = len(answer_T) // 2
            for part_T, by in ((answer_T[:half], version), (answer_T[half:], version + int(number % 13 == 0))):
                logprobs = -draw.exponential(0.25, len(part_T)).astype(np.float32)
                yield TokensSampled(
                    number, call, pack(part_T, TOKEN), pack(logprobs, LOGPROB), by, ServerId(f"cell-{number % 3}")
                )
            is_cut = cause == "root" and _is_retried(number) and call == 0
            yield CallFinished(number, call, "stop", len(answer_T), kept, is_cut, at + call + 0.5, 0, 0.0, "", len(answer_T))
        yield Closed(number)

    def _encoded(self, text: str) -> np.ndarray:
        known = self._known.get(text)
        if known is None:
            known = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, TOKEN)
            if len(self._known) < 4096:
                self._known[text] = known
        return known

    def _calls(self, name: ExecutionId, number: int) -> Iterator[tuple[int, int, str, str, RoleHints, str]]:
        """(base, tokens kept of it, new context, answer, hints, cause) of each call."""
        main = RoleHints("chat", system_digest="main", num_tools=2)
        task = task_of(self._run, number // self._run.executions_per_group)
        rows: list[int] = []

        def call(
            base: int, kept: int, context: str, answer: str, hints: RoleHints, cause: str
        ) -> tuple[int, int, str, str, RoleHints, str]:
            rows.append(kept + len(self._encoded(context)) + len(self._encoded(answer)))
            return base, kept, context, answer, hints, cause

        begin = _system("You are a coding agent.", 2) + _user(f"Mend {task}: its tests fail.\n{'Detail. ' * 12}") + _ASSISTANT
        yield call(-1, 0, begin, _answer("First I look at the files.", "run", {"command": "ls -la"}), main, "root")
        last = 0
        if _is_retried(number):
            yield call(0, len(self._encoded(begin)), "", _answer("I list the files.", "run", {"command": "ls"}), main, "retry")
            last = 1
        for turn in range(1, self._run.num_calls):
            result = HOSTILE if number % 3 == 0 and turn == 1 else f"a.py\nb.py\n{number} {turn} " + "line of output\n" * 4
            said = _answer(f"Turn {turn}.", "write_file", {"path": "a.py", "content": f"x = {turn}\n"})
            is_last = turn == self._run.num_calls - 1
            yield call(
                last,
                rows[last],
                _tool(result) + _ASSISTANT,
                "All tests pass now.<|im_end|>" if is_last else said,
                main,
                "extends",
            )
            last = len(rows) - 1
        if _has_sub_agent(number):
            sub = RoleHints("chat", system_digest="sub", num_tools=1)
            begin = _system("You search code.", 1) + _user("Where is parse defined?") + _ASSISTANT
            yield call(-1, 0, begin, _answer("", "grep", {"pattern": "def parse"}), sub, "root")
            yield call(
                len(rows) - 1, rows[-1], _tool("a.py:3: def parse") + _ASSISTANT, "In a.py, line 3.<|im_end|>", sub, "extends"
            )
        if _is_compacted(number):
            ask = _user("Summarize the work so far.") + _ASSISTANT
            yield call(last, rows[last], "\n" + ask, "The files were read; a.py is mended.<|im_end|>", main, "extends")
            summary = CallId(f"{name}/c{len(rows) - 1}")
            again = _system("You are a coding agent.", 2) + _user("Summary: the files were read; a.py is mended.") + _ASSISTANT
            hints = msgspec.structs.replace(main, quotes=summary)
            yield call(-1, 0, again, "Done.<|im_end|>", hints, "root")


_ASSISTANT: Final = "<|im_start|>assistant\n"


def _system(text: str, num_tools: int) -> str:
    tools = "\n".join(json.dumps({"type": "function", "function": {"name": f"tool_{n}"}}) for n in range(num_tools))
    return f"<|im_start|>system\n{text}\n\n# Tools\n<tools>\n{tools}\n</tools><|im_end|>\n"


def _user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def _tool(text: str) -> str:
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"


def _answer(text: str, tool: str, arguments: dict[str, str]) -> str:
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<think>\nWhat is to be done? {text}\n</think>\n\n{text}\n<tool_call>\n{call}\n</tool_call><|im_end|>"


def _micro_steps(run: MadeUpRun, outcomes: Sequence[Outcome]) -> Iterator[MicroStep]:
    """Which executions each step trained on, and with which advantage; of their tokens nothing."""
    N = run.executions_per_group
    for group in range(run.num_steps * run.groups_per_step):
        advantages = group_advantages(outcomes[group * N : (group + 1) * N])
        executions = tuple(
            TrainingExecution(execution_id(group, index), GroupId(group), advantage, 1.0, (), 0)
            for index, advantage in enumerate(advantages)
            if advantage
        )
        step = group // run.groups_per_step
        yield MicroStep(f"s{step}-g{group}-m0", step, executions, 0)  # type: ignore[arg-type]


def _metrics(run: MadeUpRun, outcomes: Sequence[Outcome]) -> Iterable[metric.MetricRecord]:
    yield metric.RunBegan(0.0, run.name, "elastic", 3, max(1, run.num_steps))
    yield from (metric.RolesChanged(0.0, cell, "rollout") for cell in range(3))
    per_step, at = run.executions_per_group * run.groups_per_step, 0.0
    yield metric.EvaluationFinished(0.0, 0, 0.21, 0.25, 20, 80)
    for step in range(run.num_steps):
        part = outcomes[step * per_step : (step + 1) * per_step]
        rewards = np.array([outcome.score for outcome in part])
        seconds = per_step * SECONDS_PER_EXECUTION / NUM_CONCURRENT
        yield metric.WaterlevelSampled(at + seconds * 0.1, 30, 36)
        yield metric.RatesSampled(at + seconds * 0.3, 2100.0, 0.0, 2.4)
        yield metric.WaterlevelSampled(at + seconds * 0.6, 14, 24)
        yield metric.RolesChanged(at + seconds * 0.6, 0, "to_training")
        yield metric.RolesChanged(at + seconds * 0.65, 0, "training")
        at += seconds
        yield metric.StepFinished(
            at, step + 1, float(rewards.mean()), float(rewards.std()), run.groups_per_step, len(part), (0,), 1, 9000, 11000,
            0.01, 0.6 * 0.99**step, 0.4, 0.08, 0.0, 0.3, 0.5, 1, 0.3, seconds * 0.4, 2 * len(part), 0.05, 0.0, 1.4, 1.0,
            run.learning_rate, 0.02, run.groups_per_step - 1, len(part), 0, 5 * len(part),
        )  # fmt: skip
        yield metric.RolesChanged(at, 0, "rollout")
    yield metric.EvaluationFinished(at, run.num_steps, 0.64, 0.7, 20, 80)
    if run.is_finished:
        yield metric.RunEnded(at, metric.FINISHED)


def _summary(run: MadeUpRun, outcomes: Sequence[Outcome]) -> Summary:
    return Summary(
        score_before=0.21, score_after=0.64, greedy_before=0.25, greedy_after=0.7, steps=run.num_steps,
        minutes=len(outcomes) * SECONDS_PER_EXECUTION / NUM_CONCURRENT / 60, executions_finished=len(outcomes),
        calls_moved=len(outcomes) // 11, idle_share=0.3,
    )  # fmt: skip


def _keep(folder: RunFolder, run: MadeUpRun) -> None:
    """The workspace of the first execution, with a link out of it as a harness may leave one."""
    kept = folder.workspaces / f"{execution_id(0, 0)}.0"
    (kept / "workspace" / "src").mkdir(parents=True)
    (kept / "harness.log").write_text(f"step 1\n{HOSTILE}\n", encoding="utf-8")
    (kept / "verifier.log").write_text("3 of 4 tests pass\n", encoding="utf-8")
    (kept / "workspace" / "src" / "a.py").write_text("x = 4\n", encoding="utf-8")
    (kept / "workspace" / "picture.bin").write_bytes(b"\0\1\2")
    (kept / "workspace" / "out").symlink_to(folder.config.resolve())
    (kept / "workspace" / "away").symlink_to(folder.path.resolve())
    (folder.logs / "controller.log").write_text(f"run_opened name={run.name}\n", encoding="utf-8")
