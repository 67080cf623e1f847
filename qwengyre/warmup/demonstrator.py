"""A scripted stand-in for the model: it plays the reference harness as an agent of middling skill would."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from qwengyre.sandbox.families.mini_repositories import CHECK_COMMAND, OPERATORS, WATCH_COMMAND
from qwengyre.warmup.config import WarmupConfig
from qwengyre_harness.agent import SUB_SYSTEM, SUMMARY_REQUEST, Message, Reply, ToolCall

_LINE = re.compile(r"(?P<state>next|wrong)? ?(?P<line>(?P<name>\w)\.py: \w\(x\) is x (?P<word>\w+) (?P<constant>\d+))")
_WORDS = tuple(OPERATORS)
FULL_CONTEXT = 1 << 30


def mistaken(word: str) -> str:
    """The operator that a demonstrator usually takes `word` for: that of the next word.

    >>> mistaken("plus")
    '-'
    """
    return OPERATORS[_WORDS[(_WORDS.index(word) + 1) % len(_WORDS)]]


class Demonstrator:
    """Answers like a model: `Demonstrator(...)(messages, tools)` is what an agent may use as its `complete`.

    Copying is always right; what the operators mean, when to try again and when to stop is where it errs.
    """

    def __init__(self, config: WarmupConfig, rng: np.random.Generator):
        self.config, self.rng = config, rng

    def __call__(self, messages: list[Message], tools: list[dict[str, Any]]) -> Reply:
        seen = messages[-1]["content"]
        if seen == SUMMARY_REQUEST:
            return self._say(f"Go on with {CHECK_COMMAND}.")
        if messages[0]["content"] == SUB_SYSTEM:
            return self._as_sub_agent(messages, seen)
        return self._as_main(messages, seen)

    def _as_main(self, messages: list[Message], seen: str) -> Reply:
        if messages[-1]["role"] == "user":
            return self._run(CHECK_COMMAND)
        if seen.startswith("done:"):
            return self._say(seen)
        lines = list(_LINE.finditer(seen))
        if not lines or (line := lines[-1])["state"] is None:
            return self._run(CHECK_COMMAND)
        if self._happens(self.config.watch):
            return self._run(WATCH_COMMAND)
        if self._happens(self.config.early_stop):
            return self._say("done")
        if line["state"] == "wrong" and not self._happens(self.config.repair):
            return self._run(CHECK_COMMAND)
        if self._happens(self.config.delegate):
            return self._call("delegate", {"task": line["line"]})
        return self._write(line)

    def _as_sub_agent(self, messages: list[Message], seen: str) -> Reply:
        own = _LINE.search(messages[1]["content"])
        if messages[-1]["role"] == "user" and own:
            return self._write(own)
        line = _LINE.search(seen)
        if line and own and line["state"] == "wrong" and line["name"] == own["name"] and self._happens(self.config.repair):
            return self._write(line)
        return self._say("done")

    def _write(self, line: re.Match[str]) -> Reply:
        right, wrong = OPERATORS[line["word"]], mistaken(line["word"])
        others = [symbol for symbol in OPERATORS.values() if symbol not in (right, wrong)]
        draw = self.rng.random()
        if draw < self.config.right_operator:
            symbol = right
        elif draw < self.config.right_operator + self.config.usual_mistake:
            symbol = wrong
        else:
            symbol = str(self.rng.choice(others))
        source = f"def {line['name']}(x):\n    return x {symbol} {line['constant']}\n"
        thoughts = self._ponder(int(line["constant"])) if self._happens(self.config.ponder) else ""
        return self._call("write_file", {"path": f"{line['name']}.py", "content": source}, thoughts)

    def _ponder(self, constant: int) -> str:
        """Counting down, so that the last number says itself that it is the last: a greedy policy must not count for ever."""
        return f"Counting from {constant}: " + " ".join(str(number) for number in range(constant, 0, -1))

    def _run(self, command: str) -> Reply:
        return self._call("run", {"command": command})

    def _call(self, name: str, arguments: dict[str, str], thoughts: str = "") -> Reply:
        return Reply(thoughts, (ToolCall("call", name, json.dumps(arguments)),), self._num_tokens())

    def _say(self, text: str) -> Reply:
        return Reply(text, (), self._num_tokens())

    def _num_tokens(self) -> int:
        return FULL_CONTEXT if self._happens(self.config.compact) else 0

    def _happens(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)
