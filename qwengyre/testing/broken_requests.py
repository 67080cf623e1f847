"""Requests with faults in them."""

from __future__ import annotations

import copy
import json
import random
from typing import Final

from qwengyre.testing.random_requests import Asked
from qwengyre.testing.request_fields import Json, word

JUNK: Final[tuple[Json, ...]] = (
    None, True, False, 0, -1, 1, 2**63, 2**70, -(2**70), 1.5, 1e308, "", "x", "auto", "\x00", "😀", [], [None], [[]], {}, {"type": "text"},
    {"type": None}, {"": ""}, [{"type": "text", "text": None}], {"a": {"b": {"c": []}}}, "{", "null", "\ud800", ["\udfff"], {"name": 1},
)  # fmt: skip


def broken(rnd: random.Random, asked: Asked) -> bytes:
    """The body of a request with one to three faults in it, or one fault in its bytes."""
    body = json.loads(json.dumps(asked.body))
    for _ in range(rnd.randrange(1, 4)):
        _spoil(rnd, body)
    data = json.dumps(body, ensure_ascii=rnd.random() < 0.5).encode("utf-8", "surrogatepass")
    if rnd.random() < 0.2:
        return _spoil_bytes(rnd, data)
    return data


def _spoil(rnd: random.Random, body: Json) -> None:
    places = list(_places(body))
    if not places:
        return
    parent, key = rnd.choice(places)
    match rnd.randrange(6):
        case 0 | 1 | 2:
            parent[key] = copy.deepcopy(rnd.choice(JUNK))
        case 3:
            del parent[key]
        case 4 if isinstance(parent, dict):
            parent[rnd.choice((f"x_{word(rnd)}", str(key).upper(), f"{key}s"))] = copy.deepcopy(parent[key])
        case 4:
            parent.append(copy.deepcopy(parent[key]))
        case _:
            parent[key] = rnd.choice(([parent[key]], {"value": parent[key]}, json.dumps(parent[key]), str(parent[key])))


def _places(value: Json) -> list[tuple[Json, Json]]:
    """Everything in a value that can be replaced, as its holder and its key."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _spoil_bytes(rnd: random.Random, data: bytes) -> bytes:
    at = rnd.randrange(len(data) + 1)
    match rnd.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([rnd.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + b"\xff\xfe" + data[at:]
        case 3:
            return b"\xef\xbb\xbf" + data
        case 4:
            return data.replace(b'": ', b'": NaN, "x": ', 1)
        case 5:
            return data.replace(b'"', b'"\\ud83d', rnd.randrange(1, 4))
        case _:
            return data[:at] + b"[" * 5000 + data[at:]
