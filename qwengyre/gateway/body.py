"""Read a request body within bounds: size, time, and what it grows to when it is unpacked."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from qwengyre.gateway.budget import Taken
from qwengyre.gateway.config import GatewayConfig
from qwengyre.gateway.protocol.fields import InvalidRequest

MAX_MEMBERS = 16
"""Of a gzip body. Each costs a copy of what follows it, so a body of empty ones would cost hours."""


class ClientGone(Exception):
    """The client hung up before its request was whole: nobody to answer."""


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], headers: Mapping[str, str], config: GatewayConfig, taken: Taken
) -> bytes:
    """Raises InvalidRequest: 408 when it stalls, 413 when it is too large, 415 for an unknown encoding, 429 when its execution has
    too many bytes unread."""
    most = config.max_body_bytes
    if int(headers.get("content-length") or 0) > most:
        raise InvalidRequest(f"the request body is larger than {most} bytes", status=413)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        try:
            message = await asyncio.wait_for(receive(), config.body_timeout_s)
        except TimeoutError:
            raise InvalidRequest("the request body did not arrive in time", status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise InvalidRequest(f"the request body is larger than {most} bytes", status=413)
        taken.take(len(part))
        parts.append(part)
        more = message.get("more_body", False)
    return _unpacked(b"".join(parts), headers.get("content-encoding", "identity").strip().lower(), most)


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise InvalidRequest(f"content-encoding {encoding!r} is not understood: gzip, deflate or none", status=415)
    unpacked = b""
    try:
        for _ in range(MAX_MEMBERS):
            unpacker = zlib.decompressobj(wbits=47)
            unpacked += unpacker.decompress(body, most + 1 - len(unpacked))
            if len(unpacked) > most:
                raise InvalidRequest(f"the request body unpacks to more than {most} bytes", status=413)
            if not unpacker.eof:
                raise InvalidRequest(f"the request body ends before its {encoding} data does")
            body = unpacker.unused_data
            if not body:
                return unpacked
    except zlib.error as error:
        raise InvalidRequest(f"the request body is not {encoding}: {error}") from error
    raise InvalidRequest(f"the request body has more than {MAX_MEMBERS} gzip members")
