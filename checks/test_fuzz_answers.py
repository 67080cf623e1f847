"""Answers by the thousand: what every renderer's clients are told is what `parse_response` reads, in any chunking.

`QWENGYRE_FUZZ_ANSWERS` is the number for each renderer, `QWENGYRE_FUZZ_SEED` another set of them.
"""

from __future__ import annotations

import os
import random

import pytest

from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.answers import TOOLS, difference, prompt_tails, random_answer, streamed
from qwengyre.testing.renderers import ANSWER_FORMATS, write_renderer_model

NUM_ANSWERS = int(os.environ.get("QWENGYRE_FUZZ_ANSWERS", "10000"))
SEED = os.environ.get("QWENGYRE_FUZZ_SEED", "0")
PLAIN_MARKUP = ("deepseek-v3", "kimi-k2", "kimi-k2.5")
CASES = [(name, True) for name in ANSWER_FORMATS] + [(name, False) for name in PLAIN_MARKUP]


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("name", "has_markup"), CASES)
def test_answers_are_told_as_they_are_read(name, has_markup, tmp_path):
    rendering = Rendering.from_folder(write_renderer_model(tmp_path, name, has_markup=has_markup), {"name": name})
    rnd = random.Random(f"{SEED} {name} {has_markup}")
    tails = prompt_tails(rendering, name)
    for number in range(NUM_ANSWERS):
        ids = random_answer(rnd, name, rendering)
        tail, tools = rnd.choice(tails), rnd.choice(((), TOOLS))
        where = number, rendering.tokenizer.decode(ids)
        found = difference(rendering, name, ids, tail, tools)
        assert found is None, (*where, found)
        cuts = [rnd.randrange(len(ids) + 1) for _ in range(rnd.randrange(6))]
        told = streamed(rendering, ids, range(len(ids)), tail, tools).turn
        assert told == streamed(rendering, ids, cuts, tail, tools).turn == streamed(rendering, ids, (), tail, tools).turn, where
