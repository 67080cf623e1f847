"""Turns to tokens and tokens to answers, by the `renderers` package. Legend: `T` tokens.

What was sampled keeps its own tokens: a context that continues after an answer is `row of that answer + new tokens`.
Only where the template cannot go on (it strips old reasoning, say) everything is rendered anew, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np
from renderers.base import Message, ParsedToolCall, Renderer, ToolCallParseStatus, ToolSpec

from qwengyre.core.arrays import TOKEN
from qwengyre.core.errors import ConfigError
from qwengyre.gateway.protocol.answer import AnswerStart, Parsed, ParsedBlock, Parser
from qwengyre.gateway.protocol.calls import IsString
from qwengyre.gateway.protocol.conversation import Settled, settle, with_tools
from qwengyre.gateway.protocol.fields import Json
from qwengyre.gateway.protocol.parse import WholeParser
from qwengyre.gateway.protocol.said import NewToolId, json_text, value_of
from qwengyre.gateway.protocol.surrogates import mended
from qwengyre.gateway.templates.abilities import abilities_of
from qwengyre.gateway.templates.formats import keeps_white_space, new_parser_for
from qwengyre.gateway.templates.found import settings_for
from qwengyre.gateway.templates.make import Settings, make_renderer
from qwengyre.gateway.templates.own import OwnTemplateRenderer
from qwengyre.gateway.templates.probes import renderer_tools
from qwengyre.gateway.tokenizer import FastTokenizer
from qwengyre.trajectory.match import Turn

TAIL_TOKENS = 4096
"""How much of a prompt the bridge may look at. Renderers look for the last turn's opening only."""


PARSED_TAIL_TOKENS = 128
"""How much of a prompt tells in which channel the answer begins: more than any generation prompt has."""
KEPT_TOOL_LISTS = 256  # a cache: the oldest goes first
END_TOKENS = 64
"""How far from the end of an answer the end of its last tool call is looked for."""


class How(Enum):
    BRIDGED = "bridged"
    """The renderer extended the sampled tokens."""
    SPLICED = "spliced"
    """Assistant turns that nobody sampled here follow: they are rendered, the sampled tokens before them stay."""
    RENDERED = "rendered"
    """Everything was rendered anew."""


class Rendered(msgspec.Struct, frozen=True):
    """Tokens of a context: `keep` leading tokens of the row it goes on from, then `new_T` (int32)."""

    how: How
    keep: int
    new_T: np.ndarray


class Rendering:
    def __init__(self, tokenizer: FastTokenizer, renderer: Renderer):
        self.tokenizer, self.renderer = tokenizer, renderer
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self._new_parser = new_parser_for(tokenizer, renderer)
        self._string_parameters = StringParameters()
        self._abilities = abilities_of(tokenizer, renderer)
        self._literals = tokenizer.protect_from(renderer)

    @classmethod
    def from_folder(cls, model: str | Path, renderer: Settings) -> Rendering:
        """Load a model folder's tokenizer and the renderer that `renderer` configures (`{"name": "qwen3", ...}`).

        Raises ConfigError when the renderer's name or a setting of it is unknown, or when the folder does not tell its renderer.
        """
        tokenizer = FastTokenizer.from_folder(model)
        made = make_renderer(tokenizer, settings_for(Path(model), tokenizer, renderer))
        try:
            made.render_ids([{"role": "user", "content": ""}], add_generation_prompt=True)
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"this renderer cannot be used with {model}: {error}", key="gateway.renderer") from error
        return cls(tokenizer, made)

    def render(self, turns: Sequence[Turn], tools: Sequence[Json]) -> np.ndarray:
        """int32 (T,): the whole context, ready for the answer. Raises ValueError for tools that the template has no place for."""
        settled = self._settled(turns, tools)
        ids = self.renderer.render_ids(self._messages(settled.turns), tools=self._tools(tools), add_generation_prompt=True)
        return np.asarray(ids, dtype=TOKEN)

    def render_finished(self, turns: Sequence[Turn], tools: Sequence[Json]) -> list[int]:
        """A conversation that has ended, as it was recorded: no answer is begun, and a control token in an answer's text is one.

        Raises ValueError for what the template refuses.
        """
        messages = self._messages(turns)
        for message, turn in zip(messages, turns, strict=True):
            if turn.role == "assistant":
                message["content"] = turn.text
        return list(self.renderer.render_ids(messages, tools=self._tools(tools), add_generation_prompt=False))

    def extend(
        self, row_T: np.ndarray, num_sampled: int, turns: Sequence[Turn], num_answered: int, tools: Sequence[Json]
    ) -> Rendered:
        """Tokens of the context `turns`, whose first `num_answered` turns end with the answer that closes `row_T`.

        `row_T` is int32 (T,), its last `num_sampled` tokens are that answer's. Falls back to rendering all.
        """
        new = turns[num_answered:]
        if new and not any(turn.role == "assistant" for turn in new):
            if isinstance(self.renderer, OwnTemplateRenderer):
                bridged = self._continue(self.renderer, row_T, turns, num_answered, tools)
            else:
                bridged = self._bridge(row_T, num_sampled, new, tools)
            if bridged is not None:
                return bridged
        elif new:
            spliced = self._splice(row_T, turns, num_answered, tools)
            if spliced is not None:
                return spliced
        return Rendered(how=How.RENDERED, keep=0, new_T=self.render(turns, tools))

    def parser(self, new_tool_id: NewToolId, prompt_tail: Sequence[int], tools: Sequence[Json]) -> Parser:
        """A streaming parser for one answer to the prompt that ends with `prompt_tail`."""
        tail = list(prompt_tail[-PARSED_TAIL_TOKENS:])

        def parse_whole(token_ids: Sequence[int]) -> Parsed:
            return self.parse_whole(token_ids, tail, tools)

        if self._new_parser is None:
            return WholeParser(parse_whole, new_tool_id)
        start = AnswerStart(
            decode=self.tokenizer.decode,
            parse_whole=parse_whole,
            new_tool_id=new_tool_id,
            is_reasoning=self.renderer.parse_response([], prompt_ids=tail).reasoning_complete is False,
            is_string=self._string_parameters.of(tools),
        )
        return self._new_parser(start, tail)

    def parse_whole(self, token_ids: Sequence[int], prompt_tail: Sequence[int], tools: Sequence[Json]) -> Parsed:
        """The whole answer as the renderer reads it; all of it as text where the renderer fails on what the policy wrote."""
        try:
            parsed = self.renderer.parse_response(list(token_ids), tools=renderer_tools(tools), prompt_ids=list(prompt_tail))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            ids = [token for token in token_ids if token not in self.stop_token_ids]
            return Parsed(text=self.tokenizer.decode(ids).strip(), reasoning="", is_reasoning_open=False, blocks=())
        return Parsed(
            text=parsed.content if keeps_white_space(self.renderer) else parsed.content.strip(),
            reasoning=(parsed.reasoning_content or "").strip(),
            is_reasoning_open=parsed.reasoning_complete is False,
            blocks=tuple(_block(call) for call in parsed.tool_calls),
        )

    def end_of_call(self, row_T: np.ndarray, turns: Sequence[Turn], tools: Sequence[Json]) -> np.ndarray:
        """int32: what the template writes after the last tool call of `turns` and the answer that closes `row_T` lacks.

        Nothing where the answer has it, or where its tokens end elsewhere than the template's.
        """
        settled = self._settled(turns, tools)
        ids = self.renderer.render_ids(self._messages(settled.turns), tools=self._tools(tools), add_generation_prompt=False)
        stops = [at for at, token in enumerate(ids) if token in self.stop_token_ids]
        ids = ids[: stops[-1]] if stops else ids
        body, row = (self.tokenizer.decode(part).rstrip() for part in (ids[-END_TOKENS:], row_T[-END_TOKENS:].tolist()))
        for length in range(len(row), 0, -1):
            at = body.rfind(row[-length:])
            if at >= 0:
                return np.asarray(self._last_tokens(ids, body[at + length :]), TOKEN)
        return np.empty(0, TOKEN)

    def _last_tokens(self, ids: Sequence[int], text: str) -> Sequence[int]:
        """The last of `ids` that read as `text`; none if no tokens do."""
        for num_tokens in range(1, END_TOKENS if text else 0):
            if self.tokenizer.decode(ids[-num_tokens:]).rstrip() == text:
                return ids[-num_tokens:]
        return ()

    def _bridge(self, row_T: np.ndarray, num_sampled: int, new: Sequence[Turn], tools: Sequence[Json]) -> Rendered | None:
        num_prompt = len(row_T) - num_sampled
        first = max(0, num_prompt - TAIL_TOKENS)
        prompt, completion = row_T[first:num_prompt].tolist(), row_T[num_prompt:].tolist()
        settled = settle(new, has_later_system=self._abilities.has_later_system, is_beginning=False)
        bridged = self.renderer.bridge_to_next_turn(prompt, completion, self._messages(settled.turns), tools=self._tools(tools))
        if bridged is None:
            return None
        ids, seen = bridged.token_ids, prompt + completion
        keep = len(seen)
        if ids[:keep] != seen:  # the answer ran past its closing token, or was cut before it
            keep = next((at for at, (a, b) in enumerate(zip(ids, seen, strict=False)) if a != b), min(len(ids), len(seen)))
        return Rendered(how=How.BRIDGED, keep=first + keep, new_T=np.asarray(ids[keep:], dtype=TOKEN))

    def _continue(
        self, renderer: OwnTemplateRenderer, row_T: np.ndarray, turns: Sequence[Turn], num_answered: int, tools: Sequence[Json]
    ) -> Rendered | None:
        """As `_bridge`, by the text that the model's own template writes after the answer."""
        settled = self._settled(turns, tools)
        num_settled = settled.sources.index(num_answered - 1) + 1
        after = renderer.after_answer(self._messages(settled.turns), num_settled, tools=self._tools(tools))
        if after is None:
            return None
        closing, rest = after
        keep, last = len(row_T), int(row_T[-1])
        if last in self.stop_token_ids:
            end = self.tokenizer.decode([last])
            keep, closing = (keep, closing.removeprefix(end)) if closing.startswith(end) else (keep - 1, closing)
        return Rendered(how=How.BRIDGED, keep=keep, new_T=np.asarray(self.tokenizer.encode(closing + rest), dtype=TOKEN))

    def _splice(self, row_T: np.ndarray, turns: Sequence[Turn], num_answered: int, tools: Sequence[Json]) -> Rendered | None:
        settled = self._settled(turns, tools)
        rendered = self.renderer.render(self._messages(settled.turns), tools=self._tools(tools), add_generation_prompt=True)
        if len(rendered.sampled_mask) != len(rendered.token_ids):
            return None
        answered = settled.sources.index(num_answered - 1)
        last = -1
        for at, (owner, sampled) in enumerate(zip(rendered.message_indices, rendered.sampled_mask, strict=True)):
            if owner == answered and sampled:
                last = at
        if last < 0 or not len(row_T) or rendered.token_ids[last] != row_T[-1]:
            return None  # the answer was cut before its closing token
        return Rendered(how=How.SPLICED, keep=len(row_T), new_T=np.asarray(rendered.token_ids[last + 1 :], dtype=TOKEN))

    def _settled(self, turns: Sequence[Turn], tools: Sequence[Json]) -> Settled:
        settled = settle(turns, has_later_system=self._abilities.has_later_system)
        return with_tools(settled, tools) if tools and not self._abilities.has_tools else settled

    def _tools(self, tools: Sequence[Json]) -> list[ToolSpec] | None:
        """Raises ValueError where neither the template nor the format of the answers knows tools."""
        if not tools:
            return None
        if self._abilities.has_tools:
            return renderer_tools(self._literals.protect_all(tools))
        if isinstance(self.renderer, OwnTemplateRenderer):
            raise ValueError("it has no place for tools, so the policy would not know of them: use a harness without tools")
        return None

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        return [self._message(turn) for turn in turns]

    def _message(self, turn: Turn) -> Message:
        protect = self._literals.protect
        message: Message = {"role": turn.role, "content": protect(turn.text)}
        if turn.reasoning is not None:
            message["reasoning_content"] = protect(turn.reasoning)
        if turn.tool_uses:
            message["tool_calls"] = [
                {
                    "id": use.id,
                    "type": "function",
                    "function": {"name": protect(use.name), "arguments": protect(self._arguments(use.arguments))},
                }
                for use in turn.tool_uses
            ]
        if turn.role == "tool":
            message["tool_call_id"] = turn.tool_use_id
            if turn.name:
                message["name"] = protect(turn.name)
        return message

    def _arguments(self, text: str) -> str:
        """Arguments as the policy wrote them, or, for a template that takes a JSON object only, in one, of whole characters: it reads them."""
        if self._abilities.takes_any_arguments:
            return text
        if "\\u" in text:
            text = mended(text.encode())[0].decode()
        value = value_of(text)
        if isinstance(value, dict):
            return text
        return "{}" if value in (None, "") else json_text({"arguments": value})


def _block(call: ParsedToolCall) -> ParsedBlock:
    """A call as it was written: a tool that nobody offered, or a value of another type than was declared, is the harness's to refuse."""
    has_arguments = call.status in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL) or (
        call.status is ToolCallParseStatus.INVALID_JSON and isinstance(call.arguments, dict)
    )
    arguments = call.arguments if isinstance(call.arguments, str) else json_text(call.arguments or {})
    return ParsedBlock(raw=call.raw, name=call.name, arguments=arguments, is_valid=has_arguments and bool(call.name))


class StringParameters:
    """Which parameters are declared as strings, of the tool lists that were seen last."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Json], frozenset[tuple[str, str]]]] = {}

    def of(self, tools: Sequence[Json]) -> IsString:
        known = self._known.get(id(tools))
        if known is None or known[0] is not tools:
            known = self._known[id(tools)] = tools, frozenset(_declared_strings(tools))
            if len(self._known) > KEPT_TOOL_LISTS:
                del self._known[next(iter(self._known))]
        strings = known[1]
        return lambda tool, parameter: (tool, parameter) in strings


def _declared_strings(tools: Sequence[Json]) -> Iterator[tuple[str, str]]:
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        for name, schema in (properties if isinstance(properties, dict) else {}).items():
            if isinstance(schema, dict) and schema.get("type") in ("string", ["string"]):
                yield function["name"], name
