"""Make a model of transformers follow plans, and find out what is needed to use it so. What can be refused at a glance is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from qwengyre.core.errors import UnsupportedModel
from qwengyre.models import interface, recurrences, routing
from qwengyre.models.head import HeadForm, measure
from qwengyre.models.limits import Limit, longest_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KNOWN_LAYERS = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "attention"),
        *("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"),
        *("mlp", "moe", "dense", "sparse"),
    }
)
"""transformers' names of kinds of layers. Not among them: attention to an indexed, compressed or otherwise chosen part of the text."""
FEW_TOKENS = 5
"""Enough to measure a head on."""
LONGEST_REASON = 200
"""Characters of somebody else's error: enough to look for it, and some of them print whole arrays."""


class Followed(NamedTuple):
    form: HeadForm
    body: nn.Module
    """The model without its head."""
    layers: list[nn.Module]
    limit: Limit | None
    has_recurrence: bool
    num_routers: int
    """Whose choice of experts follows plans."""


def take_over(model: PreTrainedModel) -> Followed:
    """From now on `model` computes within `plan.following` only, but for other attention implementations. Raises UnsupportedModel."""
    name, before = type(model).__name__, model.config._attn_implementation
    model.eval()
    if unknown := set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYERS:
        raise UnsupportedModel(name, f"layers of type {', '.join(sorted(unknown))} are not handled")
    try:
        model.set_attn_implementation("eager")
        ids = torch.arange(FEW_TOKENS, device=next(model.get_input_embeddings().parameters()).device)
        form, body = measure(model, ids)
        num_routers = routing.install(model, ids)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever a model's own code raises is a reason to refuse it
        raise UnsupportedModel(name, f"its own forward fails on a few tokens: {sentence(error)}") from error
    finally:
        model.set_attn_implementation(before)
    interface.register()
    has_recurrence = recurrences.install(model)
    if not has_recurrence and not interface.goes_through_interface(model):
        raise UnsupportedModel(name, "it does not go through transformers' AttentionInterface")
    model.set_attn_implementation(interface.NAME)
    return Followed(form, body, layers_of(body), longest_text(model), has_recurrence, num_routers)


def layers_of(body: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in order: its shallowest list of modules. Empty when it has none."""
    lists = [(name.count("."), -len(found), found) for name, found in body.named_modules() if isinstance(found, nn.ModuleList)]
    return list(min(lists, key=lambda entry: entry[:2])[2]) if lists else []


def sentence(error: Exception) -> str:
    """An error of a model's own code on one line, with its type."""
    if "'Visibility'" in str(error):
        return "it works on its attention mask itself, which is not there"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:LONGEST_REASON]}" if said else type(error).__name__
