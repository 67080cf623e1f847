"""The official client, streamed or not, as one function from messages to a reply."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwengyre_harness.agent import Message, Reply, ToolCall

if TYPE_CHECKING:
    from openai import OpenAI


@functools.cache
def prepared_client() -> OpenAI:
    """A client without address or key, made once: importing `openai` and TLS set-up cost most of a short run."""
    from openai import OpenAI
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    assert ChatCompletion.model_fields and ChatCompletionChunk.model_fields, "imported here so that a fork inherits them"
    client = OpenAI(base_url="http://localhost", api_key="none")
    client.chat.completions  # noqa: B018  the client imports its resources on first use
    return client


@dataclass(frozen=True)
class Chat:
    client: OpenAI
    model: str
    streamed: bool

    def complete(self, messages: list[Message], tools: list[dict[str, Any]]) -> Reply:
        """Raises openai.APIError when the client's own retries are used up."""
        request: dict[str, Any] = {"model": self.model, "messages": messages, "tools": tools}
        if self.streamed:
            with self.client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}) as chunks:
                return _joined(chunks)
        completion = self.client.chat.completions.create(**request)
        message = completion.choices[0].message
        asked = [call for call in message.tool_calls or () if call.type != "custom"]  # none such is offered
        calls = (ToolCall(call.id, call.function.name, call.function.arguments) for call in asked)
        return Reply(message.content or "", tuple(calls), completion.usage.total_tokens if completion.usage else 0)


def _joined(chunks: Iterable[Any]) -> Reply:
    """Put a streamed reply together: text and call fragments come in order, usage in the last chunk."""
    content, num_tokens = "", 0
    calls: dict[int, ToolCall] = {}
    for chunk in chunks:
        if chunk.usage:
            num_tokens = chunk.usage.total_tokens
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                known = calls.get(part.index, ToolCall("", "", ""))
                name, arguments = (part.function.name, part.function.arguments) if part.function else ("", "")
                calls[part.index] = ToolCall(
                    known.call_id or part.id or "", known.name or name or "", known.arguments + (arguments or "")
                )
    return Reply(content, tuple(calls[index] for index in sorted(calls)), num_tokens)
