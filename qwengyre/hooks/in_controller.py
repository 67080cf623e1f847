"""The hooks that the controller calls: each in a thread of its own, with a deadline, and what it said as plain data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from qwengyre.core.records import Outcome
from qwengyre.hooks.config import HooksConfig
from qwengyre.hooks.judge import GroupToJudge, Judge
from qwengyre.hooks.loaded import LoadedHooks
from qwengyre.hooks.rewards import rewarded
from qwengyre.hooks.threads import HookThreads
from qwengyre.hooks.views import Decode, ScoredExecution
from qwengyre.trajectory.process import Judgement


class ControllerHooks:
    def __init__(
        self,
        config: HooksConfig,
        loaded: LoadedHooks,
        judge: Judge,
        open_decode: Callable[[], Decode],
    ) -> None:
        """`open_decode` opens the policy's tokenizer, once, when the first reward is made."""
        self._config, self._loaded, self._judge, self._open_decode = config, loaded, judge, open_decode
        self._threads = HookThreads(config.threads, config.timeout_s)

    @property
    def judges_groups(self) -> bool:
        return self._loaded.judges_groups

    def makes_reward(self, kind: str) -> bool:
        """Of executions of this kind: `train` or `evaluation`."""
        return self._loaded.reward is not None and (kind == "train" or self._config.reward_in_evaluations)

    @cached_property
    def decode(self) -> Decode:
        return self._open_decode()

    async def reward(self, execution: ScoredExecution, outcome: Outcome) -> Outcome:
        """Raises HookFailed."""
        hook = self._loaded.reward
        assert hook is not None, "asked of `makes_reward`"
        return await self._threads.call(hook.ref.key, lambda: rewarded(hook, execution, outcome))

    async def judge(self, given: GroupToJudge) -> Judgement:
        """Raises HookFailed."""
        return await self._threads.call(self._judge.key, lambda: self._judge.judge(given))
