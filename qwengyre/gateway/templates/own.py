"""`default`: the model's own chat template renders; the answers are read by whichever renderer reads what the template writes."""

from __future__ import annotations

from typing import Final

from renderers import DefaultRendererConfig
from renderers.base import Message, ParsedResponse, ToolSpec
from renderers.default import DefaultRenderer, _decode_tool_call_arguments

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.templates.jinja import TemplateRefused
from qwengyre.gateway.templates.reader import CallFormat
from qwengyre.gateway.tokenizer import FastTokenizer

_MARK: Final = "Qg answer gQ"
"""Stands for an answer, to see what the template puts after one."""


class OwnTemplateRenderer(DefaultRenderer):
    """`calls.reader` reads answers; without one the package's own parsers do, those that `config` names."""

    _tokenizer: FastTokenizer

    def __init__(self, tokenizer: FastTokenizer, config: DefaultRendererConfig, calls: CallFormat):
        """Raises ConfigError when the folder names no token that ends an answer."""
        super().__init__(tokenizer, config)
        self.reader, self._takes_text = calls.reader, calls.takes_text
        if not self.get_stop_token_ids():
            raise ConfigError(
                "it names no token that ends an answer: eos_token in tokenizer_config.json", file=tokenizer.name_or_path
            )

    def _apply(
        self, messages: list[Message], *, tools: list[ToolSpec] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        given = messages if self._takes_text else _decode_tool_call_arguments(messages)
        settings = self.config.model_extra or {}
        return self._tokenizer.apply_chat_template(given, tools=tools, add_generation_prompt=add_generation_prompt, **settings)

    def after_answer(self, messages: list[Message], num_answered: int, *, tools: list[ToolSpec] | None) -> tuple[str, str] | None:
        """How the template closes the answer `messages[num_answered - 1]`, and what it writes from there on.

        None where a longer conversation changes what stands before: a template that drops old reasoning, say.
        """
        given = messages if self._takes_text else _decode_tool_call_arguments(messages)
        settings, render = {"tools": tools, **(self.config.model_extra or {})}, self._tokenizer.need_template().render
        try:
            before = render(given[:num_answered], **settings)
            whole = render(given, add_generation_prompt=True, **settings)
            marked = render([*given[: num_answered - 1], {"role": "assistant", "content": _MARK}], **settings)
        except TemplateRefused:
            return None
        if not whole.startswith(before) or _MARK not in marked:
            return None
        return marked[marked.rindex(_MARK) + len(_MARK) :], whole[len(before) :]

    def get_stop_token_ids(self) -> list[int]:
        ends = list(self._tokenizer.end_token_ids)
        if self.reader is not None:
            ends += self.reader.get_stop_token_ids()
        return list(dict.fromkeys(ends))

    def parse_response(
        self, token_ids: list[int], *, tools: list[ToolSpec] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        stops = set(self.get_stop_token_ids())
        end = next((at for at, token in enumerate(token_ids) if token in stops), len(token_ids))
        parse = super().parse_response if self.reader is None else self.reader.parse_response
        return parse(token_ids[:end], tools=tools, prompt_ids=prompt_ids)
