"""Every causal language model that transformers lists, as a tiny random one: exact over trees, or refused with a reason."""

from __future__ import annotations

import pytest
import torch
import transformers

from qwengyre.testing.families import NotBuilt, families, tiny_model
from qwengyre.testing.model_trials import try_trainer

LEAST_EXACT = 110
"""Of the families of transformers 5.24, of which 118 are."""


@pytest.fixture(scope="module")
def exact() -> list[str]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    return []


@pytest.mark.parametrize("family", families())
def test_a_family_is_exact_or_refused(family: str, exact: list[str]):
    try:
        model = tiny_model(family)
    except NotBuilt as reason:
        pytest.skip(str(reason))
    verdict = try_trainer(model)
    if verdict.is_exact:
        exact.append(family)
    else:
        assert verdict.reason


def test_most_families_are_exact(exact: list[str]):
    assert len(exact) >= LEAST_EXACT
