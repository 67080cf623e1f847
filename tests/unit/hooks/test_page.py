"""The examples of docs/hooks.md, as a run would use them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from qwengyre.core.records import End, Outcome, Validity
from qwengyre.hooks.callbacks import Callbacks, ExecutionOver, WeightsPublished
from qwengyre.hooks.config import HooksConfig
from qwengyre.hooks.judge import GroupToJudge, Judge
from qwengyre.hooks.loaded import LoadedHooks, load_hooks
from qwengyre.hooks.rewards import rewarded
from qwengyre.hooks.task_source import GroupResult, SourcedTasks, TaskProgress
from qwengyre.hooks.token_loss import checked
from qwengyre.hooks.views import ScoredExecution, Transcript
from qwengyre.hooks.workspace import LeftWorkspace
from qwengyre.sandbox.task import Task
from qwengyre.telemetry.records import StepFinished
from qwengyre.testing.call_records import call_records, tree_of
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.objectives import TokenBatch, coefficients
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.process import FinishedExecution, process_group
from qwengyre.trajectory.roles import assign_roles

PAGE = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.S | re.M)
RUN_FILE = tomllib.loads(re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)[0])


@pytest.fixture
def hooks(tmp_path: Path) -> LoadedHooks:
    """All hooks of the page, out of files as the page shows them."""
    for name, text in BLOCKS:
        (tmp_path / name).write_text(text)
    return load_hooks(HooksConfig(folder=str(tmp_path), **RUN_FILE["hooks"]), RUN_FILE["tasks"]["source"])


@pytest.fixture
def step_finished() -> StepFinished:
    """Step 4, mean reward 0.5."""
    numbers = {
        key: 0 for key in ("joins_mid_step", "tokens_trained", "tokens_distinct", "staleness_max", "num_groups", "num_executions")
    }
    means = {
        key: 0.0 for key in ("reward_std", "loss", "entropy", "gradient_norm", "clip_fraction", "log_ratio_mean", "log_ratio_max")
    }
    rest = {key: 0.0 for key in ("staleness_mean", "token_staleness_mean", "seconds")}
    return StepFinished(9.0, step=4, reward_mean=0.5, members=(0,), **numbers, **means, **rest)


def outcome(score: float, validity: Validity = Validity.VALID) -> Outcome:
    return Outcome(End.EXITED, validity, score, "digest", 1.0)


def branching(execution: str, rows: tuple[int, ...]):
    calls = [call_records(index, [1 + index], [2] * length, at=index) for index, length in enumerate(rows)]
    return tree_of(*calls, execution=execution)


def judge_of(hooks: LoadedHooks, **config) -> Judge:
    return Judge(hooks.group_filter, hooks.advantage, hooks.choice, TrajectoryConfig(**config), seed=0, rules=())


def group_of(scores: list[float], rows: tuple[int, ...] = (4, 9, 2)) -> GroupToJudge:
    names = [f"e000003-{index}" for index in range(len(scores))]
    ended = (FinishedExecution(name, branching(name, rows), outcome(score)) for name, score in zip(names, scores, strict=True))
    return GroupToJudge(3, "task", 1, tuple(ended))


@pytest.mark.parametrize(("num_tokens", "expected"), [(1500, 0.75), (3000, 0.65)])
def test_the_reward_is_less_for_every_token_beyond_the_free_ones(hooks, tmp_path, num_tokens, expected):
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "answer").write_text("42")
    tree = branching("e000003-0", (num_tokens,))
    scored = ScoredExecution(
        execution="e000003-0",
        attempt=0,
        task="t",
        task_folder="/t",
        instruction="do",
        kind="train",
        score=0.75,
        reward_range=(0.0, 1.0),
        end=End.EXITED,
        duration_s=1.0,
        workspace=LeftWorkspace(tmp_path / "left"),
        transcript=Transcript(tree, assign_roles(tree.calls), str),
    )
    made = rewarded(hooks.reward, scored, outcome(0.75))
    assert made.score == pytest.approx(expected) and made.task_score == 0.75
    (tmp_path / "left" / "answer").unlink()
    assert rewarded(hooks.reward, scored, outcome(0.75)).score == 0.0


def test_leave_one_out_takes_the_mean_of_the_others(hooks):
    assert judge_of(hooks).judge(group_of([1.0, 0.0, 0.5])).advantages == pytest.approx((0.75, -0.75, 0.0))


@pytest.mark.parametrize("scores", [[1.0, 1.0], [0.0, 0.0]])
def test_a_group_that_the_filter_refuses_trains_nothing_and_counts_nowhere(hooks, scores):
    group = group_of(scores)
    judgement = judge_of(hooks).judge(group)
    assert judgement.advantages == (None, None)
    assert process_group(3, group.finished, TrajectoryConfig(), seed=0, judgement=judgement) == []


def test_the_longest_path_alone_is_trained(hooks):
    group = group_of([1.0, 0.0])
    judgement = judge_of(hooks).judge(group)
    processed = process_group(3, group.finished, TrajectoryConfig(), seed=0, judgement=judgement)
    assert [[path.num_tokens for path in one.trajectories] for one in processed] == [[10], [10]]
    assert [one.num_trainable for one in processed] == [9, 9]


def test_the_token_loss_weighs_every_token_of_a_trajectory_alike(hooks):
    logp_O = torch.tensor([-1.0, -1.5, -2.0], requires_grad=True)
    behavior_O = torch.tensor([-1.0, -1.0, -1.0])
    batch = TokenBatch(logp_O, behavior_O, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    config = TrainerConfig(objective="cispo", clip_low=0.5, clip_high=0.5)
    coef_O, loss = coefficients(batch, torch.ones(3), config, checked(hooks.token_loss))
    first, second = np.exp(-0.25), 0.5  # the second ratio, e^-1, is raised to the lower bound
    assert coef_O.tolist() == pytest.approx([-first, -first, second])
    assert loss.capped_O.tolist() == [False, False, True]


def over(number: int) -> ExecutionOver:
    return ExecutionOver(1.0, f"e000000-{number}", 0, "train", "task", 0.25, 0.25, "valid", "exited", 2, 30, 4.0)


def test_the_callback_writes_a_line_for_each_execution_and_step(hooks, tmp_path, step_finished):
    callbacks = Callbacks(hooks.callbacks, tmp_path, print)
    for number in range(3):
        callbacks.tell("on_execution", over(number))
    callbacks.tell("on_step", step_finished)
    callbacks.tell("on_publish", WeightsPublished(2.0, 1))
    callbacks.close(60.0)
    assert (tmp_path / "rewards.csv").read_text().splitlines() == [
        *(f"execution,e000000-{number},task,0.25" for number in range(3)),
        "step,4,,0.5",
    ]


def test_the_curriculum_leaves_what_is_solved_behind(hooks):
    known = {name: Task(name, f"/{name}", "do", 1.0, 1.0) for name in ("a", "b", "c", "d")}
    progress = TaskProgress(0, tuple(known))
    source = SourcedTasks(hooks.source, progress, known, pytest.fail, num_taken=0)
    assert [source.next().name for _ in range(4)] == ["a", "b", "c", "a"]
    progress.see(GroupResult(0, "a", 0, (1.0, 0.5), 0))
    progress.see(GroupResult(1, "b", 0, (1.0, 0.9), 1))
    assert [source.next().name for _ in range(3)] == ["c", "d", "a"]
    again = SourcedTasks(hooks.source, progress, known, pytest.fail, num_taken=7)
    assert [again.next().name, source.next().name] == ["c", "c"]
