"""Renderers of the `renderers` package by name and settings, and our own in place of its `default` and its gpt-oss."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import renderers
from renderers.base import Renderer
from renderers.default import DefaultRenderer
from renderers.parsers import TOOL_PARSERS

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.templates.families import family_of
from qwengyre.gateway.templates.harmony import HarmonyRenderer
from qwengyre.gateway.templates.own import OwnTemplateRenderer
from qwengyre.gateway.templates.reader import CallFormat, find_calls
from qwengyre.gateway.tokenizer import FastTokenizer

Settings = Mapping[str, str | bool | int]
"""`name` of a renderer, and its other settings."""


@cache
def _config_classes() -> dict[str, type[renderers.BaseRendererConfig]]:
    union, *_ = typing.get_args(renderers.RendererConfig)
    return {config.model_fields["name"].default: config for config in typing.get_args(union)}


def renderer_names() -> tuple[str, ...]:
    """All that know a format of their own."""
    return tuple(sorted(set(_config_classes()) - {"auto", "default", "custom"}))


def setting_names(name: str) -> frozenset[str]:
    return frozenset(_config_classes()[name].model_fields)


def make_renderer(tokenizer: FastTokenizer, settings: Settings) -> Renderer:
    """The renderer `settings["name"]` with the other settings.

    Raises ConfigError for a name or a setting that is not known, and for a tokenizer that lacks what the renderer needs.
    """
    name = str(settings["name"])
    classes = _config_classes()
    if name not in classes:
        known = ", ".join(sorted(set(classes) - {"auto"}))
        raise _unusable(tokenizer, f"there is no {name!r}; there are auto, {known}")
    try:
        config = classes[name](**settings)
        if isinstance(config, renderers.DefaultRendererConfig):
            return _make_default(tokenizer, config)
        if isinstance(config, renderers.GptOssRendererConfig):
            return HarmonyRenderer(tokenizer, config)
        return renderers.create_renderer(tokenizer, config)
    except (AssertionError, ImportError, KeyError, TypeError, ValueError) as error:
        raise _unusable(tokenizer, " ".join(str(error).split())) from error


def _unusable(tokenizer: FastTokenizer, reason: str) -> ConfigError:
    return ConfigError(f"this renderer cannot be used with {tokenizer.name_or_path}: {reason}", key="gateway.renderer")


def made_or_none(tokenizer: FastTokenizer, settings: Settings) -> Renderer | None:
    """None when the tokenizer lacks what this renderer needs."""
    try:
        return make_renderer(tokenizer, settings)
    except ConfigError:
        return None


def _make_default(tokenizer: FastTokenizer, config: renderers.DefaultRendererConfig) -> Renderer:
    tokenizer.need_template()
    is_told = config.tool_parser is not None or config.reasoning_parser is not None
    calls = CallFormat(None, takes_text=False) if is_told else find_calls(tokenizer, _readers(tokenizer))
    return OwnTemplateRenderer(tokenizer, config, calls)


def _readers(tokenizer: FastTokenizer) -> Iterator[Renderer]:
    """All that can read answers of this tokenizer, those of its own family first."""
    own = family_of(Path(tokenizer.name_or_path))
    for name in (*own, *(name for name in renderer_names() if name not in own)):
        renderer = made_or_none(tokenizer, {"name": name})
        if renderer is not None:
            yield renderer
    for parser in TOOL_PARSERS:
        yield DefaultRenderer(tokenizer, renderers.DefaultRendererConfig(tool_parser=parser))
