"""The trainer of one cell: sums of gradients over the micro-steps it claims; on the core also the optimizer.

Nothing is divided until the step closes: E is not known before. Synchronous, one thread, one owner.

    core       begin_step  compute*  [reduce]  apply  expose  save_checkpoint
    satellite  pull  begin_step  compute*  [reduce]
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from qwengyre.core.errors import NonFiniteLoss, TrainerError
from qwengyre.core.records import MicroStep, Trajectory
from qwengyre.models.adapter_record import ADAPTER, Adapter, Base
from qwengyre.models.adapters import from_peft, peft_config, to_peft
from qwengyre.models.load import as_in_folder, as_in_memory, left_in_folder, read_left
from qwengyre.models.placement import HOST, device_of, put
from qwengyre.models.probe import PROBE
from qwengyre.telemetry.folder import snapshot_file
from qwengyre.trainer import allocator, audit, checkpoint, rows
from qwengyre.trainer.aggregation import advantage_deviation, divisor
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.flat import NUM_COUNTERS
from qwengyre.trainer.objectives import Objective, TokenBatch, TokenLoss, coefficients
from qwengyre.trainer.optimizer import AdamW
from qwengyre.trainer.records import AuditReport, MicroStepStats, StepStats
from qwengyre.trainer.sharded import Alone, Ranks
from qwengyre.trainer.tree_model import ALONE, RowOutput, TreeModel
from qwengyre.transfer.api import Exposure, Transport


class Trainer:
    def __init__(
        self,
        model_dir: Path,
        config: TrainerConfig,
        transport: Transport,
        ranks: Alone | Ranks = ALONE,
        device: torch.device | None = None,
        base: Base | None = None,
    ):
        """Load a Hugging Face folder. Raises UnsupportedModel for a model that tree rows would train wrongly.

        `ranks`: this process is one of several that make up the cell; all of them call every method alike. `device`: None is the
        one that the config names. `base` is told the weights that adapters change, for the engine of the same cell.
        """
        self.model_dir, self.config, self.transport = Path(model_dir), config, transport
        self.objective: Objective | None = None
        """In place of the loss that the config names; set before the first step."""
        self.ranks = ranks
        self.device = device_of(config.device) if device is None else device
        self.tree_model = TreeModel.load(self.model_dir, config, ranks, self.device)
        dtype, model = getattr(torch, config.dtype), self.tree_model.model
        self.adapter = Adapter(config.lora.rank, config.lora.scales_by) if config.lora.rank else None
        """How what is trained changes the weights; None: it is the weights."""
        self.left = frozenset[str]() if self.adapter else left_in_folder(model, self.model_dir)
        """What the folder holds that is not of this model; checkpoints keep it."""
        if base is not None and self.adapter is not None and (dtype, self.device) == (torch.float32, HOST):
            base.share({name: p.detach().numpy() for name, p in model.named_parameters() if not p.requires_grad})
        self.flat = ranks.parameters(model, dtype, self.device)
        self.optimizer: AdamW | None = None
        self.exposure: Exposure | None = None
        self.step = -1
        self.computed: list[str] = []
        """Micro-steps whose gradient is in the sums of this step."""
        self.rejected: list[MicroStep] = []
        """Micro-steps of this step whose loss was not finite, kept for inspection."""
        self.reference: Tensor | None = self.flat.weights.clone() if config.kl_coefficient else None
        self._pulled = False

    def begin_step(self, step: int) -> None:
        """Zero the sums."""
        self.step, self.computed, self.rejected = step, [], []
        self.flat.zero_gradient()

    def compute(self, micro_step: MicroStep) -> MicroStepStats:
        """Add the gradient of one micro-step to the sums; all of it or, when this raises, nothing.

        Raises NonFiniteLoss (the step will not be applied), PathTooLong, TrainerError.
        """
        started = time.perf_counter()
        if micro_step.step != self.step:
            raise TrainerError(f"{micro_step.micro_step} belongs to step {micro_step.step}, this trainer is in step {self.step}")
        part = self.ranks.assign(micro_step)
        laid = self.ranks.run_collectively(lambda: rows.build(part, self.config, self.tree_model.name))
        result = _Result()
        if self.ranks.all_reduce_max(len(laid.targets.token_O)):
            self.flat.open_gradient()
            try:
                result = self._train(laid, self._reference_logprobs(laid))
            except NonFiniteLoss:
                self.rejected.append(micro_step)
                raise
        self.computed.append(micro_step.micro_step)
        counted = torch.tensor(laid.targets.counters(), dtype=self.flat.sums, device=HOST)
        self.flat.gradient[-NUM_COUNTERS:] += self.ranks.all_reduce_sum(counted).to(self.device)
        return result.stats(part.micro_step, laid, time.perf_counter() - started)

    def flat_gradient(self) -> Tensor:
        """(N + NUM_COUNTERS,): the sums of this step and, after them, its counters. A view, not a copy."""
        return self.flat.gradient

    def apply(self, num_executions: int, summed: Tensor | None = None) -> StepStats:
        """Close the step on the core: divide once, clip, update. `summed` is `Members.reduce`'s result, else own sums.

        With nothing to divide by, a gradient that is not finite, or a rejected micro-step, nothing changes and the
        reason is returned.
        """
        started = time.perf_counter()
        sums = self.flat.gradient if summed is None else summed
        num_tokens, num_trajectories, squared_advantages = sums[-NUM_COUNTERS:].to(HOST).tolist()
        by = divisor(
            self.config.aggregates, num_executions=num_executions, num_tokens=num_tokens, num_trajectories=num_trajectories
        )
        if self.config.normalizes_advantages:
            by *= advantage_deviation(num_executions, squared_advantages)
        sums_N = sums[:-NUM_COUNTERS]
        norm = self.flat.norm(sums_N) / by if by else math.nan
        reason = self._refusal(num_executions, by, norm)
        scale, rate, update_norm = 1.0, 0.0, 0.0
        if not reason:
            scale = min(1.0, self.config.max_gradient_norm / (norm + 1e-6))
            optimizer = self._core_optimizer()
            rate = optimizer.learning_rate()
            update_norm = self.flat.root(optimizer.update(self.flat.weights, sums_N, scale / by))
            self.flat.commit()
        seconds = time.perf_counter() - started
        return StepStats(self.step, not reason, reason, num_executions, norm, scale, rate, update_norm, seconds)

    def expose(self, version: int, incarnation: int = 0) -> Exposure:
        """Core: put the present weights where others read them, under `version`. The same memory every time."""
        arrays = self.flat.arrays()
        if self.exposure is None or self.exposure.incarnation != incarnation:
            if self.exposure is not None:
                self.transport.release(self.exposure)
            self.exposure = self.transport.expose(arrays, version=version, incarnation=incarnation)
            return self.exposure
        self.transport.begin_write(self.exposure)
        for name, buffer in self.transport.buffers(self.exposure).items():
            np.copyto(buffer, arrays[name])
        self.exposure = self.transport.republish(self.exposure, version=version)
        return self.exposure

    def pull(self, exposure: Exposure) -> None:
        """Satellite: read the core's snapshot in place. Raises StaleRead, TransferError: then the weights are unusable."""
        self.flat.restore()
        self._pulled = True
        self.transport.read(exposure, into=self.flat.landing())
        self.flat.landed()
        self.flat.commit()

    def offload(self) -> None:
        """Give back gradients, and weights that another cell owns."""
        self.flat.release(keep_weights=not self._pulled)
        allocator.give_back_freed()

    def restore(self) -> None:
        """Take the memory of a step again. A satellite's weights are unusable until it pulls."""
        allocator.keep_freed()
        self.flat.restore()

    def logprobs(self, trajectory: Trajectory, temperature: float) -> np.ndarray:
        """Log-prob of every token of one path under the present weights, float32 (T,); 0 for the first."""
        return audit.path_logprobs(self.tree_model, trajectory, temperature)

    def audit(self, micro_steps: Sequence[MicroStep], snapshots_dir: Path) -> AuditReport:
        """Compare recorded log-probs with a forward under the version that sampled each token; the weights come back.

        A cell that serves may do this too: it takes the memory of a step again.
        """
        self.flat.restore()
        before = self.flat.weights.clone()
        try:
            return audit.audit(self.tree_model, micro_steps, lambda version: self._load_snapshot(snapshots_dir, version))
        finally:
            self.flat.weights.copy_(before)
            self.flat.commit()

    def whole_weights(self) -> dict[str, np.ndarray]:
        """By Hugging Face name, bfloat16 as float32; on rank 0 of the cell, {} on its others."""
        return self.flat.whole(self.flat.weights)

    def published(self) -> dict[str, np.ndarray]:
        """The weights as engines read them, with the probe; on rank 0 of the cell, {} on its others."""
        probe, weights = self.tree_model.probe(), self.whole_weights()
        beside = {PROBE: probe.packed()} | ({} if self.adapter is None else {ADAPTER: self.adapter.packed()})
        return weights | beside if self.ranks.rank == 0 else {}

    def save_weights(self, path: Path) -> None:
        """The present weights and their probe as one safetensors file, atomically."""
        probe, weights = self.tree_model.probe(), self.whole_weights()
        if self.ranks.rank == 0:
            checkpoint.write_weights(Path(path), weights, probe, self.adapter)

    def save_checkpoint(self, directory: Path, step: int, files: Path, extra: dict[str, Any] | None = None) -> None:
        """Core: weights, optimizer and `extra`, durable when this returns on rank 0. However many ranks, one format.

        `files` is the folder whose config and tokenizer are copied beside the weights.
        """
        optimizer = self._core_optimizer()
        weights = self.flat.whole(self.flat.weights if optimizer.master_N is None else optimizer.master_N)
        moments = {"first": self.flat.whole(optimizer.first_N), "second": self.flat.whole(optimizer.second_N)}
        meta = {"step": step, "num_updates": optimizer.num_updates, "extra": extra or {}}
        if self.adapter is not None:
            told = peft_config(self.adapter, list(weights), str(self.model_dir.absolute()))
            checkpoint.write(Path(directory), Path(files), to_peft(weights), moments, meta, told)
        elif self.ranks.rank == 0:
            whole = as_in_folder(self.tree_model.model, weights) | read_left(self.model_dir, self.left)
            checkpoint.write(Path(directory), Path(files), whole, moments, meta)

    def load_checkpoint(self, directory: Path) -> dict[str, Any]:
        """Core: take weights and optimizer back; return the JSON that was saved (`step`, `num_updates`, `extra`)."""
        weights, moments, meta = checkpoint.read(Path(directory))
        if self.adapter is not None:
            weights = from_peft(weights)
            if {name: array.shape for name, array in weights.items()} != self.flat.shapes:
                raise TrainerError(f"{directory} has no adapters of the rank and to the layers that [trainer.lora] says")
        elif checkpoint.is_adapter(Path(directory)):
            raise TrainerError(f"{directory} has adapters only, and this run trains whole weights: set trainer.lora as it was")
        elif self.flat.spans.keys() - weights.keys():
            weights = as_in_memory(Path(directory), self.flat.sums)
        self.flat.restore()
        self._load(weights)
        optimizer = self._core_optimizer()
        if optimizer.master_N is not None:
            self.flat.copy_in(optimizer.master_N, weights)
        self.flat.copy_in(optimizer.first_N, moments["first"])
        self.flat.copy_in(optimizer.second_N, moments["second"])
        optimizer.num_updates = meta["num_updates"]
        self.step, self._pulled = meta["step"], False
        return meta

    def _train(self, laid: rows.MicroStepRow, reference_O: Tensor | None) -> _Result:
        targets, result = laid.targets, _Result()
        device, sums = self.device, self.flat.sums
        behavior_O, weight_O, advantage_O = (
            put(column_O, device, sums) for column_O in (targets.behavior_O, targets.weight_O, targets.advantage_O)
        )
        trajectory_O, num_tokens_J = put(targets.trajectory_O, device), put(targets.num_tokens_J, device)

        def coefficients_of(logp_O: Tensor) -> Tensor:
            batch = TokenBatch(logp_O, behavior_O, advantage_O, trajectory_O, num_tokens_J, reference_O)
            coef_O, loss = coefficients(batch, weight_O, self.config, self.objective)
            self._refuse_non_finite(targets, {"log-prob": logp_O, "loss": loss.loss_O, "loss gradient": coef_O})
            result.record_loss(loss, weight_O, batch)
            return coef_O

        result.record_output(self.tree_model.train(laid.row, targets, coefficients_of), behavior_O)
        return result

    def _refuse_non_finite(self, targets: rows.Targets, arrays_O: dict[str, Tensor]) -> None:
        for what, values_O in arrays_O.items():
            bad_O = ~torch.isfinite(values_O)
            if bad_O.any():
                first = int(bad_O.nonzero()[0])
                execution, path = targets.origin_J[int(targets.trajectory_O[first])]
                raise NonFiniteLoss(
                    self.tree_model.name, execution=execution, path=path, what=f"{what} is {float(values_O[first])}"
                )

    def _refusal(self, num_executions: int, by: float, norm: float) -> str:
        if self.rejected:
            return f"non-finite loss in {', '.join(m.micro_step for m in self.rejected)}"
        if not num_executions:
            return "no executions"
        if not by:
            return "nothing was trained"
        return "" if math.isfinite(norm) else "non-finite gradient"

    def _reference_logprobs(self, laid: rows.MicroStepRow) -> Tensor | None:
        if self.reference is None:
            return None
        present = self.flat.weights.clone()
        self.flat.weights.copy_(self.reference)
        self.flat.commit()
        try:
            return self.tree_model.logprobs(laid.row, laid.targets).logp_O
        finally:
            self.flat.weights.copy_(present)
            self.flat.commit()

    def _core_optimizer(self) -> AdamW:
        if self.optimizer is None:
            self.optimizer = AdamW(self.flat.weights, self.flat.decay_mask(), self.config)
        return self.optimizer

    def _load_snapshot(self, snapshots_dir: Path, version: int) -> None:
        path = snapshot_file(Path(snapshots_dir), version)
        try:
            self._load(checkpoint.read_weights(path))
        except (OSError, SafetensorError) as error:
            raise TrainerError(
                f"{path} cannot be read ({error}): without it the log-probs of version {version} cannot be audited; put it back, or go "
                "on with runtime.audit_logprobs=false"
            ) from error

    def _load(self, weights: dict[str, np.ndarray]) -> None:
        self.flat.copy_in(self.flat.weights, weights)
        self.flat.commit()


class _Result:
    """Numbers of one micro-step on their way into MicroStepStats."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.log_ratio = self.log_ratio_max = 0.0
        self.tokens_clipped = self.tokens_capped = self.trajectories_clipped = 0

    def record_loss(self, loss: TokenLoss, weight_O: Tensor, batch: TokenBatch) -> None:
        self.loss = float(loss.loss_O @ weight_O)
        self.tokens_clipped, self.tokens_capped = int(loss.clipped_O.sum()), int(loss.capped_O.sum())
        clipped_J = torch.bincount(batch.trajectory_O[loss.clipped_O], minlength=len(batch.num_tokens_J))
        self.trajectories_clipped = int((clipped_J == batch.num_tokens_J).sum())

    def record_output(self, output: RowOutput, behavior_O: Tensor) -> None:
        ratio_O = output.logp_O - behavior_O
        self.entropy, self.log_ratio = float(output.entropy_O.sum()), float(ratio_O.sum())
        self.log_ratio_max = float(ratio_O.abs().max()) if len(ratio_O) else 0.0

    def stats(self, micro_step: str, laid: rows.MicroStepRow, seconds: float) -> MicroStepStats:
        return MicroStepStats(
            micro_step=micro_step,
            trajectories=len(laid.targets.num_tokens_J),
            trajectories_clipped=self.trajectories_clipped,
            tokens_trained=len(laid.targets.token_O),
            tokens_distinct=laid.row.num_rows,
            tokens_flat=laid.row.num_flat,
            loss=self.loss,
            entropy=self.entropy,
            log_ratio=self.log_ratio,
            log_ratio_max=self.log_ratio_max,
            tokens_clipped=self.tokens_clipped,
            tokens_capped=self.tokens_capped,
            seconds=seconds,
        )
