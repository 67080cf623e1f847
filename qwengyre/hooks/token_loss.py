"""Call `hooks.token_loss` in a trainer, and hold it to what the loss of a token is. Imports torch: cells and ranks alone use it."""

from __future__ import annotations

import torch
from torch import Tensor

from qwengyre.hooks.load import Hook, HookRef, load_hook
from qwengyre.hooks.loaded import SIGNATURES
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.objectives import Objective, TokenBatch, TokenLoss


def load_token_loss(ref: HookRef | None) -> Objective | None:
    """The objective that a run brings, None without one. Raises ConfigError where it cannot be imported in this process."""
    return None if ref is None else checked(load_hook(ref, SIGNATURES["token_loss"]))


def checked(hook: Hook) -> Objective:
    """A token loss that raises HookFailed for a wrong type, shape or device, for what no gradient comes from, and for NaN."""

    def loss(batch: TokenBatch, config: TrainerConfig) -> TokenLoss:
        made = hook(batch, config)
        nothing_O = torch.zeros_like(batch.logp_O, dtype=torch.bool)
        if isinstance(made, Tensor):
            made = TokenLoss(made, nothing_O, nothing_O)
        if not isinstance(made, TokenLoss):
            raise hook.refused(f"returned {type(made).__name__}: it must return a TokenLoss, or a tensor of losses")
        for name, values_O in made._asdict().items():
            _check_array(hook, name, values_O, batch.logp_O)
        if not made.loss_O.requires_grad:
            raise hook.refused("returned losses that do not depend on batch.logp_O: nothing could be learned from them")
        loss_O, logp_O = made.loss_O.detach(), batch.logp_O.detach()
        if not torch.isfinite(loss_O).all() and _is_finite(batch):
            bad = int((~torch.isfinite(loss_O)).nonzero()[0])
            raise hook.refused(
                f"returned {float(loss_O[bad])} for a token of log-prob {float(logp_O[bad]):g}, recorded "
                f"{float(batch.behavior_O[bad]):g}, advantage {float(batch.advantage_O[bad]):g}: losses must be finite"
            )
        return made

    return loss


def _check_array(hook: Hook, name: str, values_O: object, logp_O: Tensor) -> None:
    if not isinstance(values_O, Tensor):
        raise hook.refused(f"returned {type(values_O).__name__} as {name}: it must be a tensor")
    if values_O.shape != logp_O.shape:
        raise hook.refused(
            f"returned {name} of shape {tuple(values_O.shape)} for {len(logp_O)} tokens: it must be {tuple(logp_O.shape)}"
        )
    if values_O.device != logp_O.device:
        raise hook.refused(f"returned {name} on {values_O.device}: it must be on {logp_O.device}, as batch.logp_O is")
    is_loss = name == "loss_O"
    if is_loss != values_O.is_floating_point() or (not is_loss and values_O.dtype != torch.bool):
        wanted = "floating point numbers" if is_loss else "booleans"
        raise hook.refused(f"returned {name} of {values_O.dtype}: it must hold {wanted}")


def _is_finite(batch: TokenBatch) -> bool:
    given = (batch.logp_O, batch.behavior_O, batch.advantage_O, batch.reference_O)
    return all(bool(torch.isfinite(values_O.detach()).all()) for values_O in given if values_O is not None)
