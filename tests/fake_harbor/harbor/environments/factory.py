"""Environments that can be imported, of which there is one."""

from __future__ import annotations

import importlib
from typing import Any


class EnvironmentFactory:
    @classmethod
    def run_preflight(cls, type: Any, import_path: str | None = None, kwargs: dict[str, Any] | None = None) -> None:
        if import_path is None:
            raise SystemExit(f"{type.value} is not installed or not on PATH.")
        environment_class(import_path).preflight(kwargs=kwargs)


def environment_class(import_path: str) -> Any:
    module, _, name = import_path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Failed to import environment '{import_path}': {error}") from error
