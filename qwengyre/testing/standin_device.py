"""A device that is not there, for tests of where tensors are made: its tensors cannot be read as memory of the host.

Every operator runs on the host, behind tensors that say they are on `standin:0`. As on a real device, an operator that is given tensors
of the device and of the host raises, but for numbers (no axes) and for copies from one to the other. Autograd goes through torch's own
engine and its thread for the device. What it does not show: kernels, streams, pinned memory, collectives on a device.

`python -m qwengyre.testing.standin_device MODULE ARGUMENTS` runs a module in whose process torch's inference mode is `no_grad`: the mode
leaves out steps of torch's dispatcher that make these tensors views of one another.

>>> with standin_device() as device:
...     ones = torch.ones(2, device=device)
...     (ones + ones).device.type, (ones + ones).to("cpu").tolist()
('standin', [2.0, 2.0])
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

NAME = "standin"
COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::_copy_from"})
"""Operators that may take tensors of both sides."""


class MixedDevices(RuntimeError):
    """An operator was given tensors of the device and of the host."""


class DeviceTensor(torch.Tensor):
    """`numbers` lie on the host."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.numbers = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the function that stands for none
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(operator, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch leaves its own untyped
        return f"{NAME}({self.numbers!r})"


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on the host; what it returns is on the device if it was told so, or if any of its tensors is."""
    name = operator._schema.name
    given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    there = [value for value in given if isinstance(value, DeviceTensor)]
    told = kwargs.get("device")
    goes = torch.device(told).type == NAME if told is not None else bool(there)
    if there and name not in COPIES and any(value.ndim for value in given if not isinstance(value, DeviceTensor)):
        shapes = ", ".join(f"{value.device.type}{list(value.shape)}" for value in given)
        raise MixedDevices(f"{name} of tensors on several devices: {shapes}")
    if name == "aten::copy_":
        goes = isinstance(args[0], DeviceTensor)
    inner_kwargs = tree_map(_inner, kwargs)
    if told is not None:
        inner_kwargs["device"] = torch.device("cpu")
    if inner_kwargs.get("pin_memory"):
        raise MixedDevices(f"{name}: memory of a device cannot be pinned")
    inner_args = tree_map(_inner, args)
    if name == "aten::histc" and not inner_args[0].is_floating_point():  # which devices have and the host has not
        out = operator(inner_args[0].double(), *inner_args[1:], **inner_kwargs).to(inner_args[0].dtype)
    else:
        out = operator(*inner_args, **inner_kwargs)
    if name == "aten::_to_copy" and not any(out is value for value in given) and out.data_ptr() == _inner(given[0]).data_ptr():
        out = out.clone()
    own = {id(value.numbers): value for value in there} | {id(value): value for value in given}
    wrap = functools.partial(_outer, own=own, goes=goes)
    return tree_map(wrap, out)


def _inner(value: Any) -> Any:
    return value.numbers if isinstance(value, DeviceTensor) else value


def _outer(value: Any, own: dict[int, Tensor], goes: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return own.get(id(value)) if id(value) in own else DeviceTensor(value) if goes else value


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(operator, args, kwargs or {})


@functools.cache
def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)


@contextmanager
def standin_device() -> Iterator[torch.device]:
    """Within the block tensors can be made on the device, in a process of its own: torch has one such device for good, knows of it only
    when nothing went backward before, and other code may take it for an accelerator.
    """
    _register()
    with _Mode():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield torch.device(NAME, 0)


if __name__ == "__main__":
    setattr(torch, "inference_mode", torch.no_grad)  # noqa: B010 (the type checker holds it to be of one type)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
