"""Log-probs and entropy from hidden states without keeping logits, and the backward of any loss whose coefficients are known.

`O` trained tokens, `H` hidden size, `V` vocabulary. Logits exist for `chunk` tokens at a time. With coef = dloss/dlogp known,
the gradient of the logits is coef * (onehot - softmax) / T: one chunk of logits is turned into its gradient in place. How logits
follow from the output matrix is the model's `HeadForm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qwengyre.models.head import HeadForm
from qwengyre.models.placement import wide


class Layer(NamedTuple):
    """How the output layer bends its products, its bias (V,) and where the gradient of that is added (None: it is not wanted)."""

    form: HeadForm = HeadForm()
    bias_V: Tensor | None = None
    bias_grad_V: Tensor | None = None


PLAIN = Layer()


class HeadResult:
    """logp (O,) of the targets under softmax(logits / T), entropy (O,) in nats; what the backward needs. In the dtype of sums."""

    __slots__ = ("entropy_O", "layer", "logits", "logp_O", "lse_O")

    def __init__(self, num_targets: int, like: Tensor, layer: Layer = PLAIN):
        self.logp_O, self.entropy_O, self.lse_O = (like.new_empty(num_targets, dtype=wide(like.dtype)) for _ in range(3))
        self.layer = layer
        self.logits: Tensor | None = None
        """Logits / T, kept when all targets fit in one chunk."""


@torch.no_grad()
def logprobs(
    hidden_OH: Tensor, weight_VH: Tensor, target_O: Tensor, temperature_O: Tensor, chunk: int, layer: Layer = PLAIN
) -> HeadResult:
    """
    >>> h, w = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> round(logprobs(h, w, torch.tensor([1]), torch.tensor([1.0]), 8).logp_O.item(), 4)
    -0.6931
    """
    num_targets = len(target_O)
    result = HeadResult(num_targets, hidden_OH, layer)
    for start in range(0, num_targets, chunk):
        part = slice(start, min(start + chunk, num_targets))
        logits = _logits(hidden_OH[part], weight_VH, layer).div_(temperature_O[part, None])
        lse = torch.logsumexp(logits, dim=-1)
        result.lse_O[part] = lse
        result.logp_O[part] = logits.gather(1, target_O[part, None])[:, 0] - lse
        probability = torch.exp(logits - lse[:, None])
        result.entropy_O[part] = lse - torch.linalg.vecdot(probability, logits)
        if num_targets <= chunk:
            result.logits = logits
    return result


@torch.no_grad()
def backward(
    result: HeadResult,
    coef_O: Tensor,
    inputs: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
    weight_grad_VH: Tensor | None,
    chunk: int,
) -> Tensor:
    """Add d sum(coef * logp) / dweight into `weight_grad_VH`, if given; return the gradient of the hidden states (O, H).

    `inputs` are (hidden_OH, weight_VH), `targets` are (target_O, temperature_O) as given to `logprobs`.
    """
    (hidden_OH, weight_VH), (target_O, temperature_O) = inputs, targets
    form, _, bias_grad_V = result.layer
    weight_VH = weight_VH[: form.num_words]
    d_hidden_OH = torch.empty_like(hidden_OH)
    for start in range(0, len(target_O), chunk):
        part = slice(start, min(start + chunk, len(target_O)))
        logits = result.logits
        if logits is None:
            logits = _logits(hidden_OH[part], weight_VH, result.layer).div_(temperature_O[part, None])
        slope = None if form.cap is None else form.slope(logits * temperature_O[part, None])
        scale = (coef_O[part] / temperature_O[part])[:, None]
        d_logits = logits.sub_(result.lse_O[part, None]).exp_().mul_(-scale)
        d_logits.scatter_add_(1, target_O[part, None], scale)
        if slope is not None:
            d_logits.mul_(slope)
        if bias_grad_V is not None:
            bias_grad_V[: form.num_words].add_(d_logits.sum(0))
        if form.scale != 1.0:
            d_logits.mul_(form.scale)
        d_logits = d_logits.to(hidden_OH.dtype)
        d_hidden_OH[part] = d_logits @ weight_VH
        if weight_grad_VH is not None:
            _add_product(weight_grad_VH[: form.num_words], d_logits.T, hidden_OH[part])
    result.logits = None
    return d_hidden_OH


def _logits(hidden_OH: Tensor, weight_VH: Tensor, layer: Layer) -> Tensor:
    bias_V = None if layer.bias_V is None else layer.bias_V[: layer.form.num_words]
    products = hidden_OH @ weight_VH[: layer.form.num_words].T
    return layer.form.bend(products.to(wide(products.dtype)), bias_V)


def _add_product(sums: Tensor, one: Tensor, other: Tensor) -> None:
    """sums += one @ other, whatever narrower numbers those two are of."""
    if sums.dtype == one.dtype:
        sums.addmm_(one, other)
    else:
        sums.add_(one @ other)
