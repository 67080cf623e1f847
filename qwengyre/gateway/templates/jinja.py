"""The chat template that a model folder carries, rendered as transformers renders it, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.protocol.fields import Json

DATE: Final = datetime.datetime(2024, 7, 26)
"""What a template is told when it asks for today's date: the day that Llama 3 falls back to. The real date would give a
conversation another beginning after midnight."""
ERRORS: Final = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template, which is foreign code, may raise for a conversation that it was not written for."""


class TemplateRefused(ValueError):
    """The template cannot render this conversation; the text is its own."""


class ChatTemplate:
    """`special` are the special tokens by name (`bos_token`), as templates know them."""

    def __init__(self, source: str, special: Mapping[str, str]):
        self.source, self._special = source, dict(special)
        environment = _environment()
        self._template = environment.from_string(source)
        self.has_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """None when the folder has no template. Raises ConfigError for one that cannot be read."""
        found = _source(folder)
        if found is None:
            return None
        file, source = found
        try:
            return cls(source, special_tokens(folder))
        except jinja2.TemplateError as error:
            raise ConfigError(f"this chat template is not valid Jinja: {error}", file=str(file)) from error

    def render(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[Mapping[str, object]] | None = None, **settings: object
    ) -> str:
        """Raises TemplateRefused."""
        given = {"tools": list(tools) if tools else None, "documents": None, "add_generation_prompt": False} | settings
        try:
            return self._template.render(messages=list(messages), **self._special, **given)
        except ERRORS as error:
            raise TemplateRefused(str(error) or type(error).__name__) from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what a model says, for training masks. It renders its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja types it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": DATE.strftime}
    return environment


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _source(folder: Path) -> tuple[Path, str] | None:
    """The template and the file that it stands in: of the places that transformers knows, the first that has one."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone, alone.read_text(encoding="utf-8")
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        template = read_json(file).get("chat_template")
        if isinstance(template, list):  # several by name: the one for tools can do without them, too
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("tool_use", named.get("default"))
        if isinstance(template, str):
            return file, template
    return None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=Json)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"this file of the model cannot be read: {error}", file=str(file)) from error


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on, as the folder names them. Raises ConfigError."""
    found = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_json(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found
