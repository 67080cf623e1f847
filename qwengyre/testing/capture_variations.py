"""Recorded traffic as other versions of the same harnesses might have sent it: rows of a capture in, rows out.

Everything here keeps what the conversation says. What may differ is how it is written, which headers go with it, and how often a call is sent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Vary = Callable[[list[Row]], list[Row]]
KEPT_HEADERS = ("content-type", "accept", "anthropic-version")
EPHEMERAL = {"type": "ephemeral"}


def rewritten(seed: int) -> Vary:
    """Every body is written in another way each time: key order, lists for strings, cache marks, arguments, unknown fields.

    Only the tools stay as they are: a chat template prints them as they are written, so they are part of what the policy reads.
    """

    def vary(rows: list[Row]) -> list[Row]:
        return [row | {"body": _rewritten(row["body"], random.Random(f"{seed} {row['seq']}"))} for row in rows]

    return vary


def bare(rows: list[Row]) -> list[Row]:
    """Without any header that names a harness, a session or an agent."""
    return [row | {"headers": [(name, value) for name, value in row["headers"] if name.lower() in KEPT_HEADERS]} for row in rows]


def cut_before(rows: list[Row]) -> list[Row]:
    """Every call is hung up on in mid-answer, and sent again with its keys in another order."""
    out: list[Row] = []
    for row in rows:
        if not row["response"].get("fault"):
            cut = {"kind": "disconnect"}
            out.append(row | {"seq": row["seq"] - 0.5, "of": row["seq"], "response": row["response"] | {"fault": cut}})
        out.append(row | {"body": _shuffled(row["body"], random.Random(row["seq"]))})
    return out


def asked_twice(rows: list[Row]) -> list[Row]:
    """Every answer is given in full, is lost on the way, and is asked for again."""
    out: list[Row] = []
    for row in rows:
        if not row["response"].get("fault"):
            out.append(row | {"seq": row["seq"] - 0.5, "of": row["seq"]})
        out.append(row)
    return out


def _rewritten(body: Any, chance: random.Random) -> Any:
    body = json.loads(json.dumps(body))
    for key in ("messages", "input"):
        for item in body.get(key) or () if isinstance(body.get(key), list) else ():
            _rewrite_item(item, chance)
    if isinstance(body.get("system"), list):
        _mark(body["system"], chance)
    elif isinstance(body.get("system"), str) and chance.random() < 0.5:
        body["system"] = [{"type": "text", "text": body["system"]}]
    body["x_trace"] = chance.random()
    return _shuffled(body, chance) | {key: body[key] for key in ("tools",) if key in body}


def _rewrite_item(item: dict[str, Any], chance: random.Random) -> None:
    item["x_unknown"] = {"at": chance.random()}
    for call in item.get("tool_calls") or ():
        call["function"]["arguments"] = _other_json(call["function"]["arguments"], chance)
    if isinstance(item.get("arguments"), str):
        item["arguments"] = _other_json(item["arguments"], chance)
    content = item.get("content")
    if isinstance(content, str) and item.get("role") in ("user", "system", "assistant") and chance.random() < 0.5:
        kind = "text" if item.get("type") != "message" else "output_text" if item["role"] == "assistant" else "input_text"
        item["content"] = content = [{"type": kind, "text": content}]
    if isinstance(content, list):
        is_one_text = len(content) == 1 and content[0].get("type") in ("text", "input_text", "output_text")
        if is_one_text and chance.random() < 0.5:
            item["content"] = content[0]["text"]
        elif "type" not in item:
            _mark(content, chance)


def _mark(blocks: list[dict[str, Any]], chance: random.Random) -> None:
    """Move the cache marks."""
    for block in blocks:
        block.pop("cache_control", None)
        if chance.random() < 0.3:
            block["cache_control"] = EPHEMERAL


def _other_json(text: str, chance: random.Random) -> str:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return json.dumps(_shuffled(value, chance), ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))


def _shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        chance.shuffle(keys)
        return {key: _shuffled(value[key], chance) for key in keys}
    return [_shuffled(item, chance) for item in value] if isinstance(value, list) else value
