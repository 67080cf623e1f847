"""What a model makes of its last hidden states: `cap * tanh(scale * (h W^T) / cap)` over the first words, as measured on itself.

Models scale before or after the output matrix, by this or that key of their config or its inverse, cap, and leave padded words out.
Names do not tell (`logits_scaling` divides in Granite and multiplies in HyperCLOVA X), so `measure` compares what goes into the
output matrix, what comes out and the logits.

`n` tokens, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from qwengyre.core.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeadForm(NamedTuple):
    """logits = cap * tanh(u / cap) with u = scale * (h @ W[:num_words].T) + bias."""

    scale: float = 1.0
    cap: float | None = None
    num_words: int | None = None
    """None: all rows of the matrix."""

    def bend(self, products: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Logits (n, V) from h @ W.T, which is overwritten."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if bias_V is not None:
            products.add_(bias_V)
        if self.cap is not None:
            products.div_(self.cap).tanh_().mul_(self.cap)
        return products

    def slope(self, logits: Tensor) -> Tensor:
        """d logits / d u of capped logits, from the logits."""
        assert self.cap is not None
        return 1 - (logits / self.cap).square_()


class ObservedPass(NamedTuple):
    """One plain pass of a model, by hooks."""

    body: nn.Module
    """The model without its head."""
    hidden_nH: Tensor
    """What that returns."""
    into_nH: Tensor
    """What the output matrix is given."""
    products_nV: Tensor
    logits_nV: Tensor


@torch.no_grad()
def measure(model: PreTrainedModel, token_ids: Tensor) -> tuple[HeadForm, nn.Module]:
    """How `model` makes logits, and of which of its modules' output. Raises UnsupportedModel when they are not a scaled and capped product."""
    name, output = type(model).__name__, model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise UnsupportedModel(name, "its output layer is not one matrix")
    seen = _watch(model, output, token_ids)
    if seen.into_nH.shape != seen.hidden_nH.shape or seen.logits_nV.shape[0] != seen.products_nV.shape[0]:
        raise UnsupportedModel(name, "its output layer does not read the last hidden state of each token")
    product_nV = nn.functional.linear(seen.into_nH, output.weight, output.bias)
    if not torch.allclose(seen.products_nV, product_nV, rtol=0, atol=_tolerance(product_nV)):
        raise UnsupportedModel(name, "its output layer does more than to multiply with one matrix")
    num_words = seen.logits_nV.shape[1]
    products_nV = seen.products_nV[:, :num_words]
    before = _factor(model, seen.hidden_nH, seen.into_nH)
    if before is None:
        raise UnsupportedModel(name, "what its output layer reads is more than a scaled last hidden state")
    if output.bias is not None and before != 1.0:
        raise UnsupportedModel(name, "it scales what its output layer, which has a bias, reads")
    kept = num_words if num_words < seen.products_nV.shape[1] else None
    after, cap = _factor(model, products_nV, seen.logits_nV), None
    if after is None:
        after, cap = _bent(model, products_nV, seen.logits_nV)
    if after is None:
        raise UnsupportedModel(
            name, "its logits are not a scaled or capped product of the last hidden state and the output matrix"
        )
    if output.bias is not None and after != 1.0:
        raise UnsupportedModel(name, "it scales what its output layer, which has a bias, gives")
    return HeadForm(before * after, cap, kept), seen.body


def _watch(model: PreTrainedModel, output: nn.Linear, token_ids: Tensor) -> ObservedPass:
    bodies: list[tuple[nn.Module, Tensor]] = []
    heads: list[tuple[Tensor, Tensor]] = []

    def keep_hidden(module: nn.Module, args: Any, result: Any) -> None:
        bodies.append((module, result[0] if isinstance(result, tuple) else result.last_hidden_state))

    known = {id(found): found for found in (model.base_model, model.get_decoder()) if found is not model}
    candidates = list(known.values()) or [found for found in [getattr(model, "model", None)] if isinstance(found, nn.Module)]
    hooks = [candidate.register_forward_hook(keep_hidden) for candidate in candidates]
    hooks.append(output.register_forward_hook(lambda module, args, result: heads.append((args[0], result.clone()))))
    try:
        logits = model(input_ids=token_ids[None], use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not bodies or len(heads) != 1:
        raise UnsupportedModel(type(model).__name__, "its logits do not come from one pass of its body through its output layer")
    body, hidden = bodies[-1]
    return ObservedPass(body, *(part.reshape(-1, part.shape[-1]) for part in (hidden, *heads[0], logits)))


def _factor(model: PreTrainedModel, before: Tensor, after: Tensor) -> float | None:
    """The number that turns `before` into `after`, as the config has it when it is there; None when no number does."""
    if torch.equal(before, after):
        return 1.0
    x, y = before.double(), after.double()
    factor = float((x * y).sum() / (x * x).sum().clamp_min(torch.finfo(x.dtype).tiny))
    if not math.isfinite(factor) or float((x * factor - y).abs().max()) > _tolerance(after):
        return None
    stated = [value for number in _numbers(model.config, "") for value in (number, 1 / number)]
    return min((v for v in stated if math.isclose(v, factor, rel_tol=1e-6)), key=lambda v: abs(v - factor), default=factor)


def _bent(model: PreTrainedModel, before: Tensor, after: Tensor) -> tuple[float | None, float | None]:
    """The number and the cap of the config that turn `before` into `after`; (None, None) when none do."""
    for cap in _numbers(model.config, "cap"):
        within = after.abs() < cap / 2
        flat = cap * torch.atanh(after[within].double() / cap)
        estimate = _factor(model, before[within], flat.to(after.dtype)) if within.any() else None
        for factor in (1.0, estimate):
            if factor is not None and float((HeadForm(factor, cap).bend(before.clone()) - after).abs().max()) <= _tolerance(
                after
            ):
                return factor, cap
    return None, None


def _tolerance(values: Tensor) -> float:
    """Rounding of a few operations on numbers of this size."""
    return 64 * torch.finfo(values.dtype).eps * float(values.abs().max())


def _numbers(config: Any, part_of_name: str) -> Iterator[float]:
    """Numbers above 0 of the model's config, by keys that contain `part_of_name`."""
    for key, value in config.get_text_config().to_dict().items():
        if part_of_name in key and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            yield float(value)
