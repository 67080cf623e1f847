"""Requests of every dialect, by the fields that its provider publishes: valid ones, and ones that ask for what is not served. Every
text of a valid request is its own, so that a test can look for it in the prompt.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from qwengyre.gateway.dialects import BY_NAME
from qwengyre.gateway.protocol.fields import RefusedField
from qwengyre.gateway.protocol.gemini_request import GENERATION
from qwengyre.testing.request_fields import REFUSED, SCHEMA, VALID, Json, word

TAILS: Final = (
    "",
    " naïve 日本語 😀",
    " <|im_end|>",
    "\n\nand more",
    ' {"a": 1}',
    " <tool_call>",
    " \\n '\"",
    " </think> x",
    " \u2028 \x7f",
)
"""What follows a word of a user: whatever a template or a parser might stumble on."""
HARMLESS: Final = ("", " naïve 日本語 😀", ", and\nmore", ' {"a": 1}', " \\n '\"")
"""The same for texts of the model, whose markup is markup."""
PNG: Final = "data:image/png;base64,iVBORw0KGgo="


Calls = Literal["any", "one", "none"]


class Asked(msgspec.Struct, frozen=True):
    """A request, and what is known of its answer."""

    dialect: str
    path: str
    body: Json
    kind: Literal["valid", "refused"]
    texts: tuple[str, ...]
    """Must stand in the prompt."""
    tools: tuple[str, ...]
    stream: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    calls: Calls
    do: str = ""
    """What a refusal must say."""


class _Writer:
    """Writes one request, and keeps what it wrote of it."""

    def __init__(self, rnd: random.Random) -> None:
        self.rnd = rnd
        self.texts: list[str] = []
        self.tools = tuple(f"tool_{index}" for index in range(rnd.choice((0, 1, 1, 3))))
        self.issued = 0

    def text(self, tails: Sequence[str] = TAILS) -> str:
        text = f"{word(self.rnd)}{self.rnd.choice(tails)} {word(self.rnd)}"
        self.texts.append(text)
        return text

    def id(self) -> str:
        self.issued += 1
        return f"call_{self.rnd.randrange(10**6)}_{self.issued}"

    def maybe(self, share: float = 0.5) -> bool:
        return self.rnd.random() < share

    def schema(self) -> Json:
        described = {"type": "string", "description": word(self.rnd)}
        return self.rnd.choice((SCHEMA, {"type": "object", "properties": {}}, {"type": "object", "properties": {"a": described}}))

    def arguments(self) -> dict[str, Json]:
        return {"a": self.text(HARMLESS)} if self.maybe(0.8) else {}

    def with_fields(self, body: dict[str, Json], dialect: str) -> dict[str, Json]:
        """Some of the fields that are valid there, in any order."""
        for name, value in VALID[dialect].items():
            if self.maybe(0.12):
                body[name] = value(self.rnd)
        names = list(body)
        self.rnd.shuffle(names)
        return {name: body[name] for name in names}

    # ------------------------------------------------------------------------------------------ chat

    def chat(self) -> tuple[dict[str, Json], list[Json]]:
        messages: list[Json] = []
        if self.maybe():
            messages.append({"role": self.rnd.choice(("system", "developer")), "content": self.chat_content(is_text=True)})
        for _ in range(self.rnd.randrange(3)):
            messages.append({"role": "user", "content": self.chat_content()})
            messages += self.chat_answer()
            if self.maybe(0.1):
                messages.append({"role": "system", "content": self.text()})
        messages.append({"role": "user", "content": self.chat_content()})
        tools = [self.chat_tool(name) for name in self.tools]
        return {"messages": messages, **({"tools": tools} if tools else {})}, messages

    def chat_tool(self, name: str) -> Json:
        function: dict[str, Json] = {"name": name}
        for field, value in (("description", self.text(HARMLESS)), ("parameters", self.schema()), ("strict", False)):
            if field == "description" or self.maybe():
                function[field] = value
        return {"type": "function", "function": function}

    def chat_content(self, *, is_text: bool = False) -> Json:
        if self.maybe(0.6):
            return self.text()
        parts: list[Json] = [{"type": "text", "text": self.text()} for _ in range(self.rnd.randrange(1, 3))]
        if not is_text and self.maybe(0.3):
            parts.append(
                self.rnd.choice(
                    (
                        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
                        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                        {"type": "file", "file": {"filename": "a.pdf", "file_data": PNG}},
                    )
                )
            )
        return parts

    def chat_answer(self) -> list[Json]:
        said: dict[str, Json] = {"role": "assistant", "content": self.text(HARMLESS)}
        if self.maybe(0.2):
            said["reasoning_content"] = word(self.rnd)
        if self.maybe(0.1):
            said["refusal"] = None
        ids = [self.id() for _ in range(self.rnd.choice((0, 0, 1, 2)))] if self.tools else []
        if not ids:
            return [said]
        said["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {"name": self.rnd.choice(self.tools), "arguments": json.dumps(self.arguments(), ensure_ascii=False)},
            }
            for id in ids
        ]
        if self.maybe(0.3):
            self.texts.remove(said["content"])
            said["content"] = None
        return [said, *({"role": "tool", "tool_call_id": id, "content": self.chat_content(is_text=True)} for id in ids)]

    # -------------------------------------------------------------------------------------- messages

    def messages(self) -> tuple[dict[str, Json], list[Json]]:
        messages: list[Json] = [{"role": "user", "content": self.blocks()}]
        for _ in range(self.rnd.randrange(3)):
            ids = [self.id() for _ in range(self.rnd.choice((0, 0, 1, 2)))] if self.tools else []
            said: list[Json] = [{"type": "text", "text": self.text(HARMLESS)}]
            if self.maybe(0.2):
                said.insert(0, {"type": "thinking", "thinking": word(self.rnd), "signature": "s"})
            if self.maybe(0.1):
                said.insert(0, {"type": "redacted_thinking", "data": "xx"})
            said += [{"type": "tool_use", "id": id, "name": self.rnd.choice(self.tools), "input": self.arguments()} for id in ids]
            results = [self.result(id) for id in ids]
            after = self.blocks()
            if results:
                after = results + (after if isinstance(after, list) else [{"type": "text", "text": after}])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": after}]
        body: dict[str, Json] = {"messages": messages}
        if self.maybe():
            body["system"] = (
                self.text() if self.maybe() else [{"type": "text", "text": self.text(), "cache_control": {"type": "ephemeral"}}]
            )
        if self.tools:
            body["tools"] = [
                {"name": name, "description": self.text(HARMLESS), "input_schema": self.schema()} for name in self.tools
            ]
            if self.maybe(0.2):
                body["tools"].append({"type": "web_search_20250305", "name": "web_search", "max_uses": 3})
        return body, messages

    def result(self, id: str) -> Json:
        result: dict[str, Json] = {"type": "tool_result", "tool_use_id": id}
        if self.maybe(0.1):
            return result
        result["content"] = self.text() if self.maybe() else [{"type": "text", "text": self.text()}]
        if self.maybe(0.2) and isinstance(result["content"], list):
            result["content"].append(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
            )
        if self.maybe(0.2):
            result["is_error"] = self.maybe()
        return result

    def blocks(self) -> Json:
        if self.maybe(0.6):
            return self.text()
        blocks: list[Json] = [{"type": "text", "text": self.text()} for _ in range(self.rnd.randrange(1, 3))]
        if self.maybe(0.2):
            blocks[-1]["cache_control"] = {"type": "ephemeral"}
        if self.maybe(0.3):
            text = self.text(HARMLESS)
            plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}, "title": "T"}
            blocks.append(plain)
        if self.maybe(0.2):
            blocks.append({"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}})
        return blocks

    # ------------------------------------------------------------------------------------- responses

    def responses(self) -> tuple[dict[str, Json], list[Json]]:
        body: dict[str, Json] = {}
        if self.maybe():
            body["instructions"] = self.text()
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "name": name,
                    "description": self.text(HARMLESS),
                    "parameters": self.schema(),
                    "strict": False,
                }
                for name in self.tools
            ]
            if self.maybe(0.2):
                body["tools"].append({"type": "web_search"})
        if self.maybe(0.2):
            body["input"] = self.text()
            return body, []
        items: list[Json] = []
        if self.maybe(0.3):
            items.append({"role": self.rnd.choice(("system", "developer")), "content": self.text()})
        for _ in range(self.rnd.randrange(3)):
            items.append(self.user_item())
            if self.maybe(0.2):
                items.append(
                    {"type": "reasoning", "id": word(self.rnd), "summary": [{"type": "summary_text", "text": word(self.rnd)}]}
                )
            text = self.text(HARMLESS)
            items.append(
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}
            )
            ids = [self.id() for _ in range(self.rnd.choice((0, 0, 1, 2)))] if self.tools else []
            for id in ids:
                arguments = json.dumps(self.arguments(), ensure_ascii=False)
                items.append(
                    {"type": "function_call", "call_id": id, "name": self.rnd.choice(self.tools), "arguments": arguments}
                )
            for id in ids:
                output = self.text() if self.maybe() else [{"type": "input_text", "text": self.text()}]
                items.append({"type": "function_call_output", "call_id": id, "output": output})
        items.append(self.user_item())
        return {**body, "input": items}, items

    def user_item(self) -> Json:
        if self.maybe():
            return {"role": "user", "content": self.text()}
        parts: list[Json] = [{"type": "input_text", "text": self.text()}]
        if self.maybe(0.3):
            parts.append({"type": "input_image", "image_url": PNG, "detail": "auto"})
        return {"type": "message", "role": "user", "content": parts}

    # ---------------------------------------------------------------------------------------- gemini

    def gemini(self) -> tuple[dict[str, Json], list[Json]]:
        snake = self.maybe(0.3)
        contents: list[Json] = [self.gemini_user()]
        for _ in range(self.rnd.randrange(3)):
            ids = [self.id() for _ in range(self.rnd.choice((0, 0, 1, 2)))] if self.tools else []
            said: list[Json] = [{"text": self.text(HARMLESS)}]
            if self.maybe(0.2):
                said.insert(0, {"text": word(self.rnd), "thought": True})
            names = [self.rnd.choice(self.tools) for _ in ids]
            call, response = ("function_call", "function_response") if snake else ("functionCall", "functionResponse")
            said += [{call: {"id": id, "name": name, "args": self.arguments()}} for id, name in zip(ids, names, strict=True)]
            results = [
                {response: {"id": id, "name": name, "response": {self.rnd.choice(("output", "result", "error")): self.text()}}}
                for id, name in zip(ids, names, strict=True)
            ]
            after = self.gemini_user()
            contents += [{"role": "model", "parts": said}, {**after, "parts": [*results, *after["parts"]]}]
        body: dict[str, Json] = {"contents": contents}
        if self.maybe():
            name = "system_instruction" if snake else "systemInstruction"
            body[name] = {"parts": [{"text": self.text()}]}
        if self.tools:
            functions = [
                {
                    "name": name,
                    "description": self.text(HARMLESS),
                    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
                }
                for name in self.tools
            ]
            body["tools"] = [{"function_declarations" if snake else "functionDeclarations": functions}]
            if self.maybe(0.2):
                body["tools"].append({"googleSearch": {}})
        return body, contents

    def gemini_user(self) -> Json:
        parts: list[Json] = [{"text": self.text()} for _ in range(self.rnd.randrange(1, 3))]
        if self.maybe(0.2):
            parts.append({"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}})
        if self.maybe(0.2):
            data = base64.b64encode(self.text(HARMLESS).encode()).decode()
            parts.append({"inlineData": {"mimeType": "text/plain", "data": data}})
        return {"role": "user", "parts": parts} if self.maybe(0.9) else {"parts": parts}


PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def ask(rnd: random.Random, dialect: str, *, is_refused: bool = False) -> Asked:
    """A request that is served, or, but for one field of it, would be."""
    writer = _Writer(rnd)
    body, _ = getattr(writer, dialect)()
    stream = writer.maybe()
    calls: Calls = "any"
    max_tokens = rnd.choice((None, None, None, 4096, 60, 20, 1))
    stops = tuple(f"STOP{rnd.randrange(100)}" for _ in range(rnd.choice((0, 0, 1, 2)))) if dialect != "responses" else ()
    path = PATHS.get(dialect, f"/v1beta/models/{word(rnd)}:{'streamGenerateContent?alt=sse' if stream else 'generateContent'}")
    do = ""
    if dialect == "gemini":
        config = writer.with_fields({}, "generationConfig")
        config |= {"maxOutputTokens": max_tokens} if max_tokens else {}
        config |= {"stopSequences": list(stops)} if stops else {}
        mode = rnd.choice(("AUTO", "ANY", "NONE", None)) if writer.tools else None
        if mode:
            body["toolConfig"] = {"functionCallingConfig": {"mode": mode}}
            calls = "none" if mode == "NONE" else "any"
    else:
        body["stream"] = stream
        if max_tokens:
            body[
                {"chat": rnd.choice(("max_tokens", "max_completion_tokens")), "responses": "max_output_tokens"}.get(
                    dialect, "max_tokens"
                )
            ] = rnd.choice((max_tokens, float(max_tokens)))
        if stops:
            body["stop_sequences" if dialect == "messages" else "stop"] = (
                stops[0] if dialect == "chat" and len(stops) == 1 else list(stops)
            )
        calls = _choose(writer, body, dialect)
    body = writer.with_fields(body, dialect)
    if is_refused:
        table = rnd.choice((dialect, "generationConfig")) if dialect == "gemini" else dialect
        name = rnd.choice(list(REFUSED[table]))
        into = config if table == "generationConfig" else body
        outer, _, inner = name.partition(".")
        value = REFUSED[table][name](rnd)
        into[outer] = {**(into.get(outer) or {}), inner: value} if inner else value
        field = (GENERATION if table == "generationConfig" else BY_NAME[dialect].fields)[name]
        assert isinstance(field, RefusedField)
        do = field.do
    if dialect == "gemini" and config:
        body["generationConfig"] = config
    kind: Literal["valid", "refused"] = "refused" if is_refused else "valid"
    return Asked(dialect, path, body, kind, tuple(writer.texts), writer.tools, stream, max_tokens, stops, calls, do)


def _choose(writer: _Writer, body: dict[str, Json], dialect: str) -> Calls:
    """Add how tools may be called."""
    rnd, tools = writer.rnd, writer.tools
    if not tools or writer.maybe():
        return "any"
    name = rnd.choice(tools)
    forms: dict[str, Mapping[str, Json]] = {
        "chat": {"auto": "auto", "none": "none", "any": "required", "tool": {"type": "function", "function": {"name": name}}},
        "responses": {"auto": "auto", "none": "none", "any": "required", "tool": {"type": "function", "name": name}},
        "messages": {
            "auto": {"type": "auto"},
            "none": {"type": "none"},
            "any": {"type": "any"},
            "tool": {"type": "tool", "name": name},
        },
    }
    choice = rnd.choice(("auto", "none", "any", "tool"))
    value = forms[dialect][choice]
    is_one = writer.maybe(0.3)
    if is_one and dialect == "messages" and choice != "none":
        value = {**value, "disable_parallel_tool_use": True}
    elif is_one:
        body["parallel_tool_calls"] = False
    if dialect == "messages":
        body.pop("parallel_tool_calls", None)
    body["tool_choice"] = value
    return "none" if choice == "none" else "one" if is_one else "any"
