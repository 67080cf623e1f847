"""`qwengyre doctor --models`: what becomes of every family of models, tried on tiny random ones here and now.

A cell of the matrix is `exact`, `refused` with the model's own reason, or `not run` with why. One that computes otherwise than the model by
itself would be `wrong`, and is a bug.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.gateway.templates.families import FAMILIES
from qwengyre.models.follow import sentence

Word = Literal["exact", "refused", "not run", "wrong"]
COLUMNS = ("trainer", "ranks", "embedded", "vLLM", "KV move", "renderer", "streaming")
ELSEWHERE = {
    "ranks": "needs processes of its own: tests/integration/test_ranks.py",
    "vLLM": "starts a process for each: make test-vllm",
}
"""Columns that this command does not try, and what does."""


class Tried(msgspec.Struct, frozen=True):
    word: Word
    reason: str = ""


class FamilyRow(msgspec.Struct, frozen=True):
    family: str
    """`model_type` of its config.json."""
    cells: dict[str, Tried]


def known_families(asked: Iterable[str]) -> list[str]:
    """Those asked for, or all that transformers lists. Raises ConfigError for one that it does not know."""
    from qwengyre.testing.families import families

    known, wanted = families(), list(asked)
    for family in wanted:
        if family not in known:
            raise ConfigError(f"transformers knows no causal language model {family!r}: give a model_type, such as qwen3_moe")
    return wanted or known


def try_families(families: Iterable[str]) -> Iterator[FamilyRow]:
    """A row after each family; some seconds each."""
    import torch
    import transformers

    from qwengyre.testing.families import NotBuilt, tiny_model
    from qwengyre.testing.model_trials import try_embedded, try_move, try_trainer

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for family in families:
        cells = {column: Tried("not run", why) for column, why in ELSEWHERE.items()}
        for column, trial in (("trainer", try_trainer), ("embedded", try_embedded), ("KV move", try_move)):
            try:
                model = tiny_model(family)
            except NotBuilt as reason:
                cells[column] = Tried("not run", str(reason))
            else:
                cells[column] = tried(partial(trial, model))
        yield FamilyRow(family, cells | _formats(family))


def tried(trial: Callable[[], tuple[bool, str]]) -> Tried:
    """What a trial found. What it raises beside its own error is a refusal that came too late: wrong as well."""
    try:
        is_exact, reason = trial()
    except Exception as error:  # whatever a model's own code raises
        return Tried("wrong", sentence(error))
    return Tried("exact") if is_exact else Tried("refused", reason)


def _formats(family: str) -> dict[str, Tried]:
    """Of the renderer that a folder of this architecture gets when it has no chat template."""
    from qwengyre.testing.model_trials import try_renderer
    from qwengyre.testing.renderers import CONTROL_TOKENS

    names = FAMILIES.get(family, ())
    if not names:
        why = "no renderer knows it: its own chat template is used, and what that writes is its own"
        return {column: Tried("not run", why) for column in ("renderer", "streaming")}
    found = []
    for name in names:
        if name not in CONTROL_TOKENS:
            found.append(Tried("not run", f"{name} has no tokenizer to try it with"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            found.append(tried(partial(try_renderer, name, Path(folder))))
    worst = max(found, key=lambda cell: ("exact", "not run", "refused", "wrong").index(cell.word))
    return {"renderer": worst, "streaming": worst}
