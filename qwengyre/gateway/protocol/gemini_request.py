"""Gemini's generateContent, the way in: contents to turns. Names may be written as in JSON or as in Python: `inlineData`, `inline_data`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from qwengyre.gateway.protocol.fields import (
    ACCOUNT,
    OF_THE_PROVIDER,
    SAMPLING,
    TEMPLATE,
    TEXT_ONLY,
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
    first_user_text,
    function_spec,
    join_texts,
    last_user_block,
    stop_strings,
    system_texts,
    tools_of,
    written_arguments,
)
from qwengyre.trajectory.match import ToolUse, Turn, canonical_json

NOT_OFFERED = Ignored("it runs at the provider: the policy is not offered it")
NOT_MODERATED = Ignored("nothing is moderated here")
FIELDS: Final[dict[str, Field]] = {
    "contents": Honored(),
    "systemInstruction": Honored(),
    "tools": Honored(),
    "toolConfig": Honored(
        "its `functionCallingConfig`: modes `AUTO` and `NONE`; `ANY`, `VALIDATED` and names are ignored: the policy is not constrained"
    ),
    "generationConfig": Honored("by the table below"),
    "generateContentRequest": Honored("of `countTokens`: the request whose prompt is counted"),
    "model": Honored("as the one in the path: the policy answers to every name"),
    "cachedContent": RefusedField("send all contents with every request"),
    "safetySettings": NOT_MODERATED,
    "labels": ACCOUNT,
    "serviceTier": ACCOUNT,
    "store": ACCOUNT,
}
GENERATION: Final[dict[str, Field]] = {
    "maxOutputTokens": Honored("from 1 on; at most `gateway.max_tokens_per_call`"),
    "stopSequences": Honored("up to 16"),
    "candidateCount": RefusedField("ask once for every answer that you want", unless=(1,)),
    "responseMimeType": RefusedField(UNCONSTRAINED, unless=("text/plain", "")),
    "responseSchema": RefusedField(UNCONSTRAINED),
    "responseJsonSchema": RefusedField(UNCONSTRAINED),
    "responseFormat": RefusedField(UNCONSTRAINED),
    "responseModalities": RefusedField("the policy writes text: leave this out", unless=([], ["TEXT"])),
    "responseLogprobs": RefusedField("log-probs are recorded, not returned: leave this out", unless=(False,)),
    "logprobs": RefusedField("log-probs are recorded, not returned: leave this out", unless=(0,)),
    "speechConfig": TEXT_ONLY,
    "imageConfig": TEXT_ONLY,
    "translationConfig": TEXT_ONLY,
    "temperature": SAMPLING,
    "topP": SAMPLING,
    "topK": SAMPLING,
    "seed": SAMPLING,
    "presencePenalty": SAMPLING,
    "frequencyPenalty": SAMPLING,
    "thinkingConfig": TEMPLATE,
    "audioTimestamp": Ignored("this model reads text only"),
    "mediaResolution": Ignored("this model reads text only"),
    "enableEnhancedCivicAnswers": NOT_MODERATED,
    "modelSelectionConfig": ACCOUNT,
    "routingConfig": ACCOUNT,
}
CONTENT: Final[dict[str, Field]] = {
    "role": Honored("`user`, `model`, `function`; without one it is the user's"),
    "parts": Honored(),
}
PARTS: Final[dict[str, Field]] = {
    "text": Honored("with `thought`, of the model: its reasoning"),
    "functionCall": Honored("`id`, `name`, `args`"),
    "functionResponse": Honored(
        "`id`, `name`, `response`: its `output`, `result` or `error` if that is a text and all, else as JSON; its `parts` as other media"
    ),
    "inlineData": LEFT_OUT,
    "fileData": LEFT_OUT,
    "thoughtSignature": Honored("by it a call without an `id` is known"),
    "executableCode": OF_THE_PROVIDER,
    "codeExecutionResult": OF_THE_PROVIDER,
    "toolCall": OF_THE_PROVIDER,
    "toolResponse": OF_THE_PROVIDER,
    "videoMetadata": Ignored("this model reads text only"),
    "mediaResolution": Ignored("this model reads text only"),
    "partMetadata": Ignored("a chat template has no place for it"),
}
TOOLS: Final[dict[str, Field]] = {
    "functionDeclarations": Honored(
        "`name`, `description`, `parameters` or `parametersJsonSchema`; `response`, `responseJsonSchema` and `behavior` are ignored: a chat "
        "template has no place for them"
    ),
    "any other": NOT_OFFERED,
}
RESULTS: Final = ("output", "result", "error")
"""Where a function's response has its text."""
_CAMEL: Final = re.compile(r"_([a-z])")
_SCHEMA_TYPES: Final = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})


class _Call(msgspec.Struct):
    name: str = ""
    id: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Response(msgspec.Struct):
    name: str = ""
    id: str | None = None
    response: Any = None
    parts: list[dict[str, Any]] | None = None


class _Content(msgspec.Struct):
    parts: list[dict[str, msgspec.Raw]] | None = None
    role: str | None = None


class _Calling(msgspec.Struct):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


def parse(body: bytes, cache: ItemCache) -> ModelRequest:
    """Read a request body. Raises InvalidRequest."""
    asked = Body.read(_camel_keys(body, "request body"), FIELDS)
    counted = asked.get("generateContentRequest", msgspec.Raw, None)
    if counted is not None:
        return parse(bytes(counted), cache)
    contents = asked.get("contents", list[msgspec.Raw], [])
    if not contents:
        raise InvalidRequest("contents must not be empty", param="contents")
    settings = Body.read(_camel_keys(asked.raw("generationConfig"), "generationConfig"), GENERATION)
    system = cache.get("gemini system", asked.raw("systemInstruction"), lambda raw: _parse_system(raw, cache))
    items = [cache.get("gemini content", raw, lambda raw: _parse_content(raw, cache)) for raw in contents]
    turns = (*system.turns, *(keyed for item in items for keyed in item.turns))
    system_text, system_digest = system_texts(turns)
    tools, not_offered = cache.get("gemini tools", asked.raw("tools"), _parse_tools)
    calls = _calls(asked, tools)
    for name in (*(f"generationConfig.{name}" for name in settings.ignored), *(f"tools.{name}" for name in not_offered)):
        asked.ignore(name)
    return ModelRequest(
        dialect="gemini",
        turns=turns,
        tools=tools,
        model="",
        stream=False,
        max_tokens=settings.count("maxOutputTokens"),
        stops=stop_strings(settings.get("stopSequences", list[str], [])),
        calls=calls,
        ignored=asked.ignored,
        include_usage=True,
        system_text=system_text,
        system_digest=system_digest,
        first_user=first_user_text(turns),
        last_block=last_user_block(items),
    )


def signature(tool_use_id: str) -> str:
    """What clients send back with a call, whether they keep its id or not.

    >>> signature("call_1")
    'Y2FsbF8x'
    """
    return base64.b64encode(tool_use_id.encode()).decode()


def _camel_keys(raw: bytes, what: str) -> bytes:
    """An object's JSON with its own names, not those below, as JSON has them.

    >>> _camel_keys(b'{"top_p": {"a_b": 1}}', "x")
    b'{"topP":{"a_b": 1}}'
    """
    found: dict[str, msgspec.Raw] = decode(raw, dict[str, msgspec.Raw] | None, what) or {}
    return msgspec.json.encode({_camel(name): value for name, value in found.items()})


def _camel(name: str) -> str:
    return _CAMEL.sub(lambda found: found[1].upper(), name)


def _calls(asked: Body, tools: Tools) -> CallLimit:
    config = decode(_camel_keys(asked.raw("toolConfig"), "toolConfig"), dict[str, msgspec.Raw], "toolConfig")
    raw = _camel_keys(config.get("functionCallingConfig", b"null"), "toolConfig")
    calling = decode(raw.replace(b'"allowedFunctionNames"', b'"allowed_function_names"', 1), _Calling, "toolConfig")
    for name in calling.allowed_function_names or ():
        tools.need(name, "toolConfig")
    mode = (calling.mode or "AUTO").upper().removeprefix("MODE_")
    if mode == "NONE":
        return CallLimit.NONE
    if mode not in ("AUTO", "ANY", "VALIDATED", "UNSPECIFIED"):
        raise InvalidRequest(f"toolConfig: unknown mode {calling.mode!r}: AUTO, ANY, VALIDATED or NONE", param="toolConfig")
    if mode in ("ANY", "VALIDATED") or calling.allowed_function_names or config.keys() - {"functionCallingConfig"}:
        asked.ignore("toolConfig")
    return CallLimit.ANY


def _parse_system(raw: bytes, cache: ItemCache) -> ParsedItem:
    if bytes(memoryview(raw)[:1]) == b'"':
        text = decode(raw, str, "systemInstruction")
    else:
        content: _Content = decode(raw, _Content | None, "systemInstruction") or _Content()
        text = join_texts([_text(part, "systemInstruction") for part in _parts(content)])
    return ParsedItem(turns=(cache.keyed(Turn(role="system", text=text)),) if text else ())


def _parse_content(raw: bytes, cache: ItemCache) -> ParsedItem:
    content = decode(raw, _Content, "contents")
    parts = _parts(content)
    match content.role:
        case "user" | "function" | None:
            turns = _user_turns(parts, cache)
        case "model":
            turns = (_model_turn(parts, cache),)
        case "system":
            turns = (Turn(role="system", text=join_texts([_text(part, "contents") for part in parts])),)
        case role:
            raise InvalidRequest(f"contents: unknown role {role!r}: user or model", param="contents")
    last = parts[-1].get("text") if parts else None
    last_block: str = (decode(last, str | None, "contents") or "") if last is not None else ""
    return ParsedItem(turns=tuple(cache.keyed(turn) for turn in turns), last_block=last_block)


def _parts(content: _Content) -> list[dict[str, msgspec.Raw]]:
    return [{_camel(name): value for name, value in part.items() if bytes(value) != b"null"} for part in content.parts or ()]


def _user_turns(parts: Sequence[Mapping[str, msgspec.Raw]], cache: ItemCache) -> tuple[Turn, ...]:
    """Results of functions are turns of their own; what else the user says follows them."""
    turns: list[Turn] = []
    texts: list[str] = []
    for part in parts:
        if "functionResponse" in part:
            turns.append(_result(decode(part["functionResponse"], _Response, "contents"), cache))
        else:
            texts.append(_text(part, "contents"))
    if texts or not turns:
        turns.append(Turn(role="user", text=join_texts(texts)))
    return tuple(turns)


def _result(response: _Response, cache: ItemCache) -> Turn:
    issued = cache.issued.get(response.id or "")
    value = response.response
    text = next((value[name] for name in RESULTS if isinstance(value, dict) and value.keys() == {name}), None)
    if not isinstance(text, str):
        text = "" if value is None else msgspec.json.encode(value).decode()
    media = [_media_text({_camel(name): of for name, of in part.items()}, "contents") for part in response.parts or ()]
    name = issued.name if issued else response.name
    return Turn(role="tool", text=join_texts([text, *media]), tool_use_id=response.id or "", name=name)


def _model_turn(parts: Sequence[Mapping[str, msgspec.Raw]], cache: ItemCache) -> Turn:
    texts: list[str] = []
    thoughts: list[str] = []
    uses: list[ToolUse] = []
    for part in parts:
        if "functionCall" in part:
            uses.append(_use(part, cache))
        elif decode(part.get("thought", b"false"), bool, "contents"):
            thoughts.append(_text(part, "contents"))
        elif part.keys() - {"thoughtSignature"}:
            texts.append(_text(part, "contents"))
    return Turn(role="assistant", text="".join(texts), reasoning="".join(thoughts) if thoughts else None, tool_uses=tuple(uses))


def _use(part: Mapping[str, msgspec.Raw], cache: ItemCache) -> ToolUse:
    """The call as it was issued, by its id, by its signature, or by what it says, if only one says it."""
    call = decode(part["functionCall"], _Call, "contents")
    signed = _signed(decode(part.get("thoughtSignature", b'""'), str, "contents"))
    for id in (call.id, signed):
        if id and id in cache.issued:
            return cache.issued[id]
    use = ToolUse(id=call.id or "", name=call.name, arguments=written_arguments(call.args))
    written = canonical_json(use.arguments)
    same = [one for one in cache.issued.values() if one.name == use.name and canonical_json(one.arguments) == written]
    return same[0] if len(same) == 1 and not call.id else use


def _signed(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _text(part: Mapping[str, msgspec.Raw], place: str) -> str:
    if "text" in part:
        return decode(part["text"], str, place)
    return _media_text({name: decode(value, Any, place) for name, value in part.items()}, place)


def _media_text(part: Mapping[str, Any], place: str) -> str:
    """The text in place of a part that has none."""
    kind = next((name for name in ("inlineData", "fileData") if isinstance(part.get(name), dict)), None)
    if kind is None:
        names = [name for name in part if isinstance(PARTS.get(name), RefusedField)] or sorted(part) or ["an empty part"]
        raise refusal(PARTS, names[0], place)
    source = {_camel(name): value for name, value in part[kind].items()}
    media_type = str(source.get("mimeType") or "")
    written = _written(media_type, source.get("data"))
    if written is not None:
        return written
    form = {
        "media_type": media_type,
        "data": source.get("data"),
        "url": source.get("fileUri"),
        "filename": source.get("displayName"),
    }
    return text_instead({"type": "file", "source": {name: value for name, value in form.items() if value}}) or ""


def _written(media_type: str, data: object) -> str | None:
    """What a file of plain text says."""
    if not media_type.startswith("text/") or not isinstance(data, str):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _parse_tools(raw: bytes) -> tuple[Tools, list[str]]:
    """The functions that the policy is offered, and the tools that it is not."""
    given: list[Json] = decode(raw, list[Json] | None, "tools") or []
    tools = [{_camel(name): value for name, value in tool.items()} for tool in given]
    declared: list[Any] = []
    for tool in tools:
        functions = tool.get("functionDeclarations") or []
        declared += functions if isinstance(functions, list) else [functions]
    specs = []
    for function in declared:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest("tools: a function without a name", param="tools")
        named = {_camel(name): value for name, value in function.items()}
        schema = named.get("parametersJsonSchema")
        parameters = schema if isinstance(schema, dict) else _json_schema(named.get("parameters"))
        specs.append(function_spec(named["name"], named.get("description"), parameters))
    others = {name for tool in tools for name, value in tool.items() if name != "functionDeclarations" and value is not None}
    return tools_of(specs), sorted(others)


def _json_schema(schema: Any) -> Any:
    """A schema of Gemini's, whose types are in capitals, as a JSON schema.

    >>> _json_schema({"type": "OBJECT", "properties": {"type": {"type": "STRING"}}})
    {'type': 'object', 'properties': {'type': {'type': 'string'}}}
    """
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) and value in _SCHEMA_TYPES else _json_schema(value)
        for name, value in schema.items()
    }
