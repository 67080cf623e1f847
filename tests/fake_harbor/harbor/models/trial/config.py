"""What a trial is told: the names that Harbor's models have, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

KNOWN: dict[str, dict[str, Any]] = {
    "": {
        "task": None,
        "trial_name": None,
        "trials_dir": "trials",
        "agent": {},
        "environment": {},
        "verifier": {},
        "source_trial": None,
    },
    "task": {"path": None},
    "agent": {"name": None, "import_path": None, "model_name": None, "kwargs": {}, "env": {}, "override_timeout_sec": None},
    "environment": {"type": None, "import_path": None, "kwargs": {}},
    "verifier": {"override_timeout_sec": None},
    "source_trial": {"action": None, "type": None, "path": None},
}


class TrialConfig(SimpleNamespace):
    agent: SimpleNamespace
    environment: SimpleNamespace

    @classmethod
    def model_validate(cls, given: dict[str, Any]) -> TrialConfig:
        return cls(**_read("", given))


def _read(table: str, given: dict[str, Any]) -> dict[str, Any]:
    if unknown := given.keys() - KNOWN[table].keys():
        raise ValueError(f"{table}: Harbor has no {sorted(unknown)}")
    found = KNOWN[table] | given
    return {
        name: SimpleNamespace(**_read(name, value)) if name in KNOWN and value is not None else value
        for name, value in found.items()
    }
