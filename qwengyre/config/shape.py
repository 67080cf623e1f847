"""What a Struct allows, as the loader and the help need it: fields, their types in words, their docstrings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec import inspect as shapes


def struct_at(shape: shapes.Type, value: object) -> shapes.StructType | None:
    """The Struct that `value` is to become: looks through `| None` and picks among tagged Structs by the tag."""
    if isinstance(shape, shapes.StructType):
        return shape
    if isinstance(shape, shapes.UnionType):
        structs = [member for member in shape.types if isinstance(member, shapes.StructType)]
        if len(structs) == 1:
            return structs[0]
        if isinstance(value, dict):
            for struct in structs:
                if struct.tag_field is not None and value.get(struct.tag_field) == struct.tag:
                    return struct
    return None


def in_words(shape: shapes.Type) -> str:
    """
    >>> in_words(shapes.type_info(int | None))
    'int or nothing'
    """
    match shape:
        case shapes.UnionType(types=types):
            return " or ".join(in_words(member) for member in types)
        case shapes.LiteralType(values=values):
            return "one of " + ", ".join(repr(value) for value in values)
        case shapes.EnumType(cls=cls):
            return "one of " + ", ".join(repr(member.value) for member in cls)
        case shapes.ListType(item_type=item) | shapes.VarTupleType(item_type=item):
            return f"list of {in_words(item)}"
        case shapes.TupleType(item_types=items):
            return "list of " + ", ".join(in_words(item) for item in items)
        case shapes.DictType(value_type=item):
            return f"table of {in_words(item)}"
        case shapes.StructType(cls=cls):
            return f"table ({', '.join(field.encode_name for field in shape.fields)})"
        case shapes.NoneType():
            return "nothing"
    return type(shape).__name__.removesuffix("Type").lower()


def field_docs(struct: type) -> dict[str, str]:
    """The docstring under each field of a Struct, read from its source; bases first."""
    docs: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue  # builtins have no source
        body = getattr(tree.body[0], "body", [])
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below):
                docs[field.target.id] = " ".join(inspect.cleandoc(below.value.value).split())
    return docs


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Key(msgspec.Struct, frozen=True):
    """One key of a run file, for the help."""

    path: tuple[str, ...]
    kind: str
    """The type in words."""
    default: Any
    """NODEFAULT when the key must be given."""
    doc: str


def keys(struct: type[msgspec.Struct], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of `struct`, tables opened, in the order of the source; its own before those of its tables, as TOML wants them."""
    docs = field_docs(struct)
    fields = shapes.type_info(struct).fields  # type: ignore[attr-defined]
    for field in sorted(fields, key=lambda field: isinstance(field.type, shapes.StructType)):
        path = (*prefix, field.encode_name)
        default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
        if isinstance(field.type, shapes.StructType):
            yield from keys(field.type.cls, path)
        else:
            yield Key(path=path, kind=in_words(field.type), default=default, doc=docs.get(field.name, ""))
