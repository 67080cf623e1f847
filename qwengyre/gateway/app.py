"""The harness listener, an ASGI application: who calls, in which dialect, and the answer as it comes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from qwengyre.core.errors import ContextOverflow, EngineUnavailable, ExecutionClosed, QwenGyreError
from qwengyre.gateway.answer_log import Reader
from qwengyre.gateway.body import ClientGone, read_body
from qwengyre.gateway.call import LiveCall
from qwengyre.gateway.dialects import DIALECTS, dialect_of, place_of
from qwengyre.gateway.gateway import Execution, Gateway
from qwengyre.gateway.protocol.dialect import AnswerHead, Dialect, Place
from qwengyre.gateway.protocol.fields import InvalidRequest
from qwengyre.gateway.protocol.request import ModelRequest
from qwengyre.gateway.protocol.surrogates import mended
from qwengyre.gateway.session import answer_id

log = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_PATH: Final = re.compile(r"^(?:/e/(?P<secret>[^/]*))?/*(?:(?P<version>v1(?:alpha|beta)?\d*)/)*(?P<rest>[^?]*)$")
JSON: Final = (b"content-type", b"application/json")
LARGE_BODY_BYTES: Final = 128 * 1024
"""Takes a tenth of a millisecond to read, which a thread costs, too."""
IGNORED: Final = b"x-qwengyre-ignored"
EVENTS: Final = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class HarnessApp:
    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._streaming: set[Reader] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        parts = _PATH.match(scope["path"])
        rest = parts["rest"].strip("/") if parts else ""
        query = scope["query_string"].decode("latin-1")
        place = place_of(rest, query)
        dialect = place.dialect if place is not None else dialect_of(headers)
        try:
            execution = None
            if scope["method"] != "HEAD" and rest != "api/hello":
                execution = self._authenticate(headers, parse_qs(query), parts["secret"] if parts else None)
            if execution is None:
                await _respond(send, 200, b"{}")
            elif place is None:
                await self._describe(scope, send, execution, rest, is_gemini=bool(parts and parts["version"] == "v1beta"))
            else:
                await self._serve(scope, receive, send, execution=execution, headers=headers, place=place)
        except InvalidRequest as error:
            message = dialect.error(error.status, error.message, code=error.code, param=error.param)
            await self._refuse(send, error.status, message)
        except ContextOverflow as error:
            await self._refuse(send, 400, dialect.overflow(error.num_tokens, error.max_tokens))
        except ExecutionClosed as closed:
            self._gateway.stats.closed_while_waiting += 1
            await _respond(send, 401, dialect.error(401, str(closed), code="invalid_api_key"))
        except ClientGone:
            self._gateway.stats.disconnects += 1
        except QwenGyreError as error:
            status = 503 if isinstance(error, EngineUnavailable) else 500
            await self._refuse(send, status, dialect.error(status, str(error)))
        except Exception:  # the outermost frame of a request: what it did not foresee is an answer in the dialect, too
            log.exception("request_broke", extra={"path": rest})
            await self._refuse(send, 500, dialect.error(500, "the gateway failed on this request; its log says why"))

    async def keep_alive(self, every_s: float) -> None:
        """Wake readers whose clients have heard nothing for `every_s`. Runs as long as the listener."""
        while True:
            await asyncio.sleep(every_s / 4)
            now = self._gateway.now()
            for reader in self._streaming:
                if now - reader.heard_at >= every_s:
                    reader.event.set()

    async def _describe(self, scope: Scope, send: Send, execution: Execution, rest: str, *, is_gemini: bool) -> None:
        """Say which models there are. Raises InvalidRequest for any other path."""
        if rest != "models" and not rest.startswith("models/"):
            known = ", ".join(f"/{dialect.version}/{dialect.path}" for dialect in DIALECTS)
            raise InvalidRequest(f"there is nothing at {scope['path'][:200]!r}; there is {known} and /v1/models", status=404)
        describe = _gemini_models if is_gemini else _models
        await _respond(send, 200, describe(execution.session.opened.model, rest.removeprefix("models").strip("/")))

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, *, execution: Execution, headers: dict[str, str], place: Place
    ) -> None:
        if scope["method"] != "POST":
            raise InvalidRequest(f"{scope['method']} is not allowed here: POST", status=405)
        if place.wrong:
            raise InvalidRequest(place.wrong)
        dialect = place.dialect
        with execution.budget.request() as taken:
            body = await read_body(receive, headers, self._gateway.config, taken)
            async with execution.budget.turn():
                request = place.told(await self._parse(dialect, body, execution))
                if place.is_count:
                    num_tokens = await self._gateway.count(execution, request)
                    await _respond(send, 200, dialect.count(num_tokens), request.ignored)
                    return
                call, reader = await self._gateway.call(execution, request, headers)
        await self._answer(dialect, request, call, reader, receive=receive, send=send)

    async def _parse(self, dialect: Dialect, body: bytes, execution: Execution) -> ModelRequest:
        """Raises InvalidRequest. A large body is read beside the event loop: message by message, between which others have the interpreter."""
        execution.issue_tools()
        if len(body) < LARGE_BODY_BYTES:
            with execution.budget.busy():
                request, num_mended = _read(dialect, body, execution)
        else:
            request, num_mended = await asyncio.to_thread(_read_beside, dialect, body, execution)
        self._gateway.stats.characters_mended += num_mended
        return request

    def _authenticate(self, headers: dict[str, str], query: dict[str, list[str]], secret: str | None) -> Execution:
        """The execution that this key, or this path, opens. A key of another execution opens nothing."""
        scheme, _, bearer = headers.get("authorization", "").strip().partition(" ")
        key = headers.get("x-api-key") or headers.get("x-goog-api-key") or query.get("key", [""])[0]
        given = key or (bearer.strip() if scheme.lower() == "bearer" else scheme)
        by_key = self._gateway.by_key(given) if given else None
        if secret is None:
            execution = by_key
        else:
            execution = self._gateway.by_path(secret)
            if given and by_key is not execution:
                execution = None
        if execution is None:
            raise InvalidRequest("this key opens no execution that is running", status=401, code="invalid_api_key")
        return execution

    async def _answer(
        self, dialect: Dialect, request: ModelRequest, call: LiveCall, reader: Reader, *, receive: Receive, send: Send
    ) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(reader.hang_up)
        try:
            if request.stream:
                await self._stream(dialect, request, call, reader, send)
            else:
                await self._whole(dialect, request, call, reader, send)
        finally:
            gone.cancel()
            self._streaming.discard(reader)
            if reader.is_gone and not call.concluded.is_set():
                self._gateway.stats.disconnects += 1
            call.detach(reader)

    async def _whole(self, dialect: Dialect, request: ModelRequest, call: LiveCall, reader: Reader, send: Send) -> None:
        while not call.answer.is_whole and not reader.is_gone:
            await reader.event.wait()
            reader.event.clear()
        if reader.is_gone:
            return
        if call.failure is not None:
            raise call.failure
        reader.take()
        call.conclude()
        await self._gateway.wait_durable()
        said = call.answer.said(reader.position)
        await _respond(send, 200, dialect.whole(request, _head(call), said, call.ending()), request.ignored)

    async def _stream(self, dialect: Dialect, request: ModelRequest, call: LiveCall, reader: Reader, send: Send) -> None:
        await self._wait_to_begin(reader)
        if call.failure is not None:
            raise call.failure
        if reader.is_gone:
            return
        stream = dialect.stream(request, _head(call))
        await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS, *_named(request.ignored)]})
        out = stream.start()
        self._streaming.add(reader)
        while True:
            reader.event.clear()
            deltas = reader.take()
            if deltas:
                out += stream.deltas(deltas)
            if reader.is_at_end or reader.is_gone:
                break
            if not out and self._gateway.now() - reader.heard_at >= self._gateway.config.keep_alive_s:
                out = stream.keep_alive()
            if out:
                await send({"type": "http.response.body", "body": out, "more_body": True})
                reader.heard_at, out = self._gateway.now(), b""
            await reader.event.wait()
        if reader.is_gone:
            return
        if call.failure is not None:
            self._count_failure(call.failure)
            out += stream.fail(str(call.failure))
        else:
            call.conclude()
            await self._gateway.wait_durable()
            out += stream.end(call.ending())
        await send({"type": "http.response.body", "body": out, "more_body": False})

    async def _wait_to_begin(self, reader: Reader) -> None:
        """Until there is something to say, or the client should see headers: an early failure still gets its status."""
        try:
            async with asyncio.timeout(self._gateway.config.headers_after_s):
                while not reader.has_news and not reader.is_gone:
                    reader.event.clear()
                    await reader.event.wait()
        except TimeoutError:
            pass
        reader.heard_at = self._gateway.now()

    def _count_failure(self, failure: QwenGyreError) -> None:
        if isinstance(failure, ExecutionClosed):
            self._gateway.stats.closed_while_waiting += 1
        else:
            self._gateway.stats.server_errors += 1

    async def _refuse(self, send: Send, status: int, body: bytes) -> None:
        if status >= 500:
            self._gateway.stats.server_errors += 1
        else:
            self._gateway.stats.client_errors += 1
        await _respond(send, status, body)


def _read(dialect: Dialect, body: bytes, execution: Execution) -> tuple[ModelRequest, int]:
    """The request, and how many characters of it were mended: what cannot be read for halves of characters is read without them.

    Raises InvalidRequest.
    """
    try:
        try:
            return dialect.parse(body, execution.session.items), 0
        except (
            InvalidRequest,
            UnicodeDecodeError,
        ):  # the second of what is kept as it came and read as text last: arguments of a call
            body, num_mended = mended(body)
            if not num_mended:
                raise
            return dialect.parse(body, execution.session.items), num_mended
    except RecursionError as error:
        raise InvalidRequest("the request body is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: {error.reason}") from error


def _read_beside(dialect: Dialect, body: bytes, execution: Execution) -> tuple[ModelRequest, int]:
    """In a thread of its own. Its time counts as if it were the loop's: nobody can tell how long it keeps the interpreter's lock at a time."""
    with execution.budget.busy():
        return _read(dialect, body, execution)


async def _respond(send: Send, status: int, body: bytes, ignored: Sequence[str] = ()) -> None:
    headers = [JSON, (b"content-length", b"%d" % len(body)), *_named(ignored)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _named(ignored: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The header that names the fields of a request that changed nothing."""
    return [(IGNORED, ", ".join(ignored).encode())] if ignored else []


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(call: LiveCall) -> AnswerHead:
    return AnswerHead(id=answer_id(call.tokens.id), created=int(call.tokens.started.at), prompt_tokens=call.num_prompt)


def _gemini_models(model: str, asked: str) -> bytes:
    """As `_models`, in the form of Gemini's clients."""
    methods = ["generateContent", "countTokens"]
    entry = {"name": f"models/{asked or model}", "displayName": asked or model, "supportedGenerationMethods": methods}
    return msgspec.json.encode(entry if asked else {"models": [entry]})


def _models(model: str, asked: str) -> bytes:
    """The one model under its name, or under the name that is asked for: the policy answers to every name."""
    name = asked or model
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "qwengyre", "type": "model", "display_name": name}
    entry["created_at"] = "1970-01-01T00:00:00Z"
    if asked:
        return msgspec.json.encode(entry)
    return msgspec.json.encode({"object": "list", "data": [entry], "has_more": False, "first_id": name, "last_id": name})
