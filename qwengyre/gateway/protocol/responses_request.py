"""OpenAI Responses, the way in: items to turns. Items that the model made together (reasoning, message, tool calls) are one turn."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from qwengyre.gateway.protocol.deltas import Block
from qwengyre.gateway.protocol.fields import (
    ACCOUNT,
    ANY_MODEL,
    CACHE,
    OF_THE_PROVIDER,
    SAMPLING,
    TEMPLATE,
    UNCONSTRAINED,
    Body,
    Field,
    Honored,
    Ignored,
    InvalidRequest,
    Json,
    RefusedField,
    decode,
    refusal,
)
from qwengyre.gateway.protocol.media import LEFT_OUT, text_instead
from qwengyre.gateway.protocol.request import (
    CallLimit,
    ItemCache,
    ModelRequest,
    ParsedItem,
    Tools,
    arguments_text,
    first_user_text,
    function_spec,
    join_texts,
    join_thoughts,
    last_user_block,
    system_texts,
    tools_of,
)
from qwengyre.trajectory.match import KeyedTurn, ToolUse, Turn, TurnRole

ROLES: dict[str, TurnRole] = {"system": "system", "developer": "system", "user": "user"}
CALL_TYPES = ("function_call", "custom_tool_call")
OUTPUT_TYPES = ("function_call_output", "custom_tool_call_output")
STATELESS = RefusedField("send the whole input; items of earlier answers may stand in it as `item_reference`")
NOT_HERE = Ignored("it runs at the provider, or only the provider knows its schema: the policy is not offered it")
FIELDS: Final[dict[str, Field]] = {
    "input": Honored(),
    "model": ANY_MODEL,
    "instructions": Honored(),
    "tools": Honored(),
    "tool_choice": Honored("`auto` and `none`; `required` or a tool's name is ignored: the policy is not constrained"),
    "parallel_tool_calls": Honored("`false`: nothing after the first call counts"),
    "stream": Honored(),
    "max_output_tokens": Honored("from 1 on; at most `gateway.max_tokens_per_call`"),
    "previous_response_id": STATELESS,
    "conversation": STATELESS,
    "prompt": RefusedField("send the prompt itself"),
    "background": RefusedField("wait for the answer", unless=(False,)),
    "background_options": RefusedField("wait for the answer"),
    "text": Ignored("its verbosity: the run's chat template sets how the policy thinks and writes"),
    "text.format": RefusedField(UNCONSTRAINED, unless=({"type": "text"},)),
    "top_logprobs": RefusedField("log-probs are recorded, not returned: leave this out", unless=(0,)),
    "moderation": RefusedField("nothing is moderated here: leave this out"),
    "temperature": SAMPLING,
    "top_p": SAMPLING,
    "reasoning": TEMPLATE,
    "context_management": Ignored("the context is what the client sends; what is too long is an error"),
    "truncation": Ignored("the context is what the client sends; what is too long is an error"),
    "include": Ignored("reasoning is always there as text, and the rest comes from tools of the provider"),
    "max_tool_calls": Ignored("it counts calls of the provider's own tools, and there are none here"),
    "image": Ignored("it concerns images that a provider makes"),
    "stream_options": Ignored("`include_obfuscation`: the network is the run's own"),
    "prompt_cache_key": CACHE,
    "prompt_cache_options": CACHE,
    "prompt_cache_retention": CACHE,
    "access_programs": ACCOUNT,
    "client_metadata": ACCOUNT,
    "metadata": ACCOUNT,
    "safety_identifier": ACCOUNT,
    "service_tier": ACCOUNT,
    "store": Ignored("items can be referred to as long as their execution runs, stored or not"),
    "user": ACCOUNT,
}
ITEMS: Final[dict[str, Field]] = {
    "message": Honored("`role`, `content`; `status`, `phase` and `id` are ignored"),
    "reasoning": Honored("its `content`, else its `summary`"),
    "function_call": Honored(),
    "function_call_output": Honored(),
    "custom_tool_call": Honored(),
    "custom_tool_call_output": Honored(),
    "item_reference": Honored("to an item of an earlier answer to the same execution"),
    "additional_tools": RefusedField("send all tools in `tools`"),
    "configuration_update": RefusedField("send the configuration with every request"),
    "compaction": RefusedField("ask for a summary in a message"),
    "compaction_trigger": RefusedField("ask for a summary in a message"),
    "apply_patch_call": OF_THE_PROVIDER,
    "apply_patch_call_output": OF_THE_PROVIDER,
    "code_interpreter_call": OF_THE_PROVIDER,
    "computer_call": OF_THE_PROVIDER,
    "computer_call_output": OF_THE_PROVIDER,
    "file_search_call": OF_THE_PROVIDER,
    "image_generation_call": OF_THE_PROVIDER,
    "local_shell_call": OF_THE_PROVIDER,
    "local_shell_call_output": OF_THE_PROVIDER,
    "mcp_approval_request": OF_THE_PROVIDER,
    "mcp_approval_response": OF_THE_PROVIDER,
    "mcp_call": OF_THE_PROVIDER,
    "mcp_list_tools": OF_THE_PROVIDER,
    "program": OF_THE_PROVIDER,
    "program_output": OF_THE_PROVIDER,
    "shell_call": OF_THE_PROVIDER,
    "shell_call_output": OF_THE_PROVIDER,
    "tool_search_call": OF_THE_PROVIDER,
    "tool_search_output": OF_THE_PROVIDER,
    "web_search_call": OF_THE_PROVIDER,
}
PARTS: Final[dict[str, Field]] = {
    "input_text": Honored(),
    "output_text": Honored("`annotations` and `logprobs` are ignored"),
    "reasoning_text": Honored(),
    "summary_text": Honored("of reasoning without `content`"),
    "refusal": Honored("as text"),
    "input_image": LEFT_OUT,
    "input_file": LEFT_OUT,
    "input_audio": LEFT_OUT,
}
TOOLS: Final[dict[str, Field]] = {
    "function": Honored("`name`, `description`, `parameters`; `strict` is ignored: the policy is not constrained"),
    "custom": Honored("as a function with one string argument; `format` is ignored: the policy is not constrained"),
    "namespace": Honored("its tools; the name of one that another namespace has, too, is `<namespace>__<name>` to the policy"),
    "any other": NOT_HERE,
}


CallKind = Literal["function_call", "custom_tool_call"]


class ToolKind(msgspec.Struct, frozen=True):
    """How a tool's call is said back."""

    type: CallKind = "function_call"
    namespace: str | None = None
    name: str = ""
    """What the client calls it; empty where the policy calls it the same."""


class _OfferedTools(msgspec.Struct, frozen=True):
    tools: Tools
    renamed: dict[tuple[str, str], str]
    """What the policy calls a tool, by namespace and name, where that is not its name alone."""
    ignored: tuple[str, ...]
    """Types of the tools that the policy is not offered."""


class _ToolChoice(msgspec.Struct):
    type: str
    name: str = ""


class _Item(msgspec.Struct):
    type: str | None = None
    id: str = ""
    namespace: str | None = None
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | None = None
    input: str | None = None
    output: str | list[dict[str, Any]] | None = None


class _Fragment(msgspec.Struct, frozen=True):
    """A part of what the model said."""

    text: str = ""
    reasoning: str | None = None
    use: ToolUse | None = None
    answer: str = ""
    """The id of the answer that it is from, if the client kept it."""


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = Body.read(body, FIELDS)
    offered = cache.get("responses tools", asked.raw("tools"), _parse_tools)
    for kind in offered.ignored:
        asked.ignore(f"tools.{kind}")
    items = _items(asked.raw("input"), cache, offered)
    if not items:
        raise InvalidRequest("input must not be empty", param="input")
    text = asked.get("instructions", str, "")
    instructions = (cache.keyed(Turn(role="system", text=text)),) if text else ()
    turns = (*instructions, *(keyed for item in items for keyed in item.turns))
    system_text, system_digest = system_texts(turns)
    return ModelRequest(
        dialect="responses",
        turns=turns,
        tools=offered.tools,
        model=asked.get("model", str, ""),
        stream=asked.get("stream", bool, False),
        max_tokens=asked.count("max_output_tokens"),
        stops=(),
        calls=_calls(asked, offered.tools),
        ignored=asked.ignored,
        include_usage=True,
        system_text=system_text,
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def _calls(asked: Body, tools: Tools) -> CallLimit:
    choice: str | _ToolChoice = asked.get("tool_choice", str | _ToolChoice, "auto")
    is_parallel = asked.get("parallel_tool_calls", bool, True)
    if choice == "none":
        return CallLimit.NONE
    if isinstance(choice, _ToolChoice) and choice.type in ("function", "custom"):
        if choice.name not in {kind.name or name for name, kind in tools.names.items()}:
            raise InvalidRequest(f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice")
        asked.ignore("tool_choice")
    elif choice == "required":
        asked.ignore("tool_choice")
    elif choice != "auto":
        raise InvalidRequest(
            "tool_choice must be auto, none, required or a tool's name: send only the tools that may be called",
            param="tool_choice",
        )
    return CallLimit.ANY if is_parallel else CallLimit.ONE


def _items(raw: bytes, cache: ItemCache, offered: _OfferedTools) -> list[ParsedItem]:
    if bytes(memoryview(raw)[:1]) == b'"':
        text = decode(raw, str, "input")
        return [ParsedItem(turns=(cache.keyed(Turn(role="user", text=text)),), last_block=text)]
    kind = f"responses item {offered.tools.digest.hex()}" if offered.renamed else "responses item"
    raws: list[msgspec.Raw] = decode(raw, list[msgspec.Raw] | None, "input") or []
    parts = [cache.get(kind, item_raw, lambda raw: _parse_item(raw, cache, offered.renamed)) for item_raw in raws]
    results = {part.turns[0].turn.tool_use_id: at for at, part in enumerate(parts) if isinstance(part, ParsedItem) and part.turns}

    def is_answered(at: int, use: ToolUse) -> bool:
        return results.get(use.id, -1) > at

    out: list[ParsedItem] = []
    run: list[tuple[bytes, _Fragment]] = []
    for at, (item_raw, part) in enumerate(zip(raws, parts, strict=True)):
        said = part if isinstance(part, _Fragment) else None
        if run and not (said and _goes_on([inner for _, inner in run], said, functools.partial(is_answered, at))):
            out.append(_answer(run, cache))
            run = []
        if isinstance(part, _Fragment):
            run.append((item_raw, part))
        else:
            out.append(part)
    if run:
        out.append(_answer(run, cache))
    return out


def _goes_on(run: Sequence[_Fragment], part: _Fragment, is_waited_for: Callable[[ToolUse], bool]) -> bool:
    """Whether `part` belongs to the answer that `run` began.

    Items that we gave an id say so. Else the order within one answer is reasoning, text, tool calls; going back begins another, unless
    a call still waits for its result: nothing was answered between them.
    """
    last = run[-1]
    if last.answer and part.answer:
        return last.answer == part.answer
    if any(fragment.use is not None and is_waited_for(fragment.use) for fragment in run):
        return True
    return _stage(part) >= _stage(last) and not (part.reasoning is not None and last.reasoning is not None)


def _stage(part: _Fragment) -> int:
    return 0 if part.reasoning is not None else 2 if part.use is not None else 1


def _answer(run: Sequence[tuple[bytes, _Fragment]], cache: ItemCache) -> ParsedItem:
    return ParsedItem(turns=(cache.keyed_run([raw for raw, _ in run], lambda: _join([part for _, part in run])),))


def _join(parts: Sequence[_Fragment]) -> Turn:
    return Turn(
        role="assistant",
        text=join_texts([part.text for part in parts if part.text]),
        reasoning=join_thoughts([part.reasoning for part in parts if part.reasoning is not None]),
        tool_uses=tuple(part.use for part in parts if part.use is not None),
    )


def _parse_item(raw: bytes, cache: ItemCache, renamed: Mapping[tuple[str, str], str]) -> ParsedItem | _Fragment:
    item = decode(raw, _Item, "input")
    part = _read_item(item, cache, renamed)
    answer = item.id.partition("_")[2].rpartition("_")[0]
    if isinstance(part, _Fragment) and answer in cache.said:
        return msgspec.structs.replace(part, answer=answer)
    return part


def _read_item(item: _Item, cache: ItemCache, renamed: Mapping[tuple[str, str], str]) -> ParsedItem | _Fragment:
    kind = item.type or ("item_reference" if item.id and item.role is None else "message")
    if kind == "item_reference":
        return _referred(item.id, cache)
    if kind == "reasoning":
        return _Fragment(reasoning=join_texts(_texts(item.content) or _texts(item.summary)))
    if kind in CALL_TYPES:
        arguments = item.arguments if kind == "function_call" else msgspec.json.encode({"input": item.input}).decode()
        name = renamed.get((item.namespace or "", item.name), item.name)
        use = ToolUse(id=item.call_id, name=name, arguments=arguments_text(arguments))
        return _Fragment(use=cache.issued.get(item.call_id, use))
    if kind in OUTPUT_TYPES:
        issued = cache.issued.get(item.call_id)
        turn = Turn(
            role="tool", text=join_texts(_texts(item.output)), tool_use_id=item.call_id, name=issued.name if issued else ""
        )
        return ParsedItem(turns=(cache.keyed(turn),))
    if kind != "message":
        raise refusal(ITEMS, kind, "input")
    texts = _texts(item.content)
    if item.role == "assistant":
        return _Fragment(text=join_texts(texts))
    role = ROLES.get(item.role or "")
    if role is None:
        raise InvalidRequest(f"input: unknown role {item.role!r}", param="input")
    keyed: KeyedTurn = cache.keyed(Turn(role=role, text=join_texts(texts)))
    return ParsedItem(turns=(keyed,), last_block=texts[-1] if texts else "")


def item_id(prefix: str, answer_id: str, index: int) -> str:
    """The id of the `index`-th item of an answer, by which a client may refer to it."""
    return f"{prefix}_{answer_id}_{index}"


def _referred(item_id: str, cache: ItemCache) -> _Fragment:
    """What an earlier answer said in the item of this id."""
    answer_id, _, index = item_id.partition("_")[2].rpartition("_")
    blocks = cache.said.get(answer_id, ())
    if answer_id in cache.said and index == str(len(blocks)):
        return _Fragment()  # an answer that said nothing was given an empty message
    if not (index.isascii() and index.isdigit()) or int(index) >= len(blocks):
        raise InvalidRequest(
            f"input: no answer to this execution has the item {item_id[:100]!r}: send the item itself", param="input"
        )
    block: Block = blocks[int(index)]
    match block.kind:
        case "reasoning":
            return _Fragment(reasoning=block.text)
        case "text":
            return _Fragment(text=block.text)
        case _:
            return _Fragment(use=block.use)


def _texts(content: str | Sequence[dict[str, Any]] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for part in content or ():
        text = part.get("text", part.get("refusal", text_instead(part)))
        if not isinstance(text, str):
            raise refusal(PARTS, part.get("type"), "input")
        texts.append(text)
    return texts


def _parse_tools(raw: bytes) -> _OfferedTools:
    tools: list[Json] = decode(raw, list[Json] | None, "tools") or []
    flat: list[tuple[str, dict[str, Any]]] = []
    for tool in tools:
        if tool.get("type") == "namespace":
            flat += [(str(tool.get("name", "")), inner) for inner in _inner_tools(tool)]
        else:
            flat.append(("", tool))
    offered = [(namespace, tool) for namespace, tool in flat if tool.get("type") in ("function", "custom")]
    if not all(isinstance(tool.get("name"), str) and tool["name"] for _, tool in offered):
        raise InvalidRequest("tools: a tool without a name", param="tools")
    full_names: set[tuple[str, str]] = {(namespace, tool["name"]) for namespace, tool in offered}
    num_of = Counter(name for _, name in full_names)
    renamed = {(namespace, name): f"{namespace}__{name}" for namespace, name in full_names if namespace and num_of[name] > 1}
    specs: list[Json] = []
    kinds: dict[str, ToolKind] = {}
    for namespace, tool in offered:
        name = renamed.get((namespace, tool["name"])) or str(tool["name"])
        specs.append(_spec(name, tool))
        kind: CallKind = "custom_tool_call" if tool["type"] == "custom" else "function_call"
        kinds[name] = ToolKind(type=kind, namespace=namespace or None, name=tool["name"] if name != tool["name"] else "")
    ignored = {str(tool.get("type")) for _, tool in flat if tool.get("type") not in ("function", "custom")}
    return _OfferedTools(tools_of(specs, kinds), renamed, tuple(sorted(ignored)))


def _inner_tools(namespace: dict[str, Any]) -> list[dict[str, Any]]:
    inner = namespace.get("tools") or []
    if not isinstance(inner, list) or not all(isinstance(tool, dict) for tool in inner):
        raise InvalidRequest("tools: a namespace's tools must be a list of tools", param="tools")
    return inner


def _spec(name: str, tool: dict[str, Any]) -> Json:
    if tool["type"] == "function":
        return function_spec(name, tool.get("description"), tool.get("parameters"))
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_spec(name, tool.get("description"), text)
