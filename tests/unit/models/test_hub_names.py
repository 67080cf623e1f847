"""A name that could be the hub's, where a folder was meant: refused with both ways to say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwengyre.core.errors import ConfigError
from qwengyre.models.hub import refuse_folder_name


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modles/mine", "did you mean models/mine?"),
        ("models/mien", "did you mean models/mine?"),
        ("models/Qwen3-0.6B", "models is a folder here, without it."),
    ],
)
def test_a_folder_that_was_misspelt_is_not_taken_for_a_name_of_the_hub(here: Path, name: str, hint: str):
    with pytest.raises(ConfigError) as refused:
        refuse_folder_name(name, here)
    assert (
        str(refused.value)
        == f"policy.model: {name}: there is no such folder. {hint} A model of the hub with this name is {name}@main"
    )


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "models/mien@main", "modles/other", "notes.txt/x", "./models/mien"])
def test_other_names_are_the_hubs(here: Path, name: str):
    refuse_folder_name(name, here)
