"""A request in the form that all dialects share, read so that only what is new is parsed.

The messages of a body stay raw bytes; a message that came before (in a longer history it nearly always did) is found by
the digest of its bytes and not parsed again.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from qwengyre.gateway.protocol.deltas import Block
from qwengyre.gateway.protocol.fields import InvalidRequest, Json
from qwengyre.trajectory.match import DIGEST_BYTES, KeyedTurn, ToolUse, Turn, digest, key_turn

T = TypeVar("T")
_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
"""A letter that JSON spells by its number, as a pair where it takes two, or what a backslash keeps from being one."""
MAX_STOPS = 16  # four times what OpenAI takes
MAX_STOP_CHARS = 4096
"""Of all of them together: they are recorded with every call, and looked for in every piece of its answer."""
MAX_CACHED_BYTES = 48 * 1024 * 1024
"""Of one execution's messages; the longest body that is accepted fits by default."""


class CallLimit(Enum):
    """How many tool calls of an answer the client wants."""

    ANY = "any"
    ONE = "one"
    """`parallel_tool_calls: false`: what follows the first call is not for the client."""
    NONE = "none"
    """`tool_choice: none`: the tools stay in the prompt, so that it goes on, and a call is text."""


class Tools(msgspec.Struct, frozen=True):
    """What the model may call, as the template sees it: `{"type": "function", "function": {...}}`."""

    specs: tuple[Json, ...] = ()
    digest: bytes = b""
    names: dict[str, Any] = {}
    """What the dialect needs to say a call back, by tool name."""

    def need(self, name: str, field: str = "tool_choice") -> None:
        """Raises InvalidRequest when no tool has this name, which stands in `field`."""
        if all(spec["function"]["name"] != name for spec in self.specs):
            raise InvalidRequest(f"{field} names {name!r}, which is not among the tools", param=field)


class ParsedItem(msgspec.Struct, frozen=True):
    """One message of a body."""

    turns: tuple[KeyedTurn, ...]
    last_block: str = ""
    """Text of its last block, if that is text."""


class ModelRequest(msgspec.Struct, frozen=True):
    dialect: str
    turns: tuple[KeyedTurn, ...]
    tools: Tools
    model: str
    stream: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    calls: CallLimit
    ignored: tuple[str, ...]
    """Fields of the body that change nothing."""
    include_usage: bool
    system_text: str
    """As sent: roles are told from it."""
    system_digest: bytes
    """Of the leading system prompt, volatile parts removed."""
    first_user: str
    last_block: str


class ItemCache:
    """Parsed messages of one execution by the digest of their bytes; beyond `max_bytes` of them the oldest are forgotten."""

    def __init__(self, issued: Mapping[str, ToolUse], max_bytes: int = MAX_CACHED_BYTES):
        self.issued = issued
        """Tool calls that this execution was given by us, by id."""
        self.said: dict[str, tuple[Block, ...]] = {}
        """What answers said, by their id, for dialects whose clients refer to it instead of sending it."""
        self._parsed: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._max_bytes, self._num_bytes = max_bytes, 0

    def get(self, kind: str, raw: bytes, parse: Callable[[bytes], T]) -> T:
        """`kind` tells apart what the same bytes mean in other places and dialects."""
        key = blake2b(raw, digest_size=DIGEST_BYTES, key=kind.encode()).digest()
        found = self._parsed.get(key)
        if found is not None:
            self._parsed.move_to_end(key)
            kept: T = found[0]
            return kept
        return self._remember(key, parse(raw), memoryview(raw).nbytes)

    def keyed(self, turn: Turn) -> KeyedTurn:
        return key_turn(turn, self.issued)

    def keyed_run(self, raws: Sequence[bytes], make: Callable[[], Turn]) -> KeyedTurn:
        """As `get`, for a turn that several items make together."""
        key = digest(b"run", *(bytes(raw) for raw in raws))
        found = self._parsed.get(key)
        if found is not None:
            self._parsed.move_to_end(key)
            kept: KeyedTurn = found[0]
            return kept
        return self._remember(key, self.keyed(make()), sum(memoryview(raw).nbytes for raw in raws))

    def _remember(self, key: bytes, parsed: T, num_bytes: int) -> T:
        self._parsed[key] = parsed, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._parsed.popitem(last=False)[1][1]
        return parsed


def join_texts(texts: Sequence[str]) -> str:
    """Text blocks of one message as one text: a line break between two that have none.

    >>> join_texts(["a", "b\\n", "c"])
    'a\\nb\\nc'
    """
    joined = ""
    for text in texts:
        joined += f"\n{text}" if joined and text and not joined.endswith("\n") else text
    return joined


def join_thoughts(thoughts: Sequence[str]) -> str | None:
    """Blocks of reasoning of one message; None without any."""
    return "\n".join(thoughts) if thoughts else None


def said_in_blocks(blocks: Sequence[Block]) -> Turn:
    """An answer as it comes back from a client of a dialect that has blocks: text that a call parts is two texts."""
    return Turn(
        role="assistant",
        text=join_texts([block.text for block in blocks if block.kind == "text"]),
        reasoning=join_thoughts([block.text for block in blocks if block.kind == "reasoning"]),
        tool_uses=tuple(block.use for block in blocks if block.use is not None),
    )


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", param="stop")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidRequest(f"stop strings of at most {MAX_STOP_CHARS} characters together", param="stop")
    return tuple(text for text in stops if text)


def function_spec(name: str, description: object, parameters: object) -> Json:
    function: Json = {"name": name}
    if isinstance(description, str):
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def arguments_text(arguments: str | Json | None) -> str:
    """A call's arguments as JSON text; clients write a call without arguments as null or as nothing at all."""
    if not isinstance(arguments, str):
        return msgspec.json.encode(arguments or {}).decode()
    return "{}" if arguments.strip() in ("", "null") else arguments


def written_arguments(raw: msgspec.Raw) -> str:
    r"""As `arguments_text`, of an object in a body: how the client's JSON spells a letter is not what the policy wrote.

    >>> written_arguments(msgspec.Raw(rb'{"a": "\u00e9\ud83d\ude00 \\u00e9 \u0022"}'))
    '{"a": "é😀 \\\\u00e9 \\u0022"}'
    """
    return arguments_text(_ESCAPE.sub(_letter, bytes(raw).decode()))


def _letter(found: re.Match[str]) -> str:
    """The letter that an escape spells; what has to be escaped, and half of a pair, stays as it is."""
    letter = json.loads(f'"{found[0]}"') if found[0][1] == "u" else ""
    is_plain = letter.isprintable() and letter not in ("", '"', "\\")
    return letter if is_plain else found[0]


def arguments_object(arguments: str) -> object:
    """The arguments as an object; text that is no JSON object under the name that Claude Code gives it."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return {"__unparsedToolInput": arguments}


def tools_of(specs: Sequence[Json], names: dict[str, Any] | None = None) -> Tools:
    """Raises InvalidRequest for two tools of one name: a call could not be told apart. The same tool twice is one tool."""
    by_name: dict[str, Json] = {}
    for spec in specs:
        name = spec["function"]["name"]
        if by_name.setdefault(name, spec) != spec:
            raise InvalidRequest(f"tools: two are called {name!r}: give them different names", param="tools")
    specs = list(by_name.values())
    canonical = msgspec.json.encode(specs, order="sorted") if specs else b""
    return Tools(specs=tuple(specs), digest=digest(canonical) if specs else b"", names=names or {})


def system_texts(turns: Sequence[KeyedTurn]) -> tuple[str, bytes]:
    """All system text, and the digest of the system turns before the first other turn."""
    texts, leading, is_leading = [], [], True
    for keyed in turns:
        if keyed.turn.role == "system":
            texts.append(keyed.turn.text)
            if is_leading:
                leading.append(keyed.digest)
        else:
            is_leading = False
    return "\n".join(texts), digest(*leading) if leading else b""


def first_user_text(turns: Sequence[KeyedTurn]) -> str:
    return next((keyed.turn.text for keyed in turns if keyed.turn.role == "user"), "")


def last_user_block(items: Sequence[ParsedItem]) -> str:
    """Last text block of the last message that is not a system message, if a user wrote it."""
    for item in reversed(items):
        if item.turns and item.turns[-1].turn.role != "system":
            return item.last_block if item.turns[-1].turn.role == "user" else ""
    return ""
