"""Requests by the thousand, of every dialect, through the gateway: none breaks it, none loses text, what was answered is known again.

`QWENGYRE_FUZZ_REQUESTS` is the number for each dialect, `QWENGYRE_FUZZ_SEED` another set of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource

import pytest

from qwengyre.gateway.rendering import Rendering
from qwengyre.testing.request_fields import VALID
from qwengyre.testing.request_fuzz import SETTINGS, Bench, hold
from qwengyre.testing.tokenizers import write_byte_tokenizer

NUM_REQUESTS = int(os.environ.get("QWENGYRE_FUZZ_REQUESTS", "20000"))
SEED = os.environ.get("QWENGYRE_FUZZ_SEED", "0")
WARM = 2000
"""Requests after which caches are full, in the gateway and in Python."""
MOST_GROWTH_KIB = 64 * 1024
"""From there to the end; what is not forgotten of 20,000 executions with two prompts each is more."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("dialect", [name for name in VALID if name != "generationConfig"])
def test_requests_are_answered_or_refused(dialect, tmp_path):
    logging.disable(logging.INFO)
    rendering = Rendering.from_folder(write_byte_tokenizer(tmp_path / "model"), SETTINGS)

    async def scenario() -> None:
        before = 0
        async with Bench(rendering, tmp_path).running() as bench:
            for number in range(NUM_REQUESTS):
                await hold(bench, random.Random(f"{SEED} {dialect} {number}"), dialect)
                if number == WARM:
                    before = _peak_kib()
        assert not before or _peak_kib() - before < MOST_GROWTH_KIB

    asyncio.run(scenario())


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
