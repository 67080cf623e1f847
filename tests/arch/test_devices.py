"""Every tensor of trainers, engines and models says where it is made; arrays of the host come to a device by `placement.put` alone."""

from __future__ import annotations

import ast

from tests.arch.source import expect_none, modules

MAKERS = frozenset(
    {
        *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint"),
        *("randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    }
)
"""Functions of torch that make a tensor on the default device unless they are told otherwise. `*_like` and `new_*` follow a tensor."""
FOLDERS = ("qwengyre/trainer", "qwengyre/engines", "qwengyre/models", "qwengyre/cell/ranks")
MOVERS = frozenset({"cuda", "cpu"})
"""Methods that hide where a tensor goes: `to(device)` says it."""


def test_every_tensor_says_where_it_is_made():
    found = []
    for module in modules(*FOLDERS):
        for node in module.all_of(ast.Call):
            if not isinstance(node.func, ast.Attribute):
                continue
            owner, name = node.func.value, node.func.attr
            is_torch = isinstance(owner, ast.Name) and owner.id == "torch"
            if is_torch and name in MAKERS and "device" not in {keyword.arg for keyword in node.keywords}:
                found.append(f"{module.path}:{node.lineno}: torch.{name} without device=")
            if not is_torch and name in MOVERS and not node.args and not node.keywords:
                found.append(f"{module.path}:{node.lineno}: .{name}() hides the device: say .to(...)")
    expect_none(found)
