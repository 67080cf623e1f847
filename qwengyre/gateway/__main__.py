"""`python -m qwengyre.gateway --config FILE`: the gateway as its own process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from qwengyre.config.load import load
from qwengyre.core.errors import QwenGyreError
from qwengyre.core.text import printable
from qwengyre.gateway.config import GatewayProcessConfig
from qwengyre.gateway.serve import serve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qwengyre.gateway", description=__doc__)
    parser.add_argument("--config", required=True, help="GatewayProcessConfig, TOML or JSON")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        asyncio.run(serve(_load(Path(arguments.config))))
    except QwenGyreError as error:
        print(printable(f"gateway: {error}"), file=sys.stderr)
        return 1
    return 0


def _load(path: Path) -> GatewayProcessConfig:
    if path.suffix == ".json":
        return msgspec.json.decode(path.read_bytes(), type=GatewayProcessConfig)
    return load(path, GatewayProcessConfig)


if __name__ == "__main__":
    sys.exit(main())
