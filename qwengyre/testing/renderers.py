"""A small tokenizer for every renderer, and answers in every renderer's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import AddedToken

from qwengyre.testing.tokenizers import byte_tokenizer

_VISION: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM: Final = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_ARGUMENT_TAGS: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KIMI: Final = (
    *(f"<|im_{name}|>" for name in ("user", "assistant", "system", "middle")),
    *(
        f"<|tool_{name}|>"
        for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")
    ),
)
_DEEPSEEK: Final = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_CALLS: Final = (
    *(f"<｜tool▁{name}▁{end}｜>" for name in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    "<｜tool▁sep｜>",
)
_DEEPSEEK_TASKS: Final = ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
_LAGUNA: Final = ("〈|EOS|〉", "<assistant>", "</assistant>")
_GEMMA: Final = (
    "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|image> <|image|> <image|> <|"|>'
)
_INKLING: Final = (
    "message_user message_model message_system message_tool content_text content_thinking content_image content_audio_input "
    "content_xml content_invoke_tool_json content_invoke_tool_text content_model_end_sampling end_message audio_end "
    "unused_200054 unused_200053"
)
_HY3: Final = (
    "think /think tool_calls /tool_calls tool_call /tool_call tool_sep arg_key /arg_key arg_value /arg_value tool_responses "
    "/tool_responses tool_response /tool_response"
)
_HY3_TURNS: Final = ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant", "reasoning_mode")
CONTROL_TOKENS: Final[dict[str, tuple[str, ...]]] = {
    "deepseek-r1": _DEEPSEEK + _DEEPSEEK_CALLS,
    "deepseek-v3": _DEEPSEEK + _DEEPSEEK_CALLS,
    "deepseek-v4": (*_DEEPSEEK, "｜DSML｜", *(f"<｜{name}｜>" for name in _DEEPSEEK_TASKS)),
    "gemma4": tuple(_GEMMA.split()),
    "glm-4.5": _GLM + _ARGUMENT_TAGS,
    "glm-5": _GLM + _ARGUMENT_TAGS,
    "glm-5.1": _GLM + _ARGUMENT_TAGS,
    "glm-5.3": _GLM + _ARGUMENT_TAGS,
    "gpt-oss": tuple(f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message", "constrain")),
    "hy3": (*(f"<｜{name}:opensource｜>" for name in _HY3_TURNS), *(f"<{name}:opensource>" for name in _HY3.split())),
    "inkling": tuple(f"<|{name}|>" for name in _INKLING.split()),
    "kimi-k2": _KIMI,
    "kimi-k2.5": (*_KIMI, *(f"<|media_{name}|>" for name in ("begin", "content", "pad", "end"))),
    "laguna-m.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-xs.2": _LAGUNA,
    "llama-3": tuple(
        f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "end_of_text", "eom_id")
    ),
    "minimax-m2": ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    "nemotron-3": (),
    "nemotron-3-ultra": (),
    "nemotron-3.5": (),
    "prime-qwen3": (),
    "qwen3": (),
    "qwen3-vl": _VISION,
    "qwen3.5": _VISION,
    "qwen3.6": _VISION,
    "qwen3.8": _VISION,
}
"""Beside Qwen's, which are in every tokenizer of `qwengyre.testing`."""


def write_renderer_model(folder: Path, renderer: str, *, has_markup: bool = True) -> Path:
    """Write a model folder whose tokenizer has what `renderer` needs. Without `has_markup` `<think>` and its like are plain text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(has_markup=has_markup)
    tokens = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS[renderer]]
    tokenizer.add_special_tokens(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


class AnswerFormat(msgspec.Struct, frozen=True):
    """How a policy of one renderer writes."""

    call: Callable[[str, Mapping[str, object]], str]
    end: str
    calls: Callable[[str], str] = str
    """Around all calls of an answer."""
    think: Callable[[str], str] = "<think>\n{}\n</think>\n\n".format
    text: Callable[[str], str] = str

    def write(self, *, thought: str = "", text: str = "", calls: tuple[tuple[str, Mapping[str, object]], ...] = ()) -> str:
        """A whole answer to a prompt that has not begun reasoning."""
        written = self.calls("".join(self.call(name, arguments) for name, arguments in calls)) if calls else ""
        return (self.think(thought) if thought else "") + (self.text(text) if text else "") + written + self.end


def _bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _qwen3(name: str, arguments: Mapping[str, object]) -> str:
    return f'<tool_call>\n{{"name": {_json(name)}, "arguments": {_json(arguments)}}}\n</tool_call>\n'


def _qwen35(name: str, arguments: Mapping[str, object]) -> str:
    inside = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>\n"


def _minimax(name: str, arguments: Mapping[str, object]) -> str:
    inside = "".join(f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in arguments.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inside}</invoke>\n</minimax:tool_call>\n'


def _glm(name: str, arguments: Mapping[str, object]) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{inside}</tool_call>"


def _hy3(name: str, arguments: Mapping[str, object]) -> str:
    inside = _glm("", arguments).removeprefix("<tool_call>\n").removesuffix("</tool_call>")
    for tag in ("arg_key>", "arg_value>"):
        inside = inside.replace(tag, tag.replace(">", ":opensource>"))
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{inside}</tool_call:opensource>\n"


def _deepseek_v3(name: str, arguments: Mapping[str, object]) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"


def _deepseek_v4(name: str, arguments: Mapping[str, object]) -> str:
    inside = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{_json(isinstance(value, str))}">{_bare(value)}</｜DSML｜parameter>'
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{inside}\n</｜DSML｜invoke>\n'


def _kimi(name: str, arguments: Mapping[str, object]) -> str:
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"


def _gpt_oss(name: str, arguments: Mapping[str, object]) -> str:
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{_json(arguments)}<|call|>"


def _inkling(name: str, arguments: Mapping[str, object]) -> str:
    return f"<|message_model|>{name}<|content_invoke_tool_json|>{_json({'name': name, 'args': arguments})}<|end_message|>"


def _gemma_value(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_gemma_value(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma_value, value)) + "]"
    return json.dumps(value)


def _gemma4(name: str, arguments: Mapping[str, object]) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(dict(arguments))}<tool_call|>"


def _llama3(name: str, arguments: Mapping[str, object]) -> str:
    return _json({"name": name, "parameters": arguments})


_CHATML: Final = "<|im_end|>"
_QWEN3: Final = AnswerFormat(_qwen3, _CHATML)
_QWEN35: Final = AnswerFormat(_qwen35, _CHATML)
_GLM_FORMAT: Final = AnswerFormat(_glm, "<|user|>", think="<think>{}</think>\n".format)
_LAGUNA_FORMAT: Final = AnswerFormat(_glm, "</assistant>", think="<think>{}</think>".format)
_KIMI_FORMAT: Final = AnswerFormat(
    _kimi,
    _CHATML,
    calls="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format,
    think="<think>{}</think>".format,
)
_DEEPSEEK_FORMAT: Final = AnswerFormat(
    _deepseek_v3, "<｜end▁of▁sentence｜>", calls="<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>".format
)
ANSWER_FORMATS: Final[dict[str, AnswerFormat]] = {
    "deepseek-r1": _DEEPSEEK_FORMAT,
    "deepseek-v3": _DEEPSEEK_FORMAT,
    "deepseek-v4": AnswerFormat(
        _deepseek_v4,
        "<｜end▁of▁sentence｜>",
        calls="\n\n<｜DSML｜tool_calls>\n{}</｜DSML｜tool_calls>".format,
        think="<think>{}</think>".format,
    ),
    "gemma4": AnswerFormat(_gemma4, "<turn|>", think="<|channel>thought\n{}\n<channel|>".format),
    "glm-4.5": _GLM_FORMAT,
    "glm-5": _GLM_FORMAT,
    "glm-5.1": _GLM_FORMAT,
    "glm-5.3": _GLM_FORMAT,
    "gpt-oss": AnswerFormat(
        _gpt_oss,
        "<|return|>",
        think="<|start|>assistant<|channel|>analysis<|message|>{}<|end|>".format,
        text="<|start|>assistant<|channel|>final<|message|>{}<|end|>".format,
    ),
    "hy3": AnswerFormat(
        _hy3,
        "<｜hy_eos:opensource｜>",
        calls="<tool_calls:opensource>\n{}</tool_calls:opensource>".format,
        think="<think:opensource>{}</think:opensource>".format,
    ),
    "inkling": AnswerFormat(
        _inkling,
        "<|content_model_end_sampling|>",
        think="<|message_model|><|content_thinking|>{}<|end_message|>".format,
        text="<|message_model|><|content_text|>{}<|end_message|>".format,
    ),
    "kimi-k2": _KIMI_FORMAT,
    "kimi-k2.5": _KIMI_FORMAT,
    "laguna-m.1": _LAGUNA_FORMAT,
    "laguna-s-2.1": _LAGUNA_FORMAT,
    "laguna-xs-2.1": _LAGUNA_FORMAT,
    "laguna-xs.2": _LAGUNA_FORMAT,
    "llama-3": AnswerFormat(_llama3, "<|eot_id|>", think="".format),
    "minimax-m2": AnswerFormat(_minimax, "[e~["),
    "nemotron-3": _QWEN35,
    "nemotron-3-ultra": _QWEN35,
    "nemotron-3.5": _QWEN35,
    "prime-qwen3": _QWEN35,
    "qwen3": _QWEN3,
    "qwen3-vl": _QWEN3,
    "qwen3.5": _QWEN35,
    "qwen3.6": _QWEN35,
    "qwen3.8": _QWEN35,
}
