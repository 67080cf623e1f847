"""Records the golden journals of the scheduler: `python -m tests.golden.record_scheduler`, only when a rule changed on purpose."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np

from tests.property.random_driver import RandomDriver, random_config

FILE = Path(__file__).with_name("scheduler.jsonl.gz")
NUM_RUNS = 24


class Line(msgspec.Struct):
    """One run: its config, its events, and the commands that each led to. msgpack as hex, so that equal means byte-equal."""

    config: dict
    events: list[str]
    commands: list[str]


def record(seed: int) -> Line:
    rng = np.random.default_rng(seed)
    config = random_config(rng)
    driver = RandomDriver(config, rng, 0.05)
    driver.run()
    encode = msgspec.msgpack.encode
    return Line(
        msgspec.to_builtins(config),
        [encode(event).hex() for event in driver.events],
        [encode(commands).hex() for commands in driver.commands],
    )


def main() -> None:
    lines = [msgspec.json.encode(record(seed)) for seed in range(NUM_RUNS)]
    FILE.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", mtime=0))
    print(f"{FILE.name}: {NUM_RUNS} runs, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
