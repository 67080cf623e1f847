"""Low-rank adapters (LoRA, arXiv 2106.09685, section 4.1): a linear layer computes `W x + alpha / rank * B A x`, and W stays as it was.

Of a module `m` whose weight is `m.weight` (out, in) the adapter is `m.lora_A` (rank, in) and `m.lora_B` (out, rank). B begins at zero, so
that a policy begins as its model. An engine computes with `W + alpha / rank * B A` and needs neither; files are PEFT's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.core.errors import ConfigError, ModelRefused, UnsupportedModel
from qwengyre.models.adapter_record import Adapter, adapter_in
from qwengyre.models.follow import sentence
from qwengyre.models.shrink import small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

A, B, WEIGHT = ".lora_A", ".lora_B", ".weight"
PEFT: Final = "base_model.model."
"""What PEFT's names of parameters begin with."""
TARGETS_KEY: Final = "trainer.lora.targets"
SEED: Final = 0
"""Of the first A: every cell draws the same, and a run that is begun again, too."""
WITHOUT: Final = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj")
"""By model_type: layers whose weight a kernel reads by itself, so that PEFT refuses an adapter to them."""
OF_EXPERTS: Final = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Where a model's experts lie in one array, PEFT 0.21 takes layers of these names for them, also dense ones and shared experts."""
FEW_TOKENS: Final = 12
TRIES: Final = 3
"""With other weights each: an expert that is chosen by a hair may be another one when sums are rounded otherwise."""
ROUNDINGS: Final = 256
"""Differences that rounding may make to logits, in units of eps for each of the largest: adapted and merged weights add up in another
order. Of families that are right less than 20 was seen; an adapter that a layer passes over moves logits by a tenth of themselves."""

Arrays = Mapping[str, np.ndarray]


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter. A module of a model becomes one in place, so that its weight keeps its name."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        low = nn.functional.linear(input, self.lora_A)
        return nn.functional.linear(input, self.weight, self.bias) + nn.functional.linear(low, self.lora_B).mul(self.scale)


def adapt(model: PreTrainedModel, adapter: Adapter, targets: Sequence[str] = ()) -> None:
    """Give linear layers of `model` an adapter, and leave nothing else to train.

    `targets` as PEFT reads them: a module's name or what that ends with; none: every linear layer but the head. Raises ConfigError for
    one that there is not, UnsupportedModel for a family that an adapter would train otherwise than it is merged.
    """
    chosen = find_targets(model, targets)
    _try_family(model, adapter, {name.rpartition(".")[2] for name in chosen})
    _attach(model, chosen, adapter)


def find_targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Names of the modules that get an adapter, in the model's order. Raises ConfigError with the names that exist."""
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    has_fused = any(name.rpartition(".")[0].endswith(".experts") and p.ndim == 3 for name, p in model.named_parameters())
    without = {WITHOUT.get(model.config.model_type), *(OF_EXPERTS if has_fused else ())}
    known = [name for name in linear if name.rpartition(".")[2] not in without]
    short = sorted({name.rpartition(".")[2] for name in known})
    for target in targets:
        if not any(_is_named(name, target) for name in known):
            raise ConfigError(
                f"no linear layer of a {type(model).__name__} that can have an adapter is called {target!r}: it has {', '.join(short)}",
                key=TARGETS_KEY,
            )
    if not known:
        raise ConfigError(
            f"a {type(model).__name__} has no linear layer of its own to adapt: train it whole", key="trainer.lora.rank"
        )
    return [name for name in known if not targets or any(_is_named(name, target) for target in targets)]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _attach(model: PreTrainedModel, chosen: Sequence[str], adapter: Adapter) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    drawn = torch.Generator().manual_seed(SEED)
    for name in chosen:
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        (num_out, num_in), like = module.weight.shape, module.weight
        bound = 1 / math.sqrt(num_in)  # uniform, as PEFT begins it
        first = (2 * torch.rand(adapter.rank, num_in, generator=drawn, device="cpu") - 1) * bound
        module.__class__ = AdaptedLinear
        module.register_parameter("lora_A", nn.Parameter(first.to(like)))
        module.register_parameter("lora_B", nn.Parameter(like.new_zeros(num_out, adapter.rank)))
        setattr(module, "scale", adapter.scale)  # noqa: B010  a module's own types know parameters only
    model.get_input_embeddings().register_forward_hook(_with_gradient)


def _with_gradient(module: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> None:
    """Keys of a layer without an adapter take gradients to those before it, as in whole training."""
    if torch.is_grad_enabled() and embedded.is_leaf:
        embedded.requires_grad_()


def _try_family(model: PreTrainedModel, adapter: Adapter, layers: set[str]) -> None:
    """Raises UnsupportedModel when adapters to layers of these names compute otherwise than merged weights, in tiny models of the family.

    One reads its weight by itself, for instance. A family that cannot be made small is not tried: the probe finds it at the first publish.
    """
    reason = ""
    for _ in range(TRIES):
        if (small := small_model(model.config)) is None:
            return
        try:
            reason = _difference(small, adapter, layers)
        except Exception as error:  # whatever a model's own code raises is a reason to refuse it
            raise UnsupportedModel(type(model).__name__, f"its own forward fails on a few tokens: {sentence(error)}") from error
        if not reason:
            return
    raise UnsupportedModel(type(model).__name__, f"{reason}: name fewer in {TARGETS_KEY}")


@torch.no_grad()
def _difference(model: PreTrainedModel, adapter: Adapter, layers: set[str]) -> str:
    """What is wrong with adapters to `model`, which is changed by it; "": nothing."""
    chosen = [name for name in find_targets(model, ()) if name.rpartition(".")[2] in layers]
    drawn, ids = torch.Generator().manual_seed(SEED), torch.arange(FEW_TOKENS, device="cpu")[None]
    model.set_attn_implementation("eager")
    for name in chosen:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        weight.normal_(0, weight.shape[1] ** -0.5, generator=drawn)
    _attach(model, chosen, adapter)
    adapted_layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted_layers:
        module.lora_B.normal_(0, 1 / adapter.scale / adapter.rank**0.5, generator=drawn)
    adapted = model(input_ids=ids, use_cache=False).logits
    for module in adapted_layers:
        module.weight.addmm_(module.lora_B, module.lora_A, alpha=adapter.scale)
        module.lora_B.zero_()
    own = model(input_ids=ids, use_cache=False).logits
    gap, bound = float((adapted - own).abs().max()), ROUNDINGS * torch.finfo(own.dtype).eps * max(1.0, float(own.abs().max()))
    if gap <= bound:
        return ""
    return (
        f"with adapters to its {', '.join(sorted(layers))}, logits are up to {gap:.2g} away from those of the merged weights"
        f" (rounding: {bound:.1g})"
    )


def merging(base: Arrays, published: Arrays) -> Callable[[dict[str, np.ndarray]], None]:
    """What fills arrays, named as those of `base`, with the merged weights. Raises ModelRefused for adapters of another model."""
    adapter = adapter_in(published)
    assert adapter is not None, "whole weights need no base"
    for name, array in published.items():
        if name.endswith((A, B)):
            weight = base.get(name.removesuffix(A).removesuffix(B) + WEIGHT)
            fits = weight is not None and array.shape == (
                (adapter.rank, weight.shape[1]) if name.endswith(A) else (weight.shape[0], adapter.rank)
            )
            if not fits:
                raise ModelRefused(
                    f"the snapshot has an adapter {name!r} of {tuple(array.shape)}, which fits no weight of the model"
                )

    def fill(into: dict[str, np.ndarray]) -> None:
        for name, array in into.items():
            stem = name.removesuffix(WEIGHT)
            if stem + A not in published:
                np.copyto(array, base[name])
                continue
            parts = (base[name], published[stem + B], published[stem + A])
            weight, b, a = (torch.from_numpy(np.require(part, np.float32, ["C", "W"])) for part in parts)
            torch.addmm(weight, b, a, alpha=adapter.scale, out=torch.from_numpy(array))

    return fill


def merged(base: Arrays, published: Arrays) -> dict[str, np.ndarray]:
    """Copies of all of `base`, merged."""
    found = {name: np.empty(array.shape, np.float32) for name, array in base.items()}
    merging(base, published)(found)
    return found


def to_peft(arrays: Arrays) -> dict[str, np.ndarray]:
    """
    >>> list(to_peft({"model.layers.0.mlp.up_proj.lora_A": np.zeros((1, 1))}))
    ['base_model.model.model.layers.0.mlp.up_proj.lora_A.weight']
    """
    return {PEFT + name + WEIGHT: array for name, array in arrays.items() if name.endswith((A, B))}


def from_peft(arrays: Arrays) -> dict[str, np.ndarray]:
    """
    >>> list(from_peft({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((1, 1))}))
    ['model.layers.0.mlp.up_proj.lora_A']
    """
    return {name.removeprefix(PEFT).removesuffix(WEIGHT): array for name, array in arrays.items()}


def peft_config(adapter: Adapter, names: Sequence[str], base: str) -> dict[str, Any]:
    """Of the adapters with these names of parameters, to models in the folder `base`. Modules are told in full: no other one is meant."""
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [name.removesuffix(A) for name in names if name.endswith(A)],
    }
