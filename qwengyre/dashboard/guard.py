"""Who may look at a dashboard: requests of this machine's own browser, by whoever was given the address with its token.

The port is open to every user of the machine, and to every page that their browsers show: such a page may send requests here, and may have
a name of its own lead to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Only our own two script files run, and no page loads a file from elsewhere, so that foreign text in one can do neither."""


class Guard:
    """An ASGI application around another one. Without a `token` whoever reaches the port may look."""

    def __init__(self, app: ASGIApp, token: str = "", names: Collection[str] = ()):
        """`names`: what other machines may call this one, lower case, without a port. Raises ValueError for names without a token."""
        if names and not token:
            raise ValueError("other machines are let in with a token only")
        self._app, self._token, self._names = app, token, frozenset(names)
        self._cookie = f"qwengyre-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        """Of this dashboard: a browser sends the cookies of all ports of a host to each of them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """What to answer instead of the page; None when it may be seen."""
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not (_is_local(hosts[0]) or self._is_known(hosts[0])):
            known = ", ".join(["127.0.0.1", "localhost", *sorted(self._names)])
            return PlainTextResponse(f"this dashboard answers to these names alone: {known}\n", status_code=403)
        origin = request.headers.get("origin")
        is_foreign = origin is not None and urlsplit(origin).netloc != hosts[0]
        if is_foreign or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("this dashboard answers no other page\n", status_code=403)
        return self._ask_for_token(request) if self._token else None

    def _is_known(self, host: str) -> bool:
        """Where other machines are let in: our names, and addresses, which nobody can lead elsewhere as a name."""
        name = _name_of(host)
        return bool(self._names) and name is not None and (name in self._names or _is_address(name))

    def _ask_for_token(self, request: Request) -> Response | None:
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            answer = RedirectResponse(request.url.path, status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        if self._is_token(request.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse("open the address with the token that `qwengyre dashboard` has printed\n", status_code=403)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _name_of(host: str) -> str | None:
    """A Host header without its port; None for what is not one."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    """Whether a Host header names this machine: a loopback address, or a name of one part, which nobody can register.

    >>> [_is_local(host) for host in ("127.0.0.1:8420", "localhost", "[::1]:80", "evil.example:8420", "192.168.0.7")]
    [True, True, True, False, False]
    """
    name = _name_of(host)
    if name is None:
        return False
    if _is_address(name):
        return ipaddress.ip_address(name).is_loopback
    return name.isidentifier() or name.replace("-", "").isalnum()
