"""`gateway.renderer = auto`: the renderer that a model folder's own files ask for.

Three witnesses, in this order. `renderer.json` is what the folder was trained with; QwenGyre writes it. The folder's chat
template decides by what it renders: a renderer is right when it gives the same tokens for conversations that tell the known
templates apart; when none does, the template itself is used (`default`). Without a template the architecture decides, if it
leaves no choice. A renderer is a candidate only when the tokenizer has all of its control tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from renderers.base import Renderer

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.templates.families import family_of
from qwengyre.gateway.templates.jinja import ChatTemplate
from qwengyre.gateway.templates.make import Settings, made_or_none, renderer_names, setting_names
from qwengyre.gateway.templates.probes import PLAIN, REASONED, ProbeConversation, rendered, rendered_by_template
from qwengyre.gateway.tokenizer import FastTokenizer

KEPT: Final = "renderer.json"
"""In a model folder: the renderer's settings that its policy was trained with, `name` among them."""
VARIANTS: Final[tuple[Settings, ...]] = ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": False})
"""Settings that templates have other defaults for than their renderers."""


def settings_for(folder: Path, tokenizer: FastTokenizer, asked: Settings) -> Settings:
    """What a run file asks for, with `auto` resolved: settings of its own stand above those that are found. Raises ConfigError."""
    if asked.get("name", "auto") != "auto":
        return asked
    found = find_renderer(folder, tokenizer, tokenizer.template)
    return {**found, **{name: value for name, value in asked.items() if name != "name"}}


def find_renderer(folder: Path, tokenizer: FastTokenizer, template: ChatTemplate | None) -> Settings:
    """Settings of the renderer for this folder, `name` among them. Raises ConfigError when the folder does not tell."""
    kept = folder / KEPT
    if kept.is_file():
        return _read_kept(kept)
    own = family_of(folder)
    if template is None:
        return _by_architecture(folder, tokenizer, own)
    others = [name for name in renderer_names() if name not in own]
    for settings in _candidates([*own, *others]):
        renderer = made_or_none(tokenizer, settings)
        if renderer is not None and any(_agree(tokenizer, renderer, probes) for probes in _probes(settings)):
            return settings
    return {"name": "default"}


def keep_renderer(folder: Path, settings: Settings) -> None:
    """Write the renderer's settings into a model folder, for whoever opens it next."""
    beside = folder / f".{KEPT}"
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=1) + b"\n")
    beside.replace(folder / KEPT)


def _read_kept(file: Path) -> Settings:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str | bool | int])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"not the settings of a renderer: {error}", file=str(file)) from error


def _by_architecture(folder: Path, tokenizer: FastTokenizer, names: Sequence[str]) -> Settings:
    known = [name for name in names if made_or_none(tokenizer, {"name": name}) is not None]
    if len(known) == 1:
        return {"name": known[0]}
    choice = f"one of {', '.join(known)}" if known else "one, such as qwen3 or llama-3"
    raise ConfigError(
        f"no renderer is known for {folder}: name {choice}; the folder has no chat template (chat_template.jinja, or "
        "chat_template in tokenizer_config.json), which would tell",
        key="gateway.renderer.name",
    )


def _candidates(names: Sequence[str]) -> Iterator[Settings]:
    for name in names:
        for variant in VARIANTS:
            if setting_names(name).issuperset(variant):
                yield {"name": name, **variant}


def _probes(settings: Settings) -> tuple[Sequence[ProbeConversation], ...]:
    return (REASONED,) if settings.get("enable_thinking", True) else (REASONED, PLAIN)


def _agree(tokenizer: FastTokenizer, renderer: Renderer, probes: Sequence[ProbeConversation]) -> bool:
    return all(rendered(renderer, probe) == rendered_by_template(tokenizer, probe) for probe in probes)
