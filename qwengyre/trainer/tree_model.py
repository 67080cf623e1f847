"""A Hugging Face model that reads tree rows: log-probs of tokens given their ancestors, and the backward of any loss of them.

`R` rows, `n` rows of one chunk, `O` targets, `H` hidden size.

Short rows run forward and backward once. Long rows run in two passes over chunks (gradient as of the whole row, memory of
one chunk plus keys, values and their gradients):

1. without gradients, in row order, chunk by chunk: keys and values of every row and the log-prob of every target;
2. coef = dloss/dlogp, for any loss over all log-probs;
3. chunks in reverse: recompute, backward of sum(coef * logp); what later chunks sent to this chunk's keys comes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from qwengyre.core.errors import TrainerError, UnsupportedModel
from qwengyre.models.adapter_record import Adapter
from qwengyre.models.adapters import adapt
from qwengyre.models.follow import Followed, take_over
from qwengyre.models.load import load, read_config
from qwengyre.models.placement import HOST, place, put, wide
from qwengyre.models.plan import following
from qwengyre.models.probe import Probe, text
from qwengyre.models.rounding import made_of, rounding
from qwengyre.models.shrink import small_model
from qwengyre.trainer import head, trial
from qwengyre.trainer.cache import RowCache
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.norms import replace_norms
from qwengyre.trainer.rows import Targets
from qwengyre.trainer.sharded import Alone, Ranks
from qwengyre.trainer.tree_plan import TreePlan
from qwengyre.trajectory.layout import LayoutPath, TreeRow, build_row, squares

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALONE = Alone()

PLACEHOLDER = build_row([LayoutPath(np.zeros(1, np.int32), (((0, 0, 0), 1),))])
"""What a rank computes when the others have more chunks."""

Coefficients = Callable[[Tensor], Tensor]
"""logp (O,) -> dloss/dlogp (O,)."""


class RowOutput:
    """Log-probs and entropies of the targets (O,), in the order of the targets."""

    __slots__ = ("entropy_O", "logp_O")

    def __init__(self, logp_O: Tensor, entropy_O: Tensor):
        self.logp_O, self.entropy_O = logp_O, entropy_O


class TreeModel:
    def __init__(
        self, model: PreTrainedModel, config: TrainerConfig, ranks: Alone | Ranks = ALONE, followed: Followed | None = None
    ):
        """Take over `model` (a causal LM of transformers), in shards when the cell has `ranks`.

        Raises UnsupportedModel for one that a tree row would train otherwise than its own forward: both are tried (`trial.py`), unless
        `followed` says what would be found (a model without numbers, for its memory: `footprint.py`).
        """
        self.name = type(model).__name__
        self.model, self.config = model, config
        self.ranks: Alone | Ranks = ALONE
        self.calls: tuple[int, int, int] | None = None
        """How often a pass asks its plan, by kind; None: it is not checked."""
        self.form, body, layers, self.limit, _, _ = take_over(model) if followed is None else followed
        output = model.get_output_embeddings()
        assert isinstance(output, nn.Linear), "anything else was refused"
        self.body, self.output, self.num_layers = _Body(model, body), output, len(layers)
        self.layers, weight = layers, self.output.weight
        self.device, self.sums = weight.device, wide(weight.dtype)
        """Where inputs go, and the dtype of log-probs and of what is added up."""
        self.head_chunk_tokens = max(1, config.head_logits // weight.shape[0])
        if followed is None:
            self.calls = trial.compare(self)
        self.ranks = ranks
        ranks.shard(self.body, layers)

    @staticmethod
    def load(model_dir: Path, config: TrainerConfig, ranks: Alone | Ranks = ALONE, device: torch.device = HOST) -> TreeModel:
        """Read a folder as `save_pretrained` writes it. Raises ConfigError for one that is not whole, UnsupportedModel.

        In narrow numbers rounding hides what a trial should find, so its family is tried in fp32 first.
        """
        dtype = getattr(torch, config.dtype)
        if wide(dtype) != dtype:
            tried = small_model(read_config(model_dir)) or load(model_dir, wide(dtype))
            place(tried, device)
            TreeModel(tried, config)
        model = load(model_dir, dtype)
        if config.lora.rank:
            adapt(model, Adapter(config.lora.rank, config.lora.scales_by), config.lora.targets)
        if dtype == torch.float64 and any(name.endswith("experts") for name, _ in model.named_modules()):
            model.set_experts_implementation("eager")  # grouped products of matrices know no doubles
        place(model, device)
        replace_norms(model)
        return TreeModel(model, config, ranks)

    @torch.no_grad()
    def logprobs(self, row: TreeRow, targets: Targets) -> RowOutput:
        """Log-prob and entropy of every target. No gradient, memory of one chunk."""
        inputs = _TargetTensors(targets, self.sums, self.device)
        chunks = self._chunks(row)
        cache = RowCache(row.num_rows) if len(chunks) > 1 else None
        parts = []
        for start, end in chunks:
            at = inputs.within(start, end)
            parts.append(self._head(self._hidden(row, start, end, cache), inputs, at))
        self.ranks.reshard(self.body)
        return _joined(parts)

    def probe(self) -> Probe:
        """What this model says of the probe's text. On every rank of the cell."""
        tokens = text(self.form.num_words or self.output.weight.shape[0])
        tokens = tokens[: self.limit.num_tokens] if self.limit is not None else tokens
        row = build_row([LayoutPath(tokens.astype(np.int32), (((0, 0, 0), len(tokens)),))])
        targets, _ = trial.every_token(row)
        exact = self.logprobs(row, targets).logp_O.to(HOST)
        with rounding(self.body):
            return made_of(tokens.tolist(), exact, self.logprobs(row, targets).logp_O.to(HOST), self.model)

    def train(self, row: TreeRow, targets: Targets, coefficients: Coefficients) -> RowOutput:
        """Forward, ask for dloss/dlogp, backward: gradients are added to the parameters' `.grad`.

        A TrainerError of `coefficients` on any rank leaves the gradients of all as they were.
        """
        inputs = _TargetTensors(targets, self.sums, self.device)
        chunks = self._chunks(row)
        cache = RowCache(row.num_rows) if len(chunks) > 1 else None
        results, hidden = [], None
        for index, (start, end) in enumerate(chunks):
            last = index == len(chunks) - 1
            with torch.set_grad_enabled(last):
                hidden = self._hidden(row, start, end, cache)
            results.append(self._head(hidden, inputs, inputs.within(start, end)))
            if not last:
                results[-1].logits = None
        output = _joined(results)
        try:
            coef_O = self.ranks.run_collectively(lambda: coefficients(output.logp_O))
        except TrainerError:
            self.ranks.reshard(self.body)
            raise
        for (start, end), result in zip(reversed(chunks), reversed(results), strict=True):
            at = inputs.within(start, end)
            if hidden is None:
                hidden = self._hidden(row, start, end, cache)
            self._backward(hidden, result, coef_O[at], inputs, at)
            hidden = None
        return output

    def _chunks(self, row: TreeRow) -> list[tuple[int, int]]:
        """Row ranges that run one after the other; every rank of the cell gets as many, empty ones at the end."""
        size = self.config.chunk_tokens
        chunks = [(start, min(start + size, row.num_rows)) for start in range(0, row.num_rows, size)]
        return chunks + [(row.num_rows, row.num_rows)] * (self.ranks.all_reduce_max(len(chunks)) - len(chunks))

    def _hidden(self, row: TreeRow, start: int, end: int, cache: RowCache | None) -> _Hidden:
        """Last hidden states of rows [start, end) (n, H); those of a placeholder when there are none."""
        if start == end:
            row, start, end, cache = PLACEHOLDER, 0, 1, None
        plan = TreePlan(row, squares(row, start, end), cache)
        if self.limit is not None and plan.longest > self.limit.num_tokens:
            raise UnsupportedModel(self.name, f"a path of {plan.longest} tokens, of {self.limit.num_tokens}: {self.limit.reason}")
        with following(plan):
            states_1nH = self.body(
                input_ids=put(row.token_ids_R[start:end], self.device, torch.int64)[None],
                position_ids=put(row.position_R[start:end], self.device, torch.int64)[None],
                attention_mask=torch.ones(1, end - start, dtype=torch.bool, device=self.device),
                use_cache=False,
            )
        self.last_calls = plan.calls.as_tuple()
        if self.calls is not None and self.last_calls != self.calls:
            raise UnsupportedModel(self.name, f"a pass asked the tree {self.last_calls} times, by kind; at its load {self.calls}")
        return _Hidden(states_1nH[0], plan)

    def _head(self, hidden: _Hidden, inputs: _TargetTensors, at: slice) -> head.HeadResult:
        states_OH = hidden.states_nH.detach()[inputs.row_O[at] - hidden.plan.squares.start]
        bias_V = self.output.bias
        layer = head.Layer(self.form, None if bias_V is None else bias_V.detach(), self._sums_of(bias_V))
        targets = (inputs.token_O[at], inputs.temperature_O[at])
        return head.logprobs(states_OH, self.output.weight.detach(), *targets, self.head_chunk_tokens, layer)

    def _backward(self, hidden: _Hidden, result: head.HeadResult, coef_O: Tensor, inputs: _TargetTensors, at: slice) -> None:
        (weight, bias_V), states_nH = (self.output.weight, self.output.bias), hidden.states_nH
        sums_VH = self._sums_of(weight)
        rows_O = inputs.row_O[at] - hidden.plan.squares.start
        states = (states_nH.detach()[rows_O], weight.detach())
        targets = (inputs.token_O[at], inputs.temperature_O[at])
        d_hidden_OH = head.backward(result, coef_O, states, targets, sums_VH, self.head_chunk_tokens)
        roots = [(states_nH, torch.zeros_like(states_nH).index_add_(0, rows_O, d_hidden_OH))]
        roots += [(tensor, gradient) for tensor, sent_back in hidden.plan.exports if (gradient := sent_back()) is not None]
        own = ((weight, sums_VH), (bias_V, result.layer.bias_grad_V))
        roots += [(p, sums.to(p.dtype)) for p, sums in own if sums is not None and sums.dtype != p.dtype]
        torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])

    def _sums_of(self, parameter: Tensor | None) -> Tensor | None:
        """Where the head adds the gradient of `parameter`; None when it has none.

        That is `.grad`, or for narrow parameters zeros of their own in the dtype of sums: a root of the backward pass hands them on.
        """
        if parameter is None or not parameter.requires_grad:
            return None
        if parameter.dtype != self.sums:
            return torch.zeros_like(parameter, dtype=self.sums)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class _Body(nn.Module):
    """The model up to the last hidden states. The head's weight belongs to it, so that it is gathered with the rest."""

    def __init__(self, model: nn.Module, body: nn.Module):
        super().__init__()
        self.model = model
        self._inner = (body,)
        """In a tuple, so that its parameters keep one name."""

    def forward(self, **inputs: Any) -> Tensor:
        states: Tensor = self._inner[0](**inputs).last_hidden_state
        return states


class _Hidden:
    """Last hidden states of a chunk (n, H) and the plan that they were made under."""

    __slots__ = ("plan", "states_nH")

    def __init__(self, states_nH: Tensor, plan: TreePlan):
        self.states_nH, self.plan = states_nH, plan


def _joined(parts: list[head.HeadResult]) -> RowOutput:
    return RowOutput(torch.cat([p.logp_O for p in parts]), torch.cat([p.entropy_O for p in parts]))


class _TargetTensors:
    """Targets as tensors; `within` finds those of a chunk, since they are sorted by row."""

    def __init__(self, targets: Targets, dtype: torch.dtype, device: torch.device):
        self._rows = targets.row_O
        self.row_O = put(targets.row_O, device, torch.int64)
        self.token_O = put(targets.token_O, device)
        self.temperature_O = put(targets.temperature_O, device, dtype)

    def within(self, start: int, end: int) -> slice:
        return slice(*np.searchsorted(self._rows, [start, end]).tolist())
