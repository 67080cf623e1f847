"""A policy that plays a script: it knows from the prompt whose call it is and how far that agent has come.

Every answer of an agent ends its text with `[NAME step K]`; harnesses keep it in the history, and the scripted summary repeats the last
one. So the script goes on through retries, compactions and agents that run side by side, whatever the harness rewrites.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from qwengyre.core.errors import EngineUnavailable
from qwengyre.engines.api import GenerateRequest, TokenChunk
from qwengyre.testing.engines import ScriptedEngine
from qwengyre.testing.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
MAIN = "PROBE-MAIN"
SUB = re.compile(r"PROBE-SUB-([A-Z])")
STEP = re.compile(r"\[(MAIN|SUB-[A-Z]) step (\d+)\]")
USER = "<|im_start|>user\n"


class Tool(msgspec.Struct, frozen=True):
    """One tool call of an answer; `arguments` is what the policy writes, byte for byte."""

    name: str
    arguments: str

    @property
    def block(self) -> str:
        return f'<tool_call>\n{{"name": {json.dumps(self.name)}, "arguments": {self.arguments}}}\n</tool_call>'


class Passage(msgspec.Struct, frozen=True):
    """More text of an answer, for harnesses whose tools are written as text."""

    block: str


Step = Callable[[str], Sequence[Tool | Passage]]
"""What one answer holds besides its text, given the prompt's; nothing ends the agent's work."""


class Said(msgspec.Struct, frozen=True):
    """What the policy answered to one prompt, and whose call it knew it to be."""

    role: str
    agent: str
    token_ids: list[int]


class Script(msgspec.Struct, frozen=True):
    main: tuple[Step, ...]
    sub: tuple[Step, ...]
    summary: str
    """Regular expression that is found in the system prompt or in the last user message of a summary call."""
    side: str = "(?!)"
    """The same of a side call that has tools."""

    def answer(self, prompt: str) -> tuple[str, str, str]:
        """Role, agent and text of the answer to a prompt."""
        agent, done = self._agent(prompt)
        if self._is_summary(prompt):
            role = "main-summary" if agent == "MAIN" else "sub-agent-summary"
            return role, agent, f"<summary>\nThe task is {MAIN}; done so far: [{agent} step {done}]\n</summary>"
        if ("# Tools" not in prompt.partition("<|im_end|>")[0] and agent != "MAIN") or re.search(self.side, self._asked(prompt)):
            return "side", "", "A title"
        steps = self.main if agent == "MAIN" else self.sub
        tools = steps[min(done, len(steps) - 1)](prompt)
        text = f"Text that ends in spaces  \n[{agent} step {done + 1}]"
        return "main" if agent == "MAIN" else "sub-agent", agent, "\n".join((text, *(tool.block for tool in tools)))

    def _agent(self, prompt: str) -> tuple[str, int]:
        """Whose prompt this is, and how many steps that agent has made."""
        sub = SUB.search(prompt.partition(USER)[2].partition("<|im_start|>assistant")[0])
        agent = f"SUB-{sub[1]}" if sub and MAIN not in prompt.partition("<|im_start|>assistant")[0] else "MAIN"
        if agent == "MAIN" and MAIN not in prompt:
            return "", 0
        return agent, max((int(number) for name, number in STEP.findall(prompt) if name == agent), default=0)

    def _is_summary(self, prompt: str) -> bool:
        return re.search(self.summary, self._asked(prompt)) is not None

    @staticmethod
    def _asked(prompt: str) -> str:
        """The system prompt, and the last message of the user."""
        return prompt.partition(USER)[0] + prompt.rpartition(USER)[2]


class ScriptedPolicy(ScriptedEngine):
    """An engine that plays a script; paced, and failing in mid-answer as often as `failures_left` says."""

    def __init__(self, script: Script, answers: dict[bytes, Said], *, pace_s: float = 0.0, failures_left: int = 0):
        super().__init__(self._rest, max_context_tokens=1 << 20, tokens_per_chunk=8)
        self._play, self._pace_s, self.failures_left = script, pace_s, failures_left
        self.answers = answers
        """By prompt; shared by the engines of one gateway, so that a call that moves goes on with its answer."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in super().generate(request):
            if self.failures_left and chunk.finish_reason is None:
                self.failures_left -= 1
                raise EngineUnavailable("thrown in by the check")
            await asyncio.sleep(self._pace_s)
            yield chunk

    def _rest(self, request: GenerateRequest) -> list[int]:
        first = request.sampling.first_index
        prompt = request.token_ids[: len(request.token_ids) - 4 * first]
        said = self.answers.get(prompt)
        if said is None:
            role, agent, text = self._play.answer(TOKENIZER.decode(list(memoryview(prompt).cast("i")), skip_special_tokens=False))
            said = self.answers[prompt] = Said(role, agent, TOKENIZER.encode(f"{text}<|im_end|>").ids)
        return said.token_ids[first:]
