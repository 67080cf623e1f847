"""Attention of any transformers model by the plan of the pass, through transformers' own `AttentionInterface`.

`NAME` is the attention implementation. In place of a mask, layers are handed the `Visibility` that the mask would have been made
of, so that windows and the like hold along a text wherever its tokens lie. What a layer asks of attention and is not known here is
refused, never left out.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from qwengyre.core.errors import UnsupportedModel
from qwengyre.models.plan import ScoreRule, current
from qwengyre.models.visibility import Visibility

NAME = "qwengyre"

HARMLESS = frozenset(
    {
        "scaling",
        "softcap",
        "s_aux",
        "sinks",
        "sliding_window",  # the mask says it too, and is what transformers' own attention goes by
        "position_ids",
        "position_embeddings",
        "cache",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "layer_idx",
    }
)
"""Options that are read, or that do not change what attention computes."""


def register() -> None:
    """Make `NAME` known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, visibility)


def visibility(*args: Any, mask_function: Any = None, **options: Any) -> Visibility:
    """transformers' signature of a function that makes a mask."""
    return Visibility(None if _is_plain(mask_function) else mask_function)


def _is_plain(mask_function: Any) -> bool:
    from transformers.masking_utils import causal_mask_function

    return mask_function is causal_mask_function


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature: query (1, Hq, n, d), key (1, Hk, n, d), value (1, Hk, n, e) -> (1, n, Hq, e)."""
    plan = current()
    if plan is None:
        raise TypeError(f"attention {NAME!r} needs a plan: call the model within models.plan.following")
    return plan.attend(query, key, value, scores_of(module, query, attention_mask, options)), None


def scores_of(module: nn.Module, query: Tensor, mask: Any, options: dict[str, Any]) -> ScoreRule:
    """What the layer asks for. Raises UnsupportedModel when that is more than is known here."""
    name = type(module).__name__
    if options.get("dropout"):
        raise UnsupportedModel(name, f"it drops out {options['dropout']} of its attention in eval mode: log-probs are random")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModel(name, "its attention looks at later tokens, too")
    if mask is not None and not isinstance(mask, Visibility):
        raise UnsupportedModel(name, "it makes its own attention mask")
    unknown = [option for option, given in options.items() if given is not None and option not in HARMLESS]
    if unknown := sorted(set(unknown) - {"dropout", "is_causal"}):
        raise UnsupportedModel(name, f"attention with {', '.join(unknown)} is not handled")
    sinks = options.get("s_aux") if options.get("s_aux") is not None else options.get("sinks")
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise UnsupportedModel(name, f"attention sinks of shape {tuple(sinks.shape)} are not one for each head")
    scale = options.get("scaling")
    return ScoreRule(
        query.shape[-1] ** -0.5 if scale is None else scale, mask or Visibility(), options.get("softcap") or None, sinks
    )


def goes_through_interface(model: nn.Module) -> bool:
    """Whether some layer of `model` asks transformers which attention to use."""
    modules = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in modules)
