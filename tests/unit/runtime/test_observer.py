"""What a step's numbers become on their way from the trainers to metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from qwengyre.dashboard.live import Screen
from qwengyre.runtime.observer import Observer
from qwengyre.runtime.tally import Tally
from qwengyre.telemetry.folder import RunFolder
from qwengyre.telemetry.metrics import read_metrics
from qwengyre.telemetry.records import StepFinished
from qwengyre.trainer.records import MicroStepStats, StepStats


def computed(micro_step: str, **numbers: float) -> MicroStepStats:
    return MicroStepStats(**(dict.fromkeys(MicroStepStats.__struct_fields__, 0) | numbers | {"micro_step": micro_step}))


def step_of(folder: RunFolder, *parts: MicroStepStats) -> StepFinished:
    config = SimpleNamespace(scheduler=SimpleNamespace(num_cells=1, num_standalone=0))
    observer = Observer(config, folder, Screen(), lambda: 8.0, Tally())
    applied = StepStats(
        step=0,
        applied=True,
        reason="",
        num_executions=4,
        gradient_norm=2.0,
        clip_scale=0.5,
        learning_rate=1e-6,
        update_norm=0.125,
        seconds=0.0,
    )
    observer.see_step(applied, parts, taken=(), micro_steps=(), done=())
    return next(record for record in read_metrics(folder.metrics) if isinstance(record, StepFinished))


def test_micro_steps_of_a_step_are_added_before_anything_is_divided(tmp_path: Path):
    parts = (
        computed("a", loss=1.0, tokens_trained=30, tokens_clipped=12, log_ratio_max=0.5, tokens_distinct=100, tokens_flat=200),
        computed("b", loss=3.0, tokens_trained=10, tokens_capped=4, log_ratio_max=0.25, tokens_distinct=100, tokens_flat=600),
    )
    step = step_of(RunFolder.create(tmp_path, "run", ""), *parts)
    assert (step.loss, step.log_ratio_max, step.deduplication) == (1.0, 0.5, 4.0)
    assert (step.token_clip_fraction, step.token_cap_fraction) == (0.3, 0.1)
    assert (step.gradient_norm, step.clip_scale, step.learning_rate, step.update_norm) == (2.0, 0.5, 1e-6, 0.125)


def test_a_step_that_had_nothing_to_compute_has_no_deduplication(tmp_path: Path):
    step = step_of(RunFolder.create(tmp_path, "run", ""))
    assert step.deduplication is None and (step.tokens_trained, step.log_ratio_max) == (0, 0.0)
