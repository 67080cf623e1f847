"""The carrier that a bench is told to use."""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
import typer

from qwengyre.transfer.api import Carrier
from qwengyre.transfer.carriers import open_carrier
from qwengyre.transfer.config import CarrierKind, TransferConfig

KINDS = [kind for kind in get_args(CarrierKind) if kind != "auto"]
CarrierName = Annotated[str, typer.Option("--carrier", help=f"{', '.join(KINDS)}.")]


def open_bench_carrier(kind: str, prefix: str) -> Carrier:
    """Raises typer.BadParameter for an unknown name, TransferError for one that cannot run here."""
    if kind not in KINDS:
        raise typer.BadParameter(f"the carriers are {', '.join(KINDS)}, not {kind!r}")
    return open_carrier(msgspec.convert({"carrier": kind}, TransferConfig), prefix=prefix)
