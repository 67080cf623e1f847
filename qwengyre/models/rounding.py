"""A model of transformers answers the probe (`probe.py`): exactly, and with the output of every module rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qwengyre.models.probe import NUM_TOKENS, UNITS, Probe, text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP = math.sqrt(12)
"""What a whole step between two numbers is to the root mean square of rounding to the nearest, which is even over half a step each way."""


def made_of(ids: Sequence[int], exact: Tensor, rounded: Tensor, model: nn.Module) -> Probe:
    """From log-probs as `model` computes them and within `rounding`."""
    unit = float(torch.finfo(next(model.parameters()).dtype).eps) / 2
    gap = (rounded.double() - exact.double()).square().mean().sqrt()
    if next(model.parameters()).dtype == torch.bfloat16:
        gap = gap / STEP
    widest = max((parameter.shape[-1] for parameter in model.parameters() if parameter.ndim > 1), default=1)
    return Probe(tuple(map(int, ids)), tuple(exact.double().tolist()), float(gap) / UNITS["bfloat16"], widest, unit)


@contextmanager
def rounding(model: nn.Module) -> Iterator[None]:
    """Within the block the output of every module of `model` is rounded to bfloat16. What is bfloat16 already goes one step up or down at
    random, always the same way, as if it had been rounded from a number in between.
    """

    def rounded(output: Any) -> Any:
        if isinstance(output, Tensor):
            return _rounded(output) if output.is_floating_point() else output
        return tuple(rounded(part) for part in output) if type(output) is tuple else output

    with ExitStack() as stack:
        for module in model.modules():
            handle = module.register_forward_hook(lambda module, inputs, output: rounded(output))
            stack.callback(handle.remove)
        yield


@torch.inference_mode()
def probe_of(model: PreTrainedModel, num_tokens: int = NUM_TOKENS + 1) -> Probe:
    """By the model's own forward, as transformers has it."""
    before = model.config._attn_implementation
    output = model.get_output_embeddings()
    assert isinstance(output, nn.Linear), "anything else was refused"
    ids = torch.from_numpy(text(output.weight.shape[0])[:num_tokens])
    try:
        model.set_attn_implementation("eager")
        exact = _own(model, ids)
        with rounding(model):
            return made_of(ids.tolist(), exact, _own(model, ids), model)
    finally:
        model.set_attn_implementation(before)


def _rounded(output: Tensor) -> Tensor:
    if output.dtype != torch.bfloat16:
        return output.to(torch.bfloat16).to(output.dtype)
    bits = output.view(torch.int16)
    drawn = torch.randint(
        2, output.shape, generator=torch.Generator().manual_seed(output.numel()), device="cpu", dtype=torch.int16
    )
    step = (1 - 2 * drawn).to(output.device)
    return torch.where(output.abs() > torch.finfo(torch.bfloat16).tiny, bits + step, bits).view(torch.bfloat16)


def _own(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
