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
from qwengyre.rpc import tls
from qwengyre.telemetry.log_lines import log_to

SWITCH_S = 0.0005
"""How long a thread that reads or encodes a long request keeps the interpreter while the event loop wants it: a call needs it some ten times."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qwengyre.gateway", description=__doc__)
    parser.add_argument("--config", required=True, help="GatewayProcessConfig, TOML or JSON")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args(argv)
    log_to(None, logging.getLevelNamesMapping()[arguments.log_level])
    sys.setswitchinterval(SWITCH_S)
    try:
        config = _load(Path(arguments.config))
        tls.use(config.tls)
        asyncio.run(serve(config))
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
