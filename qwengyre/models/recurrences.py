"""Short convolutions and recurrent scans of any transformers model by the plan of the pass.

`n` tokens of this pass, `C` channels, `K` taps.

transformers' linear-attention, state-space and short-convolution layers call functions of their modeling module by name. `install`
puts versions in their place that follow the plan when there is one, and that are the originals otherwise.

* Convolution: tap j of a token reads the token j before it, wherever that lies. One gather for each tap.
* Scans: gated delta rule (arXiv 2412.06464, eq. 10), Kimi's delta attention (arXiv 2510.26692), Mamba (arXiv 2312.00752) and Mamba 2
  (arXiv 2405.21060). The tokens are cut into pieces, each scanned from the state that the plan gives to the one that it keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.models.plan import LayerPlan, current

CONV = "causal_conv1d_fn"
RULE = "torch_chunk_gated_delta_rule"


class Scan(NamedTuple):
    """How one of transformers' scans takes and gives its state."""

    initial: str
    final: str
    returns_pair: bool
    """(output, state) always; else the output alone unless the state was asked for."""
    axis: int = 1
    """Of the tokens, in the output and in every argument of three or more axes."""
    works_in_chunks: bool = True
    by: Callable[..., Any] | None = None
    """What scans a piece, where transformers' own function cannot start from a state."""


def selective_scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Mamba's scan from `initial_state`: arguments are those of transformers' `mamba_selective_scan`. Tokens are on axis 2.

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, y_t = C_t h_t + D x_t (arXiv 2312.00752, eq. 2 and 4), gated by silu(z).
    """
    initial, D, z, bias = (options.get(name) for name in ("initial_state", "D", "z", "delta_bias"))
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    if options.get("delta_softplus"):
        dt = nn.functional.softplus(dt)
    decay = torch.exp(A[None, :, None, :] * dt[..., None])
    entered = dt[..., None] * B.transpose(1, 2)[:, None].float() * hidden_states[..., None].float()
    state = torch.zeros_like(entered[:, :, 0]) if initial is None else initial
    outs = []
    for decay_t, entered_t, read_t in zip(decay.unbind(2), entered.unbind(2), C.unbind(2), strict=True):
        state = decay_t * state + entered_t
        outs.append((state.to(hidden_states.dtype) @ read_t[..., None])[..., 0])
    out = torch.stack(outs, -1)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    return out if z is None else out * nn.functional.silu(z), state


SCANS = {
    RULE: Scan("initial_state", "output_final_state", True),
    "chunk_kimi_delta_attention": Scan("initial_state", "output_final_state", True),
    "mamba2_chunk_scan": Scan("initial_states", "return_final_states", False),
    "mamba_selective_scan": Scan("initial_state", "return_last_state", False, axis=2, works_in_chunks=False, by=selective_scan),
}
"""By function."""

FOLLOWS = "follows_plans"
"""Marks a function that has been replaced."""
LONGEST_CHUNK, SHORTEST_CHUNK = 64, 16
"""Tokens that a scan works on at once. It pads a piece to a multiple, so short pieces take short chunks."""


def install(model: nn.Module) -> bool:
    """Make the recurrent layers of `model` follow plans, for the whole process. Returns whether there are any."""
    found = False
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules.get(name)
        for function in (CONV, *SCANS):
            original = vars(module).get(function) if module else None
            if original is None:
                continue
            found = True
            if not hasattr(original, FOLLOWS):
                setattr(module, function, _convolution(original) if function == CONV else _scan(original, SCANS[function]))
    return found


def _convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any) -> Tensor:
        """x (1, C, n), weight (C, K) -> (1, C, n)."""
        if (plan := current()) is None:
            convolved: Tensor = original(x, weight, bias, activation=activation, **kwargs)
            return convolved
        rows_MC, above_nK = plan.reach(x[0].T, weight.shape[1])
        out = rows_MC.new_zeros(()) if bias is None else bias
        for tap in range(weight.shape[1]):
            exists_n = torch.from_numpy(above_nK[:, tap] >= 0).to(x.device)
            taken = rows_MC.index_select(0, torch.from_numpy(np.maximum(above_nK[:, tap], 0)).to(x.device))
            out = out + taken * exists_n[:, None] * weight[:, weight.shape[1] - 1 - tap]
        if activation is not None:
            from transformers.activations import ACT2FN

            out = ACT2FN[activation](out)
        return out.T[None].to(x.dtype)

    setattr(convolve, FOLLOWS, True)
    return convolve


def _scan(original: Callable[..., Any], scan: Scan) -> Callable[..., Any]:
    def scanned(*args: Any, **kwargs: Any) -> Any:
        """As the original, for one text; the state that it was asked for is None."""
        if (plan := current()) is None:
            return original(*args, **kwargs)
        out = _by_pieces(plan, original, scan, args, kwargs)
        return (out, None) if scan.returns_pair else out

    setattr(scanned, FOLLOWS, True)
    return scanned


def _by_pieces(
    plan: LayerPlan, original: Callable[..., Any], scan: Scan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    lengths, states, run = plan.cuts(), plan.next_scan(), scan.by or original
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    split = {
        place: torch.split(value, lengths, dim=scan.axis)
        for place, value in places
        if _holds_tokens(value, sum(lengths), scan.axis)
    }
    outs: dict[int, Tensor] = {}
    for group in plan.groups():
        given = {place: torch.cat([parts[piece] for piece in group]) for place, parts in split.items()}
        named = kwargs | {scan.final: True, scan.initial: states.before(group, next(iter(given.values())))}
        if scan.works_in_chunks:
            named["chunk_size"] = _chunk_size(lengths[group[0]])
        named |= {place: value for place, value in given.items() if isinstance(place, str)}
        out, state = run(*(given.get(place, value) for place, value in enumerate(args)), **named)
        states.after(group, state)
        for piece, part in zip(group, out.split(1), strict=True):
            outs[piece] = part
    return torch.cat([outs[piece] for piece in range(len(lengths))], scan.axis)


def _holds_tokens(value: object, num_tokens: int, axis: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 3 and value.shape[0] == 1 and value.shape[axis] == num_tokens


def _chunk_size(num_tokens: int) -> int:
    """
    >>> [_chunk_size(n) for n in (1, 16, 17, 40, 5000)]
    [1, 16, 32, 64, 64]
    """
    if num_tokens == 1:
        return 1
    size = SHORTEST_CHUNK
    while size < min(num_tokens, LONGEST_CHUNK):
        size *= 2
    return size
