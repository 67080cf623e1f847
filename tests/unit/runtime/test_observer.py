"""What a step's numbers become on their way from the trainers to metrics.jsonl."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.dashboard.live import LiveScreen
from qwengyre.dashboard.report import report_html
from qwengyre.dashboard.series import run_series
from qwengyre.runtime.observer import Observer
from qwengyre.runtime.records import CallCounts, ExecutionDone
from qwengyre.runtime.tally import Tally
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import read_metrics
from qwengyre.telemetry.records import StepFinished
from qwengyre.telemetry.summary import read_summary
from qwengyre.trainer.records import MicroStepStats, StepStats


def computed(micro_step: str, **numbers: float) -> MicroStepStats:
    return MicroStepStats(**(dict.fromkeys(MicroStepStats.__struct_fields__, 0) | numbers | {"micro_step": micro_step}))


@pytest.fixture
def observer_of() -> Iterator[Callable[..., Observer]]:
    config = SimpleNamespace(scheduler=SimpleNamespace(num_cells=1, num_standalone=0))
    with contextlib.ExitStack() as stack:

        def made(folder: RunFolder, screen: LiveScreen | None = None) -> Observer:
            observer = Observer(config, folder, screen or LiveScreen(), lambda: 8.0, Tally())
            stack.callback(observer.metrics.close)
            return observer

        yield made


def applied(step: int) -> StepStats:
    return StepStats(
        step=step,
        applied=True,
        reason="",
        num_executions=4,
        gradient_norm=2.0,
        clip_scale=0.5,
        learning_rate=1e-6,
        update_norm=0.125,
        seconds=0.0,
    )


def step_of(observer: Observer, folder: RunFolder, *parts: MicroStepStats) -> StepFinished:
    observer.see_step(applied(0), parts, taken=(), micro_steps=(), done=())
    return next(record for record in read_metrics(folder.metrics) if isinstance(record, StepFinished))


def test_micro_steps_of_a_step_are_added_before_anything_is_divided(tmp_path: Path, observer_of):
    parts = (
        computed("a", loss=1.0, tokens_trained=30, tokens_clipped=12, log_ratio_max=0.5, tokens_distinct=100, tokens_flat=200),
        computed("b", loss=3.0, tokens_trained=10, tokens_capped=4, log_ratio_max=0.25, tokens_distinct=100, tokens_flat=600),
    )
    folder = RunFolder.create(tmp_path, "run", "")
    step = step_of(observer_of(folder), folder, *parts)
    assert (step.loss, step.log_ratio_max, step.deduplication) == (1.0, 0.5, 4.0)
    assert (step.token_clip_fraction, step.token_cap_fraction) == (0.3, 0.1)
    assert (step.gradient_norm, step.clip_scale, step.learning_rate, step.update_norm) == (2.0, 0.5, 1e-6, 0.125)


def test_a_step_that_had_nothing_to_compute_has_no_deduplication(tmp_path: Path, observer_of):
    folder = RunFolder.create(tmp_path, "run", "")
    step = step_of(observer_of(folder), folder)
    assert step.deduplication is None and (step.tokens_trained, step.log_ratio_max) == (0, 0.0)


def done(execution: str, score: float, validity: Validity = Validity.VALID) -> ExecutionDone:
    outcome = Outcome(End.EXITED, validity, score, "digest", 2.5)
    return ExecutionDone(execution, int(execution[1:7]), 0, "task", 1.0, outcome, CallCounts(calls=3), 1.0)


def test_a_run_that_learns_nothing_says_so_after_its_first_step_and_once(tmp_path: Path, observer_of):
    folder, screen = RunFolder.create(tmp_path, "run", ""), LiveScreen(Console(file=io.StringIO(), width=400))
    observer = observer_of(folder, screen)
    for step in range(3):
        observer.see_step(applied(step), (), (), (), [done("e000000-0", 0.0), done("e000000-1", 0.0), done("e000001-0", 0.0)])
        said = screen.console.file.getvalue()
        assert said.count("step 1 taught the policy nothing: every execution scored 0. Look at") == 1
        assert "step 2 taught" not in said
    summary = read_summary(folder.summary)
    assert summary.steps_that_taught_nothing == 3 and "no step taught the policy anything" in summary.note
    assert "No step taught the policy anything: every execution scored 0." in report_html(run_series(folder))


def test_groups_that_scored_differently_are_counted_without_what_was_dropped(tmp_path: Path, observer_of):
    folder = RunFolder.create(tmp_path, "run", "")
    executions = [
        done("e000000-0", 0.0),
        done("e000000-1", 1.0),
        done("e000001-0", 0.5),
        done("e000001-1", 0.0, Validity.DROPPED),
        done("e000002-0", 0.0, Validity.PLACEHOLDER),
        done("e000002-1", 0.5),
    ]
    part = computed("a", tokens_trained=5, trajectories=2)
    observer_of(folder).see_step(applied(0), [part], (), (), executions)
    step = next(record for record in read_metrics(folder.metrics) if isinstance(record, StepFinished))
    assert (step.num_mixed_groups, step.num_scored, step.num_dropped, step.num_calls) == (2, 4, 1, 18)
    assert read_summary(folder.summary).note == ""


def test_tokens_of_lives_that_were_lost_are_in_the_count(tmp_path: Path, observer_of):
    screen = LiveScreen(Console(file=io.StringIO(), width=400))
    observer = observer_of(RunFolder.create(tmp_path, "run", ""), screen)

    def poll(cell: int, life: int, tokens: int) -> None:
        engine = SimpleNamespace(busy_s=0.0, tokens_recomputed_at_publish=0, tokens_generated=tokens)
        live = SimpleNamespace(health=SimpleNamespace(engine=engine), spec=SimpleNamespace(incarnation=life))
        observer._see_health(SimpleNamespace(cells={cell: live}))

    for cell, life, tokens in ((0, 0, 90), (1, 0, 10), (1, 0, 40), (1, 1, 5)):
        poll(cell, life, tokens)
    stats = SimpleNamespace(tokens_sampled=137, calls_started=9, server_errors=0)
    observer.see_calls(SimpleNamespace(stats=stats), [SimpleNamespace(tokens_generated=90), SimpleNamespace(tokens_generated=7)])
    said = " ".join(screen.console.file.getvalue().split())
    assert "engines made 137 tokens (1 lost engines up to their last heartbeat), the gateway recorded 137" in said
