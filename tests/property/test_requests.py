"""Requests made from the fields that providers publish: answered or refused, nothing lost, known again (`make test-fuzz` for many more)."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwengyre.gateway.dialects import DIALECTS
from qwengyre.gateway.protocol.fields import RefusedField
from qwengyre.gateway.protocol.gemini_request import GENERATION
from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.request_fields import REFUSED, VALID
from qwengyre.testing.request_fuzz import SETTINGS, Bench, hold
from qwengyre.testing.tokenizers import write_byte_tokenizer

TABLES = {**{dialect.name: dialect.fields for dialect in DIALECTS}, "generationConfig": GENERATION}
WRITTEN_BY_HAND = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "max_completion_tokens", "max_tokens", "stop", "system",
    "stop_sequences", "input", "instructions", "max_output_tokens", "contents", "systemInstruction", "toolConfig", "generationConfig",
    "generateContentRequest", "maxOutputTokens", "stopSequences",
}  # fmt: skip
"""Fields that every request has, or that shape its answer."""


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    return Rendering.from_folder(write_byte_tokenizer(tmp_path_factory.mktemp("model")), SETTINGS)


@pytest.mark.parametrize("table", TABLES)
def test_every_field_of_the_tables_is_tried(table):
    names = {name for name in TABLES[table] if "." not in name}
    assert names - WRITTEN_BY_HAND == VALID[table].keys()
    assert {name for name, field in TABLES[table].items() if isinstance(field, RefusedField)} == REFUSED[table].keys()


@pytest.mark.parametrize("dialect", [dialect.name for dialect in DIALECTS])
def test_a_random_request_is_answered_or_refused(dialect, rendering, tmp_path):
    folders = itertools.count()

    async def scenario(seed: int) -> None:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        async with Bench(rendering, folder).running() as bench:
            for number in range(50):
                await hold(bench, random.Random(f"{seed} {number}"), dialect)

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=4, deadline=None)
    def holds(seed: int) -> None:
        asyncio.run(scenario(seed))

    holds()
