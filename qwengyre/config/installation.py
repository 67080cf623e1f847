"""How QwenGyre lies on this machine: a checkout or an installed wheel. Messages say what to type in the one and in the other."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1]


def checkout() -> Path | None:
    """The folder of the checkout that the package is imported from; None for an installed wheel."""
    above = PACKAGE.parent
    return above if (above / "pyproject.toml").is_file() and (above / "Makefile").is_file() else None


def shipped(name: str) -> Path:
    """`docs` or `recipes`: beside the package in a checkout, inside it in a wheel."""
    found = checkout()
    return (found or PACKAGE) / name


def to_have(extra: str) -> str:
    """What to type for an optional part."""
    return f"pip install -e '.[{extra}]'" if checkout() else f"pip install 'qwengyre[{extra}]'"


def to_repair() -> str:
    """What to type when a part that always belongs is missing."""
    return "make setup" if checkout() else "pip install --force-reinstall qwengyre"


def to_have_vllm() -> str:
    """vLLM wants an environment of its own."""
    if checkout():
        return "`make setup-vllm` makes an environment of its own; run .venv-vllm/bin/qwengyre"
    return "give it an environment of its own: `pip install vllm qwengyre` there (qwengyre docs engines)"
