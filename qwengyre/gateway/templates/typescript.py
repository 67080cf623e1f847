"""JSON schemas as the TypeScript types that gpt-oss was trained on, oddities of `openai_harmony` included."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from qwengyre.gateway.protocol.fields import Json

_STEP: Final = "    "


def typescript(schema: Any, indent: str) -> str:
    """A JSON schema as the TypeScript type that gpt-oss was trained on.

    >>> typescript({"type": "object", "properties": {"a": {"type": "string", "description": "A", "default": "x"}}}, "")
    '{\\n// A\\na?: string, // default: "x"\\n}'
    """
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("oneOf"), list):
        return "".join(
            _variant(variant, indent, _described(variant), _default(variant, is_bare=False)) for variant in schema["oneOf"]
        )
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if name == "integer" else name for name in kind if isinstance(name, str)) or "any"
    match kind:
        case "object":
            members = "".join(_member(name, inner, schema, indent) for name, inner in _properties(schema))
            return f"{_note(schema, indent)}{{\n{members}{indent}}}"
        case "array":
            return f"{typescript(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case "string":
            return " | ".join(f'"{value}"' for value in _enum(schema)) or "string"
        case "integer" | "number":
            return "number"
        case "boolean":
            return "boolean"
    return "any"


def _properties(schema: Json) -> Sequence[tuple[str, Any]]:
    properties = schema.get("properties")
    return list(properties.items()) if isinstance(properties, dict) else []


def _member(name: str, schema: Any, parent: Json, indent: str) -> str:
    required = parent.get("required")
    mark = "" if isinstance(required, list) and name in required else "?"
    given = schema if isinstance(schema, dict) else {}
    head, default = "".join(_head(given, indent)), _default(given)
    if isinstance(given.get("oneOf"), list):
        default = f"{indent}// {default}\n" if default else ""
        variants = "".join(_variants(given, indent))
        return f"{head}{default}{indent}{name}{mark}:{variants}\n{indent},\n"
    return f"{head}{indent}{name}{mark}: {_nullable(schema, indent + _STEP)},{default and f' // {default}'}\n"


def _nullable(schema: Any, indent: str) -> str:
    written = typescript(schema, indent)
    is_nullable = isinstance(schema, dict) and schema.get("nullable") is True and "null" not in written
    return f"{written} | null" if is_nullable else written


def _variants(schema: Json, indent: str) -> Iterator[str]:
    """Of a member. What was said of the member itself is not said again, nor is anything of its first variant."""
    said = schema.get("description")
    for index, variant in enumerate(schema["oneOf"]):
        text = _described(variant)
        is_new = text != said and (index > 0 or not isinstance(said, str))
        yield _variant(variant, indent, text if is_new else None, _default(variant))


def _variant(schema: Any, indent: str, description: str | None, default: str) -> str:
    remarks = [part for part in (description, default or None) if part is not None]
    return f"\n{indent} | {_nullable(schema, f'{indent}   ')}" + (f" // {' '.join(remarks)}" if remarks else "")


def _described(schema: Any) -> str | None:
    text = schema.get("description") if isinstance(schema, dict) else None
    return text if isinstance(text, str) else None


def _head(schema: Json, indent: str) -> Iterator[str]:
    """Comments above a member. Only a description's first line is commented out: the model knows it like that."""
    variants = schema.get("oneOf")
    first = variants[0] if isinstance(variants, list) and variants else None
    note = "" if variants and _described(first) == _described(schema) else _note(schema, indent)
    if isinstance(schema.get("title"), str):
        yield f"{indent}// {schema['title']}\n{indent}//\n"
    if not isinstance(variants, list):
        yield note
    if isinstance(schema.get("examples"), list) and schema["examples"]:
        yield f"{indent}// Examples:\n"
        yield from (f'{indent}// - "{example}"\n' for example in schema["examples"] if isinstance(example, str))
    if isinstance(variants, list):
        yield note


def _default(schema: Any, *, is_bare: bool = True) -> str:
    """`is_bare` writes the default of an enumeration without quotes."""
    if not isinstance(schema, dict) or "default" not in schema:
        return ""
    default = schema["default"]
    is_word = is_bare and isinstance(default, str) and bool(schema.get("enum"))
    return f"default: {default if is_word else _json(default)}"


def _enum(schema: Json) -> list[str]:
    values = schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _note(schema: Json, indent: str) -> str:
    text = _described(schema)
    return f"{indent}// {text}\n" if text is not None else ""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
