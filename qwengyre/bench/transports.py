"""The transport that a bench is told to use."""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
import typer

from qwengyre.transfer.api import Transport
from qwengyre.transfer.config import TransferConfig, TransportKind
from qwengyre.transfer.transports import open_transport

KINDS = [kind for kind in get_args(TransportKind) if kind != "auto"]
TransportName = Annotated[str, typer.Option("--transport", help=f"{', '.join(KINDS)}.")]


def open_bench_transport(kind: str, prefix: str) -> Transport:
    """Raises typer.BadParameter for an unknown name, TransferError for one that cannot run here."""
    if kind not in KINDS:
        raise typer.BadParameter(f"the transports are {', '.join(KINDS)}, not {kind!r}")
    return open_transport(msgspec.convert({"transport": kind}, TransferConfig), prefix=prefix)
