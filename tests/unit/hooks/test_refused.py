"""What a hook may not return is refused by name; nothing is guessed."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading

import msgspec
import numpy as np
import pytest
import torch

from qwengyre.core.errors import ConfigError, HookFailed
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.hooks import callbacks as module
from qwengyre.hooks.callbacks import Callbacks, WeightsPublished, load_callbacks
from qwengyre.hooks.judge import GroupToJudge, Judge
from qwengyre.hooks.load import Hook, HookRef
from qwengyre.hooks.rewards import rewarded
from qwengyre.hooks.task_source import SourcedTasks, TaskProgress
from qwengyre.hooks.threads import HookThreads
from qwengyre.hooks.token_loss import checked
from qwengyre.hooks.workspace import LeftWorkspace
from qwengyre.sandbox.task import Task, load_task
from qwengyre.testing.call_records import call_records, tree_of
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.objectives import TokenBatch, TokenLoss, coefficients, token_clipped
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.trajectory.process import FinishedExecution, Judgement, process_group


def hook(function, key: str = "hooks.any") -> Hook:
    return Hook(HookRef(key, "rules:it", "/rules"), function, "/rules/rules.py", 7)


def outcome(score: float = 0.5, validity: Validity = Validity.VALID) -> Outcome:
    return Outcome(End.EXITED, validity, score, "digest", 1.0)


class Execution:
    execution = "e000000-0"


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True, 1j, np.zeros(2), torch.tensor(math.nan)])
def test_a_reward_is_a_finite_number(value):
    with pytest.raises(HookFailed, match=r"rules\.py:7: hooks\.any: rules:it returned .* for e000000-0"):
        rewarded(hook(lambda execution: value), Execution(), outcome())


@pytest.mark.parametrize("value", [-3, 2.5, np.float32(0.25), np.array(1), torch.tensor(0.5)])
def test_any_kind_of_finite_number_is_a_reward(value):
    made = rewarded(hook(lambda execution: value), Execution(), outcome(0.5))
    assert made.score == float(value) and type(made.score) is float and made.task_score == 0.5


def finished(scores: list[float | None]) -> tuple[FinishedExecution, ...]:
    """None: dropped."""
    found = []
    for index, score in enumerate(scores):
        calls = [call_records(0, [1], [2] * 4), call_records(1, [3], [4] * 6, at=1)]
        made = outcome(0.0, Validity.DROPPED) if score is None else outcome(score)
        found.append(FinishedExecution(f"e000000-{index}", tree_of(*calls, execution=f"e000000-{index}"), made))
    return tuple(found)


def judge(scores=(1.0, 0.0), *, group_filter=None, advantage=None, choice=None, **config) -> Judgement:
    hooks = [function and hook(function) for function in (group_filter, advantage, choice)]
    made = Judge(*hooks, TrajectoryConfig(**config), seed=0, rules=())
    return made.judge(GroupToJudge(0, "t", 0, finished(list(scores))))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"group_filter": lambda group: None}, "must return True or False"),
        ({"group_filter": lambda group: 1}, "must return True or False"),
        ({"advantage": lambda group: 1.0}, "must return 2 advantages"),
        ({"advantage": lambda group: [1.0]}, "returned 1 advantages for the 2 executions"),
        ({"advantage": lambda group: [1.0, math.nan]}, "returned nan for e000000-1"),
        ({"advantage": lambda group: ["a", 0.0]}, "for e000000-0: it must return a number"),
        ({"choice": lambda paths: 0}, "must return places in its 2 candidates"),
        ({"choice": lambda paths: [2]}, "numbered from 0 to 1"),
        ({"choice": lambda paths: [-1]}, "numbered from 0 to 1"),
        ({"choice": lambda paths: [0, 0]}, "candidate 0 is there twice"),
        ({"choice": lambda paths: [0.0]}, "is no place"),
        ({"choice": lambda paths: [0, 1], "j_max": 1}, "at most 1 may be chosen"),
    ],
)
def test_what_is_no_judgement_of_a_group_is_refused(rule, message):
    with pytest.raises(HookFailed, match=message):
        judge(**rule)


def test_dropped_executions_are_not_shown_and_stay_dropped():
    seen = []
    made = judge([1.0, None, 0.25], advantage=lambda group: seen.append(group.rewards) or [3.0, None])
    assert seen == [(1.0, 0.25)] and made.advantages == (3.0, None, None)


def test_a_choice_is_asked_for_what_is_trained_only_and_keeps_its_order():
    asked = []
    made = judge([1.0, 0.5, 0.0], choice=lambda paths: asked.append(paths.execution) or np.array([1, 0]))
    assert asked == ["e000000-0", "e000000-2"] and made.choices == ((1, 0), None, (1, 0))
    processed = process_group(0, finished([1.0, 0.5, 0.0]), TrajectoryConfig(), seed=0, judgement=made)
    assert [path.num_tokens for path in processed[0].trajectories] == [7, 5]


def test_the_choice_has_randomness_of_its_own_that_repeats():
    def drawn(paths):
        return [int(paths.rng.integers(2))]

    assert judge(choice=drawn) == judge(choice=drawn)


def test_a_judgement_survives_the_journal():
    made = judge([1.0, None, 0.25], advantage=lambda group: [3.0, None], choice=lambda paths: [1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Judgement) == made


def batch() -> TokenBatch:
    logp_O = torch.tensor([-1.0, -2.0], requires_grad=True)
    return TokenBatch(logp_O, torch.tensor([-1.0, -1.0]), torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.tensor([2]))


NONE = torch.zeros(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda batch, config: 0.5, "returned float: it must return a TokenLoss"),
        (lambda batch, config: -batch.logp_O.mean(), r"loss_O of shape \(\) for 2 tokens"),
        (lambda batch, config: -batch.logp_O.detach(), "do not depend on batch.logp_O"),
        (lambda batch, config: batch.logp_O * math.nan, "returned nan for a token of log-prob -1, recorded -1, advantage 1"),
        (lambda batch, config: TokenLoss(batch.logp_O, NONE, NONE[:1]), r"capped_O of shape \(1,\)"),
        (lambda batch, config: TokenLoss(batch.logp_O, NONE.float(), NONE), "clipped_O of torch.float32: it must hold booleans"),
        (lambda batch, config: TokenLoss(batch.logp_O, None, NONE), "returned NoneType as clipped_O"),
        (lambda batch, config: batch.nothing, "raised AttributeError"),
    ],
)
def test_what_is_no_token_loss_is_refused(loss, message):
    with pytest.raises(HookFailed, match=message):
        coefficients(batch(), torch.ones(2), TrainerConfig(), checked(hook(loss)))


def test_a_built_in_objective_as_a_hook_makes_the_same_gradient():
    config = TrainerConfig(objective="grpo")
    own, _ = coefficients(batch(), torch.ones(2), config, checked(hook(token_clipped)))
    built_in, _ = coefficients(batch(), torch.ones(2), config)
    assert torch.equal(own, built_in)


async def test_a_hook_that_hangs_is_named_and_left_behind():
    is_over = threading.Event()
    try:
        with pytest.raises(HookFailed, match=r"hooks.reward: it took more than 0.01 s \(hooks.timeout_s\)"):
            await HookThreads(1, 0.01).call("hooks.reward", is_over.wait)
    finally:
        is_over.set()


async def test_no_more_calls_than_threads_run_at_once():
    threads, running, most, lock = HookThreads(2, 60.0), 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def job():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(60)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.call("hooks.reward", job) for _ in range(6)))
    assert most == 2


def test_what_a_policy_left_is_read_without_following_links(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    root = tmp_path / "workspace"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.py").write_text("x = 1")
    (root / "link").symlink_to(secret)
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    left = LeftWorkspace(root)
    assert left.files() == ["src/a.py"] and left.read_text("src/a.py") == "x = 1"
    assert left.has("src/a.py") and not any(left.has(name) for name in ("link", "out/secret", "pipe", "src", "../secret", "gone"))
    for name in ("link", "out/secret"):
        with pytest.raises(OSError):
            left.read_bytes(name)
    for name in ("../secret", str(secret), "pipe", "", "src"):
        with pytest.raises((ValueError, OSError)):
            left.read_bytes(name)
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        left.read_bytes("src/a.py", max_bytes=3)


def source(make, **given) -> SourcedTasks:
    known = {"a": Task("a", "/a", "do", 1.0, 1.0)}
    return SourcedTasks(hook(make, "tasks.source"), TaskProgress(0, ("a",)), known, load_task, given.get("num_taken", 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda progress: 3, "returned int: it must return an iterator"),
        (lambda progress: iter(()), "ended after 0 tasks, and the run needs another"),
        (lambda progress: iter([3]), r"yielded 3 \(int\)"),
        (lambda progress: iter(["b"]), "neither a task of tasks.train nor a folder"),
        (lambda progress: iter(["/"]), "yielded a task that cannot be used: .*missing"),
        (lambda progress: (1 / 0 for _ in "a"), "raised ZeroDivisionError"),
    ],
)
def test_what_is_no_source_of_tasks_is_refused(make, message):
    with pytest.raises(HookFailed, match=message):
        source(make).next()


def test_a_restart_drops_what_was_dispatched():
    def numbered(progress):
        for _ in range(3):
            yield "nothing"
        yield "a"

    assert source(numbered, num_taken=3).next().name == "a"


class Slow:
    """Waits for `go` before each event."""

    go = threading.Event()

    def __init__(self, folder) -> None:
        self.heard: list[int] = []

    def on_publish(self, published) -> None:
        self.go.wait(60)
        self.heard.append(published.version)


class Raises(Slow):
    def on_publish(self, published) -> None:
        super().on_publish(published)
        raise ValueError(f"no {published.version}")


def test_a_slow_callback_hears_all_in_order_and_one_that_raises_is_named_once(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(module, "MAX_WAITING", 20)
    callbacks = Callbacks((hook(Slow, "hooks.callbacks"), hook(Raises, "hooks.callbacks")), tmp_path, said.append)
    Slow.go.clear()
    for version in range(40):
        callbacks.tell("on_publish", WeightsPublished(0.0, version))
    Slow.go.set()
    callbacks.close(60.0)
    assert 18 <= callbacks.num_dropped <= 20  # one or two of them are out of the queue already
    heard = [made.heard for _, made in callbacks._told]
    assert heard == [list(range(40 - callbacks.num_dropped))] * 2
    assert len([line for line in said if "ValueError: no 0" in line and "The run goes on" in line]) == 1
    assert any(f"{callbacks.num_dropped} events were dropped" in line for line in said)
    callbacks.tell("on_publish", WeightsPublished(0.0, 99))  # after the end: nobody hears it


def test_a_callback_that_hangs_is_left_behind(tmp_path):
    said: list[str] = []
    Slow.go.clear()
    callbacks = Callbacks((hook(Slow, "hooks.callbacks"),), tmp_path, said.append)
    callbacks.tell("on_publish", WeightsPublished(0.0, 1))
    callbacks.close(0.01)
    Slow.go.set()
    assert "left behind" in said[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def Log(folder): ...", "is no class"),
        ("class Log:\n    def __init__(self, folder): ...", "has no method to call: there are on_step"),
        ("class Log:\n    def __init__(self, folder): ...\n    def on_stpe(self, event): ...", "Did you mean on_step"),
        (
            "class Log:\n    def __init__(self, folder): ...\n    def on_step(self): ...",
            "on_step, which cannot be called with one event",
        ),
        ("class Log:\n    def __init__(self, folder): ...\n    async def on_step(self, event): ...", "on_step as a coroutine"),
        ("class Log:\n    def on_step(self, event): ...", "cannot be called with"),
    ],
)
def test_what_is_no_callback_is_refused(tmp_path, text, message):
    (tmp_path / "callbacks_of_test.py").write_text(text)
    try:
        with pytest.raises(ConfigError, match=message):
            load_callbacks("callbacks_of_test:Log", str(tmp_path))
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("callbacks_of_test", None)
