"""Random answers of policies that write well, badly or not at all, and what must hold for them: any chunking says what
`parse_response` reads in the whole."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from qwengyre.gateway.protocol.deltas import AnswerSoFar, Delta, TextDelta
from qwengyre.gateway.rendering import Rendering
from qwengyre.gateway.templates.formats import keeps_white_space
from qwengyre.gateway.templates.probes import renderer_tools
from qwengyre.testing.renderers import ANSWER_FORMATS, CONTROL_TOKENS, AnswerFormat
from qwengyre.testing.tokenizers import MARKUP
from qwengyre.trajectory.match import Turn

TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs it.",
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}},
            },
        },
    },
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}},
)
_TEXTS: Final = (
    *(
        "hi",
        " ",
        "\n",
        "  x ",
        "\u00e9",
        "\u65e5\u672c",
        "\U0001f600",
        "\n\n",
        "{",
        "}",
        "[1]",
        "a=b",
        "5",
        "True",
        "five",
        "null",
    ),
    *('{"a": 1}', "'", '"', "\\", "<", ">", "&", "</", "<tool", "</parameter", "<think", "</think", "_call>"),
)
_VALUES: Final = (
    *("ls", "five", 5, 1.5, True, None, [1, "x"], {"k": "v"}, "multi\nline", " sp ", "\u00e9\U0001f600", "", "</parameter>", "<"),
    *('q"q', "x" * 200, "True", "[1, 2", "</invoke>", "\\ud83d"),
)
"""Strings are shorter than `calls.HELD_CHARS`: a longer one is told before it is known to be closed."""
_DROPS_TEXT: Final = ("gemma4", "inkling")
"""Their `parse_response` forgets a text when reasoning is begun after it and not ended. A client has seen the text by then."""


def random_answer(rnd: random.Random, renderer: str, rendering: Rendering) -> list[int]:
    """Tokens of one answer: some whole, some cut at any token, some with bytes that are not text."""
    form = ANSWER_FORMATS[renderer]
    pieces = "".join(_piece(rnd, renderer, form) for _ in range(rnd.randrange(7)))
    ids = list(rendering.tokenizer.encode(pieces + (form.end if rnd.random() < 0.6 else "")))
    if rnd.random() < 0.2:
        ids = ids[: rnd.randrange(len(ids) + 1)]
    if rnd.random() < 0.1:
        ids.insert(rnd.randrange(len(ids) + 1), rnd.randrange(128, 256))
    return ids


def _piece(rnd: random.Random, renderer: str, form: AnswerFormat) -> str:
    match rnd.randrange(9):
        case 0:
            return form.think(rnd.choice(_TEXTS) + rnd.choice(_TEXTS))
        case 1:
            return form.text(rnd.choice(_TEXTS) + rnd.choice(_TEXTS))
        case 2 | 3:
            names = rnd.choices(("run", "nope", "f", ""), k=rnd.randrange(1, 3))
            return form.calls("".join(form.call(name, _arguments(rnd)) for name in names))
        case 4:
            whole = form.calls(form.call("run", _arguments(rnd)))
            at = rnd.randrange(len(whole) + 1)
            return whole[:at] + rnd.choice(("", rnd.choice(_TEXTS))) + whole[at + rnd.randrange(12) :]
        case 5:
            return form.call("run", _arguments(rnd))
        case 6 if renderer != "llama-3":  # a header in mid-answer forgets what a client has seen
            return rnd.choice((*CONTROL_TOKENS[renderer], *MARKUP, "<|im_start|>"))
    return rnd.choice(_TEXTS)


def _arguments(rnd: random.Random) -> dict[str, object]:
    return {rnd.choice(("cmd", "n", "b", "zz", "a")): rnd.choice(_VALUES) for _ in range(rnd.randrange(3))}


def prompt_tails(rendering: Rendering, renderer: str) -> list[list[int]]:
    """Ends of prompts: of nothing that is known, of a turn, and what stands before an answer."""
    prompt = rendering.render([Turn(role="user", text="hi")], ()).tolist()
    return [[1], list(rendering.tokenizer.encode("x" + ANSWER_FORMATS[renderer].end + "\n")), prompt]


class Streamed(msgspec.Struct, frozen=True):
    """What a client is told."""

    turn: Turn
    deltas: tuple[Delta, ...]


def streamed(
    rendering: Rendering, ids: Sequence[int], cuts: Sequence[int], tail: Sequence[int], tools: Sequence[dict[str, Any]]
) -> Streamed:
    """An answer in pieces that end at `cuts`."""
    parser = rendering.parser(lambda index: f"call_{index}", tail, tools)
    deltas: list[Delta] = []
    for start, end in itertools.pairwise(sorted({0, len(ids), *cuts})):
        deltas += parser.feed(ids[start:end])
    deltas += parser.finish()
    said = AnswerSoFar()
    for delta in deltas:
        said.add(delta)
    return Streamed(said.turn(), tuple(deltas))


def difference(
    rendering: Rendering, renderer: str, ids: Sequence[int], tail: Sequence[int], tools: Sequence[dict[str, Any]]
) -> str | None:
    """How what is told differs from `parse_response` of the whole; None when it does not."""
    told = streamed(rendering, ids, range(len(ids)), tail, tools)
    try:
        read = rendering.renderer.parse_response(list(ids), tools=renderer_tools(tools), prompt_ids=list(tail))
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
        return None
    if renderer in _DROPS_TEXT and read.reasoning_complete is False:
        return None
    if (told.turn.reasoning or "") != (read.reasoning_content or "").strip():
        return f"reasoning {told.turn.reasoning!r}, not {read.reasoning_content!r}"
    text = "".join(delta.text for delta in told.deltas if isinstance(delta, TextDelta))
    wanted = read.content if keeps_white_space(rendering.renderer) else read.content.strip()
    shows_blocks = not all(map(_must_be_told, read.tool_calls))
    if text != wanted and not (shows_blocks and _is_within(wanted, text)):
        return f"text {text!r}, not {wanted!r}"
    return _difference_of_calls(told.turn, read)


def _difference_of_calls(turn: Turn, read: ParsedResponse) -> str | None:
    """Calls that can be made, in order: those that `parse_response` read, and not one more."""
    told = [(use.name, _loaded(use.arguments)) for use in turn.tool_uses if _is_json(use.arguments)]
    for call in read.tool_calls:
        if not (_must_be_told(call) or call.status is ToolCallParseStatus.UNKNOWN_TOOL):
            continue
        arguments = _loaded(call.arguments) if isinstance(call.arguments, str) else call.arguments
        if told and told[0][0] == call.name and told[0][1] in (arguments, {} if arguments is None else arguments):
            told.pop(0)
        elif _must_be_told(call):
            return f"{call} is not told"
    return f"{told} were not written" if told else None


def _must_be_told(call: ParsedToolCall) -> bool:
    """Whether it can be called as it was written, be it of a tool that nobody offered or with a value of another type."""
    match call.status:
        case ToolCallParseStatus.OK:
            return not isinstance(call.arguments, str) or _is_json(call.arguments)
        case ToolCallParseStatus.UNKNOWN_TOOL:
            return "<arg_key>" not in call.raw  # GLM's says this of calls that are broken, too
    return bool(call.name) and isinstance(call.arguments, dict) and call.status is ToolCallParseStatus.INVALID_JSON


def _is_within(inner: str, outer: str) -> bool:
    """Whether all characters of `inner` stand in `outer` in this order: blocks that are shown stand between them."""
    left = iter(outer)
    return all(char in left for char in inner)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _loaded(text: str) -> object:
    return json.loads(text) if _is_json(text) else text
