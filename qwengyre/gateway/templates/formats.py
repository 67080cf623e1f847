"""In which form each renderer's policy answers, so that its answers can be read while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from renderers import DefaultRendererConfig
from renderers.base import Renderer

from qwengyre.gateway.protocol import channels
from qwengyre.gateway.protocol.answer import AnswerStart, Parser
from qwengyre.gateway.protocol.calls import CallReader, IsString, NewReader
from qwengyre.gateway.protocol.channels import ChannelMarker, ChannelParser, Channels, Moves, Where
from qwengyre.gateway.protocol.framed import HarmonyParser, HarmonyTokens, InklingParser, InklingTokens
from qwengyre.gateway.protocol.gemma_call import GemmaCall
from qwengyre.gateway.protocol.parse import BracedParser
from qwengyre.gateway.protocol.said import Said
from qwengyre.gateway.protocol.section_calls import DsmlCall, FencedCall, KimiCall
from qwengyre.gateway.protocol.tag_calls import LAGUNA, MINIMAX, QWEN35, TagCall, TagForm, TagTokens, TokenTagCall
from qwengyre.gateway.protocol.text import Trimmed, Unblank
from qwengyre.gateway.protocol.tool_block import CallForm, JsonCall
from qwengyre.gateway.templates.own import OwnTemplateRenderer
from qwengyre.gateway.tokenizer import FastTokenizer

NewParser = Callable[[AnswerStart, Sequence[int]], Parser]
"""A parser for one answer; the second argument is the end of its prompt."""
THINK: Final = ("<think>", "</think>")
CALL: Final = ("<tool_call>", "</tool_call>")


class Vocabulary:
    """The control tokens of one tokenizer, and the stops of one renderer."""

    def __init__(self, tokenizer: FastTokenizer, renderer: Renderer):
        self.tokenizer, self.renderer = tokenizer, renderer
        self.stops = frozenset(renderer.get_stop_token_ids())

    def find(self, token: str) -> int | None:
        found = self.tokenizer.convert_tokens_to_ids(token)
        return found if isinstance(found, int) and found != self.tokenizer.unk_token_id else None

    def id(self, token: str) -> int:
        found = self.find(token)
        assert found is not None, f"the renderer found {token}"
        return found

    def ids(self, *tokens: str) -> list[int]:
        return [self.id(token) for token in tokens]


def new_parser_for(tokenizer: FastTokenizer, renderer: Renderer) -> NewParser | None:
    """None for a renderer of somebody's own: its `parse_response` has to be asked."""
    reader = renderer.reader if isinstance(renderer, OwnTemplateRenderer) else None
    new_parser = FORMATS.get(_form_of(reader or renderer))
    if new_parser is None:
        return None
    vocabulary = Vocabulary(tokenizer, reader or renderer)
    vocabulary.stops |= frozenset(renderer.get_stop_token_ids())
    return new_parser(vocabulary)


def keeps_white_space(renderer: Renderer) -> bool:
    """Whether white space at the ends of a text is part of it."""
    return _form_of(renderer) in UNSTRIPPED


def _form_of(renderer: Renderer) -> str:
    """Empty for a renderer of somebody's own."""
    config = getattr(renderer, "config", None)
    if isinstance(config, DefaultRendererConfig):
        return f"default {config.tool_parser}"
    return str(getattr(config, "name", ""))


def _channel_parsers(given: Channels) -> NewParser:
    special = frozenset(given.tokens) | given.inner
    return lambda start, tail: ChannelParser(given, special, start)


def _think_markers(v: Vocabulary, opener: str, closer: str) -> tuple[dict[int, ChannelMarker], dict[str, ChannelMarker]]:
    """As control tokens, or, where the tokenizer lacks one, as text."""
    begin, end = v.find(opener), v.find(closer)
    if begin is None or end is None:
        return {}, {opener: ChannelMarker.THINK, closer: ChannelMarker.THINK_END}
    return {begin: ChannelMarker.THINK, end: ChannelMarker.THINK_END}, {}


def _stops(v: Vocabulary) -> dict[int, ChannelMarker]:
    return dict.fromkeys(v.stops, ChannelMarker.STOP)


def _bare(v: Vocabulary, moves: Moves, call: tuple[str, str], new_call: NewReader, header: str, **more: Any) -> NewParser:
    """Reasoning, text, then calls that stand by themselves."""
    tokens, texts = _think_markers(v, *THINK)
    tokens |= {v.id(call[0]): ChannelMarker.CALL, v.id(call[1]): ChannelMarker.CALL_END} | _stops(v)
    given = Channels(
        moves=moves,
        tokens=tokens,
        texts=texts,
        header=tuple(v.tokenizer.encode(header)),
        new_call=new_call,
        opener=call[0],
        closer=call[1],
        **more,
    )
    return _channel_parsers(given)


def _tags(form: TagForm) -> NewReader:
    return lambda said, is_string: TagCall(said, is_string, form)


_CHATML: Final = "<|im_start|>assistant\n"
_JSON: Final = CallForm("arguments")


def _json_call(said: Said, is_string: IsString) -> CallReader:
    return JsonCall(said, _JSON)


def _qwen3(v: Vocabulary) -> NewParser:
    return _bare(v, channels.HELD_BARE, CALL, _json_call, _CHATML, close_text=THINK[1])


def _qwen35(v: Vocabulary) -> NewParser:
    return _bare(v, channels.HELD_BARE, CALL, _tags(QWEN35), _CHATML)


def _minimax(v: Vocabulary) -> NewParser:
    call = ("<minimax:tool_call>", "</minimax:tool_call>")
    return _bare(v, channels.HELD_BARE, call, _tags(MINIMAX), "]~b]ai\n")


def _laguna(trim: str) -> Callable[[Vocabulary], NewParser]:
    return lambda v: _bare(v, channels.BARE, CALL, _tags(LAGUNA), "<assistant>", new_trim=lambda: Trimmed(trim))


def _glm(v: Vocabulary) -> NewParser:
    tags = TagTokens(*v.ids("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
    tokens = {v.id(CALL[0]): ChannelMarker.CALL, v.id(CALL[1]): ChannelMarker.CALL_END} | _stops(v)
    if getattr(getattr(v.renderer, "config", None), "enable_thinking", True):
        tokens |= {v.id(THINK[0]): ChannelMarker.THINK, v.id(THINK[1]): ChannelMarker.THINK_END}
    given = Channels(
        moves=channels.INTERLEAVED,
        first=Where.CONTENT,
        tokens=tokens,
        inner=frozenset((tags.key, tags.key_end, tags.value, tags.value_end)),
        new_call=lambda said, is_string: TokenTagCall(said, is_string, tags),
        opener=CALL[0],
        closer=CALL[1],
    )
    return _channel_parsers(given)


def _hy3(v: Vocabulary) -> NewParser:
    def own(*names: str) -> list[int]:
        return v.ids(*(f"<{name}:opensource>" for name in names))

    key, key_end, value, value_end, name_end = own("arg_key", "/arg_key", "arg_value", "/arg_value", "tool_sep")
    tags = TagTokens(key=key, key_end=key_end, value=value, value_end=value_end, name_end=name_end)
    think, think_end, section, call, call_end = own("think", "/think", "tool_calls", "tool_call", "/tool_call")
    markers = {think: ChannelMarker.THINK, think_end: ChannelMarker.THINK_END, section: ChannelMarker.SECTION}
    given = Channels(
        moves=channels.BARE,
        tokens=markers | {call: ChannelMarker.CALL, call_end: ChannelMarker.CALL_END} | _stops(v),
        inner=frozenset((key, key_end, value, value_end, name_end)),
        header=tuple(v.tokenizer.encode("<｜hy_Assistant:opensource｜>")),
        new_call=lambda said, is_string: TokenTagCall(said, is_string, tags),
        opener="<tool_call:opensource>",
        closer="</tool_call:opensource>",
    )
    return _channel_parsers(given)


def _sections(v: Vocabulary, moves: Moves, section: tuple[str, str], call: tuple[str, str], **more: Any) -> NewParser:
    """Reasoning, text, then one section of calls."""
    tokens, texts = _think_markers(v, *THINK)
    tokens |= {v.id(section[0]): ChannelMarker.SECTION, v.id(section[1]): ChannelMarker.SECTION_END}
    tokens |= {v.id(call[0]): ChannelMarker.CALL, v.id(call[1]): ChannelMarker.CALL_END} | _stops(v)
    texts |= more.pop("texts", {})
    close_text = "" if texts.get(THINK[1]) else THINK[1]
    given = Channels(moves=moves, tokens=tokens, texts=texts, opener=call[0], closer=call[1], close_text=close_text, **more)
    return _channel_parsers(given)


def _deepseek_v3(v: Vocabulary) -> NewParser:
    separator = v.id("<｜tool▁sep｜>")
    return _sections(
        v,
        channels.IN_SECTIONS,
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        inner=frozenset((separator,)),
        header=tuple(v.tokenizer.encode("<｜Assistant｜>")),
        new_call=lambda said, is_string: FencedCall(said, separator),
    )


def _kimi(*odd: str) -> Callable[[Vocabulary], NewParser]:
    """`odd` are texts that only `parse_response` can read."""

    def new_parser(v: Vocabulary) -> NewParser:
        begin = v.id("<|tool_call_argument_begin|>")
        return _sections(
            v,
            channels.HELD_SECTIONS,
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ("<|tool_call_begin|>", "<|tool_call_end|>"),
            texts=dict.fromkeys(odd, ChannelMarker.ODD),
            inner=frozenset((begin,)),
            header=tuple(v.tokenizer.encode("<|im_assistant|>assistant<|im_middle|>")),
            new_call=lambda said, is_string: KimiCall(said, begin),
        )

    return new_parser


def _deepseek_v4(v: Vocabulary) -> NewParser:
    texts = dict.fromkeys(("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>"), ChannelMarker.SECTION)
    texts |= {
        "</｜DSML｜tool_calls>": ChannelMarker.SECTION_END,
        "<｜DSML｜invoke": ChannelMarker.CALL,
        "</｜DSML｜invoke>": ChannelMarker.CALL_END,
    }
    given = Channels(
        moves=channels.DSML,
        first=Where.CONTENT,
        tokens={v.id(THINK[0]): ChannelMarker.THINK, v.id(THINK[1]): ChannelMarker.THINK_END} | _stops(v),
        texts=texts,
        new_call=lambda said, is_string: DsmlCall(said),
        opener="<｜DSML｜invoke",
        closer="</｜DSML｜invoke>",
        new_trim=Unblank,
    )
    return _channel_parsers(given)


def _gemma4(v: Vocabulary) -> NewParser:
    think, think_end, call, call_end = v.ids("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")
    markers = {
        think: ChannelMarker.THINK,
        think_end: ChannelMarker.THINK_END,
        call: ChannelMarker.CALL,
        call_end: ChannelMarker.CALL_END,
    }
    given = Channels(
        moves=channels.GEMMA,
        tokens=markers | _stops(v),
        header=tuple(v.tokenizer.encode("<|turn>model\n")),
        think_prefix="thought\n",
        new_call=lambda said, is_string: GemmaCall(said),
        opener="<|tool_call>",
        closer="<tool_call|>",
    )
    return _channel_parsers(given)


def _llama3(v: Vocabulary) -> NewParser:
    header = frozenset((v.id("<|end_header_id|>"),))
    return lambda start, tail: BracedParser(start, v.stops, header)


def _gpt_oss(v: Vocabulary) -> NewParser:
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    tokens = HarmonyTokens(*v.ids(*names))
    return lambda start, tail: HarmonyParser(tokens, start, tail)


def _inkling(v: Vocabulary) -> NewParser:
    names = ("message_model", "content_text", "content_thinking", "content_invoke_tool_json", "content_invoke_tool_text")
    tokens = InklingTokens(*v.ids(*(f"<|{name}|>" for name in (*names, "end_message"))))
    return lambda start, tail: InklingParser(tokens, v.stops, start)


def _default(new_call: NewReader | None, inner: tuple[str, ...] = ()) -> Callable[[Vocabulary], NewParser]:
    """The package's own `default`: reasoning is not ended by a call, and nothing follows a call."""

    def new_parser(v: Vocabulary) -> NewParser:
        tokens, texts = _think_markers(v, *THINK)
        if new_call is not None and v.find(CALL[0]) is not None:
            tokens |= {v.id(CALL[0]): ChannelMarker.CALL, v.id(CALL[1]): ChannelMarker.CALL_END}
        given = Channels(
            moves=channels.BARE,
            tokens=tokens | _stops(v),
            texts=texts,
            inner=frozenset(v.ids(*inner)),
            header=tuple(v.tokenizer.encode(_CHATML)),
            close_text="" if texts else THINK[1],
            new_call=new_call or _json_call,
            opener=CALL[0],
            closer=CALL[1],
        )
        return _channel_parsers(given)

    return new_parser


UNSTRIPPED: Final = frozenset(("deepseek-v4", "inkling", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"))
"""Formats that keep white space at the ends of a text, or some of it."""
FORMATS: Final[dict[str, Callable[[Vocabulary], NewParser]]] = {
    "deepseek-r1": _deepseek_v3,
    "deepseek-v3": _deepseek_v3,
    "deepseek-v4": _deepseek_v4,
    "default None": _default(None),
    "default qwen3": _default(_json_call),
    "default qwen3.5": _default(_tags(QWEN35)),
    "gemma4": _gemma4,
    "glm-4.5": _glm,
    "glm-5": _glm,
    "glm-5.1": _glm,
    "glm-5.3": _glm,
    "gpt-oss": _gpt_oss,
    "hy3": _hy3,
    "inkling": _inkling,
    "kimi-k2": _kimi(),
    "kimi-k2.5": _kimi("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    "laguna-m.1": _laguna("\n"),
    "laguna-s-2.1": _laguna(""),
    "laguna-xs-2.1": _laguna(""),
    "laguna-xs.2": _laguna("\n"),
    "llama-3": _llama3,
    "minimax-m2": _minimax,
    "nemotron-3": _qwen35,
    "nemotron-3-ultra": _qwen35,
    "nemotron-3.5": _qwen35,
    "prime-qwen3": _qwen35,
    "qwen3": _qwen3,
    "qwen3-vl": _qwen3,
    "qwen3.5": _qwen35,
    "qwen3.6": _qwen35,
    "qwen3.8": _qwen35,
}
"""By the renderer's name; of `default`, by that of its tool parser, too."""
