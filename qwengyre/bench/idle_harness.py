"""A harness that does what any Python harness must and nothing else: import the official client, have one, end.

`python -m qwengyre.bench.idle_harness`; the bench of starting executions runs it cold and warm.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import OpenAI


@functools.cache
def prepared_client() -> OpenAI:
    """A client without address or key; making its TLS context costs more than forking a process."""
    import openai

    return openai.OpenAI(base_url="http://localhost", api_key="none")


def preload() -> None:
    """What the warm start does once for all executions."""
    prepared_client()


def main() -> int:
    prepared_client().copy(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return 0


if __name__ == "__main__":
    from qwengyre.bench import idle_harness

    sys.exit(idle_harness.main())
