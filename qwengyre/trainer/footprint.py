"""How much memory a training pass takes at its height, from a model without memory: the real code, over tensors of the meta device.

What is counted are the bytes of all tensors alive at once, intermediate results of the backward pass included, as the code that runs
makes them. The peak grows linearly with the rows of a chunk, so two short rows tell about long ones.

`n` rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel

from qwengyre.models import interface
from qwengyre.models.follow import Followed, layers_of, take_over
from qwengyre.models.placement import wide
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.rows import Targets
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import LayoutPath, build_row

META: Final = torch.device("meta")
SHORT: Final = (256, 512)
"""Rows of the two passes: past what is rounded up to (a scan's chunk of 64), and quick."""


class PassBytes(NamedTuple):
    """Above weights and sums of gradients, on a rank that holds the whole model."""

    fixed: float
    per_row: float
    """For every row of a chunk."""
    kept_per_row: float
    """For every row of a row that runs in chunks: what they hand to one another, and its gradients."""

    def peak(self, chunk_rows: int, rows: int) -> float:
        return self.fixed + self.per_row * min(chunk_rows, rows) + (self.kept_per_row * rows if rows > chunk_rows else 0.0)


def pass_bytes(tree_model: TreeModel) -> PassBytes:
    """Of a `TreeModel` on the meta device. Raises NotImplementedError for a model whose shapes depend on numbers."""
    short, long = SHORT
    first, second = _peak(tree_model, short, short), _peak(tree_model, long, long)
    per_row = (second - first) / (long - short)
    chunked = _peak(tree_model, long, short)
    return PassBytes(max(0.0, first - per_row * short), per_row, max(0.0, (chunked - first) / long))


def on_meta(model: PreTrainedModel, small: PreTrainedModel, config: TrainerConfig) -> TreeModel:
    """`model`, on the meta device, as a small one of its family, which has numbers, is followed. Raises UnsupportedModel."""
    known = take_over(small)
    name = next(name for name, module in small.named_modules() if module is known.body)
    whole = model.get_submodule(name)
    model.eval()
    model.set_attn_implementation(interface.NAME)
    words = None if known.form.num_words is None else model.config.get_text_config().vocab_size
    followed = Followed(known.form._replace(num_words=words), whole, layers_of(whole), None, known.has_recurrence, num_routers=0)
    return TreeModel(model, config, followed=followed)


def _peak(tree_model: TreeModel, rows: int, chunk_rows: int) -> int:
    """Most bytes alive in one `train`, every token a target."""
    before, model = tree_model.config, tree_model.model
    tree_model.config = msgspec.structs.replace(before, chunk_tokens=chunk_rows)
    row = build_row([LayoutPath(np.zeros(rows, np.int32), (((0, 0, 0), rows),))])
    for parameter in model.parameters():
        narrow = wide(parameter.dtype) != parameter.dtype
        parameter.grad = None if narrow else torch.empty_like(parameter)
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters() if wide(p.dtype) != p.dtype]
    alive = _Alive([tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None])
    try:
        with alive:
            tree_model.train(row, every_target(rows), lambda logp_O: torch.zeros_like(logp_O))
    except RuntimeError as error:
        raise NotImplementedError(f"{tree_model.name}: {error}") from error
    finally:
        tree_model.config = before
        for hook in hooks:
            hook.remove()
    return alive.peak


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def every_target(rows: int) -> Targets:
    """Every token of one path of `rows` tokens but the first."""
    num = rows - 1
    zeros_O, none_O = np.zeros(num), np.zeros(num, np.int64)
    return Targets(np.arange(num), none_O, zeros_O, zeros_O, np.ones(num), zeros_O, none_O, np.array([num]), ())


def _without_numbers(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What transformers asks of numbers is whether a mask hides nothing: it does not. torch's rule for `_grouped_mm` on meta knows
    bfloat16 alone.
    """
    name = operator._schema.name
    if name == "aten::_local_scalar_dense" and args[0].device == META:
        return True
    if name != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
        return operator(*args, **kwargs)
    one, other, ends = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
    assert ends is not None  # a grouped product of two matrices or of a stack has them
    shape = (len(ends), one.shape[0], other.shape[1]) if other.ndim == 2 else (one.shape[0], other.shape[2])
    return one.new_empty(shape)


class _Alive(TorchDispatchMode):
    """Bytes of the storages that operators have made and nobody has dropped."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        """`known` were there before, and are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = _without_numbers(operator, args, kwargs or {})
        if operator._schema.name == "aten::logsumexp":  # takes a copy of its input for the exponentials, and drops it
            self.peak = max(self.peak, self.now + args[0].nbytes)
        for value in tree_iter(out):
            if isinstance(value, Tensor) and value.device == META:
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._dropped, num_bytes)

    def _dropped(self, num_bytes: int) -> None:
        self.now -= num_bytes
