"""The child process of `warm_up`: FOLDER SEED CONFIG."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.make_policy import make_policy


def _main() -> None:
    folder, seed, config = sys.argv[1:]
    make_policy(msgspec.json.decode(config, type=WarmupConfig), int(seed), Path(folder), lambda line: print(line, flush=True))


if __name__ == "__main__":
    _main()
