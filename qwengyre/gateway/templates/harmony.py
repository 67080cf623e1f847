"""gpt-oss's format (harmony) with the model's own tokenizer.

The `renderers` package has `openai_harmony` make the tokens, which downloads a vocabulary when it is first used. Here the same
objects become the same text, and the folder's tokenizer makes the tokens: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai_harmony import Conversation, DeveloperContent, Message, Role, SystemContent
from renderers import GptOssRendererConfig
from renderers.base import resolve_thinking_retention
from renderers.configs import ResolvedThinkingRetention
from renderers.gpt_oss import GptOssRenderer, _reasoning_effort

from qwengyre.gateway.templates.jinja import DATE
from qwengyre.gateway.templates.typescript import typescript
from qwengyre.gateway.tokenizer import FastTokenizer


class HarmonyRenderer(GptOssRenderer):
    def __init__(self, tokenizer: FastTokenizer, config: GptOssRendererConfig):
        self._tokenizer, self.config = tokenizer, config
        implied: ResolvedThinkingRetention = "tool_cycle" if config.auto_drop_analysis else "all"
        self.effective_thinking_retention = resolve_thinking_retention(config, implied)
        self._enc = HarmonyEncoder(tokenizer)
        self._reasoning_effort_enum = _reasoning_effort(config.reasoning_effort)
        # the prompt begins with a date: one that does not move, so that a conversation keeps its beginning
        self._conversation_start_date_resolved = config.conversation_start_date or DATE.strftime("%Y-%m-%d")
        for name in ("start", "end", "return", "call", "channel", "message", "constrain"):
            setattr(self, f"_{name}", self._token_id(f"<|{name}|>"))


class HarmonyEncoder:
    """What `GptOssRenderer` needs of `openai_harmony.HarmonyEncoding`."""

    def __init__(self, tokenizer: FastTokenizer):
        self._tokenizer = tokenizer

    def render_conversation(self, conversation: Conversation) -> list[int]:
        has_tools = any(
            content.tools
            for message in conversation.messages
            for content in message.content
            if isinstance(content, DeveloperContent)
        )
        return [token for message in conversation.messages for token in self.render(message, has_tools=has_tools)]

    def render(self, message: Message, *, has_tools: bool = False) -> list[int]:
        """Tokens of one message. `has_tools` is true of a conversation whose developer message has some."""
        author = message.author.name if message.author.role is Role.TOOL else message.author.role.value
        recipient = f" to={message.recipient}" if message.recipient else ""
        is_call = message.author.role is Role.ASSISTANT and bool(recipient)
        ids = [self._control("start"), *self._tokenizer.encode(f"{author}{recipient}")]
        if message.channel:
            ids += [self._control("channel"), *self._tokenizer.encode(message.channel)]
        ids.append(self._control("message"))
        for content in message.content:
            ids += self._tokenizer.encode(_text(content, has_tools=has_tools))
        return [*ids, self._control("call" if is_call else "end")]

    def _control(self, name: str) -> int:
        token = self._tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        assert isinstance(token, int), f"the renderer found <|{name}|>"
        return token


def _text(content: Any, *, has_tools: bool) -> str:
    match content:
        case SystemContent():
            return _system_text(content, has_tools=has_tools)
        case DeveloperContent():
            instructions = [f"# Instructions\n\n{content.instructions}"] if content.instructions else []
            return "\n\n".join([*instructions, *_tools_text(content)])
    text: str = content.text
    return text


def _system_text(content: SystemContent, *, has_tools: bool) -> str:
    channels = content.channel_config
    lines = [
        content.model_identity,
        f"Knowledge cutoff: {content.knowledge_cutoff}",
        f"Current date: {content.conversation_start_date}",
        "",
        f"Reasoning: {content.reasoning_effort.value.lower()}",
        "",
        f"# Valid channels: {', '.join(channels.valid_channels)}. Channel must be included for every message.",
    ]
    if has_tools:
        lines.append("Calls to these tools must go to the commentary channel: 'functions'.")
    return "\n".join(lines)


def _tools_text(content: DeveloperContent) -> Iterator[str]:
    for namespace in (content.tools or {}).values():
        yield (
            f"# Tools\n\n## {namespace.name}\n\nnamespace {namespace.name} {{\n\n"
            + "".join(
                _comment(tool.description) + f"type {tool.name} = (_: {typescript(tool.parameters, '')}) => any;\n\n"
                for tool in namespace.tools
            )
            + f"}} // namespace {namespace.name}"
        )


def _comment(text: object) -> str:
    return "".join(f"// {line}\n" for line in text.splitlines()) if isinstance(text, str) else ""
