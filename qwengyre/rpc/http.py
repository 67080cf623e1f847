"""What both ends of a control API share: the bearer token and the bounds."""

from __future__ import annotations

import hmac

from starlette.requests import Request

MAX_BODY_BYTES = 256 * 1024 * 1024
"""A micro-step of a million tokens is 13 MB; nothing legal comes near this."""


def bearer_matches(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())
