"""Which experts a token went to: noted by the plan of an engine's pass, given back by the plan of a trainer's.

A router scores all experts and takes the best few by `torch.topk`. In bfloat16 two programs often differ in the last of them, and a token
that goes to another expert has other log-probs. So the trainer takes the experts that the engine took, and the scores of its own router
for them: gradients reach the router as ever (routing replay, arXiv 2510.11370).

`n` tokens of a pass, `E` experts, `K` of them for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from qwengyre.models.plan import current

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""By these keys configs say how many experts there are, and how many a token goes to."""
MOST_EXPERTS = 255
"""A route is a byte for each expert, and one value of it says that none is known (`trajectory.layout.NO_ROUTE`)."""


class Choice(TorchFunctionMode):
    """Within the block, the best `K` of `E` are those of the pass's plan."""

    def __init__(self, num_experts: set[int], num_chosen: set[int]):
        super().__init__()
        self._num_experts, self._num_chosen = num_experts, num_chosen
        self.num_seen = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or not self._is_choice(args[0], result.indices):
            return result
        self.num_seen += 1
        if (plan := current()) is None:
            return result
        chosen_nK = plan.choose(result.indices)
        return result if chosen_nK is result.indices else torch.return_types.topk((args[0].gather(-1, chosen_nK), chosen_nK))

    def _is_choice(self, scores: Tensor, chosen: Tensor) -> bool:
        return scores.ndim == 2 and scores.shape[1] in self._num_experts and chosen.shape[1] in self._num_chosen


def install(model: PreTrainedModel, token_ids: Tensor) -> int:
    """Make the routers of `model` follow plans; return how many there are. One plain pass finds them: `token_ids` are arbitrary."""
    config = model.config.get_text_config().to_dict()
    sizes = [{value for key in keys if isinstance(value := config.get(key), int)} for keys in (NUM_EXPERTS, NUM_CHOSEN)]
    if not all(sizes) or max(sizes[0]) > MOST_EXPERTS:
        return 0
    num_seen = 0
    for module in _choosing(model, token_ids, sizes):
        num_seen += 1
        if not hasattr(module.forward, "follows_plans"):
            module.forward = _followed(module.forward, sizes)
    return num_seen


def _followed(original: Any, sizes: list[set[int]]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(*args, **kwargs)
        with Choice(*sizes):
            return original(*args, **kwargs)

    setattr(forward, "follows_plans", True)  # noqa: B010 (a function has no such attribute for the type checker)
    return forward


@torch.no_grad()
def _choosing(model: nn.Module, token_ids: Tensor, sizes: list[set[int]]) -> list[nn.Module]:
    """The innermost modules in whose forward experts are chosen, once each in one pass; [] when one of them chooses twice."""
    stack: list[nn.Module] = []
    found: list[nn.Module] = []

    class Watch(Choice):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            before = self.num_seen
            result = super().__torch_function__(func, types, args, kwargs)
            if self.num_seen > before:
                found.append(stack[-1])
            return result

    with _stacked(model, stack), Watch(*sizes):
        model(input_ids=token_ids[None], use_cache=False)
    return found if len({id(module) for module in found}) == len(found) else []


@contextmanager
def _stacked(model: nn.Module, stack: list[nn.Module]) -> Iterator[None]:
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, args: stack.append(module)))
        hooks.append(module.register_forward_hook(lambda module, args, output: stack.pop() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
