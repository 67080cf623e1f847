"""`qwengyre bench tree-training`: one tree row against its flattened paths, in time, memory and exactness.

Every method computes the same thing, the gradient of sum(coef * logp) over all distinct tokens, interleaved in one run.
Ratios are CPU time over `flattened`; the ideal ratio counts FLOPs of distinct tokens and attention pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import torch
import typer
from torch import Tensor, nn

from qwengyre.bench import trl_rows
from qwengyre.bench.measure import Timing, measure
from qwengyre.bench.output import say
from qwengyre.bench.recorded import CAPTURES, recorded_case, recorded_trees
from qwengyre.bench.trees import VOCABULARY, Case, ModelCost, shared_prompt, sharing_most, side_branches
from qwengyre.cli.json_output import JsonTarget, write_json
from qwengyre.core.errors import ConfigError
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.norms import replace_norms
from qwengyre.trainer.rows import Targets
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import LayoutPath, build_row

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

MAX_DENSE_ROWS = 8192
"""A dense mask of more rows does not fit."""


METHODS = ("flattened", "dense", "chains", "chains-chunked", "trl")
"""`dense` for rows that are not too long, `trl` where it is installed."""


class MethodLine(msgspec.Struct, frozen=True):
    """One method on one case, as `--json` writes it."""

    case: str
    method: str
    ideal: float
    ratio: float
    peak_mb: float
    max_logp_gap: float
    max_grad_gap: float
    cpu_s: float


def tree_training(
    json_target: JsonTarget = None,
    size: Annotated[
        Literal["full", "small"], typer.Option(help="full: the stated cases; small: the same shapes, a sixteenth of the time.")
    ] = "full",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each method; the fastest counts.")] = 1,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Rows of one chunk of `chains-chunked`.")] = 2048,
    captures: Annotated[Path, typer.Option(help="Folder of recordings.")] = CAPTURES,
    only: Annotated[str, typer.Option(help="Run only the cases whose name contains this.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated; empty runs all. `flattened` always runs.")] = "",
) -> None:
    """Compare a tree row with its flattened paths: CPU time, peak memory, exactness."""
    torch.set_num_threads(1)
    wanted = frozenset(filter(None, methods.split(",")))
    if unknown := wanted - set(METHODS):
        raise ConfigError(f"{sorted(unknown)[0]!r} is not one of {', '.join(METHODS)}", key="--methods")
    found: list[MethodLine] = []
    say(
        f"{'case':36} {'method':15} {'ideal':>6} {'ratio':>6} {'reached':>8} {'cpu s':>7} {'peak MB':>8} {'logp gap':>9} {'grad gap':>9}"
    )
    for case in cases(size, captures):
        if only not in case.name:
            continue
        for line in run_case(Work(bench_model(), case, chunk_tokens), repeats, wanted):
            found.append(line)
            say(
                f"{line.case:36} {line.method:15} {line.ideal:6.3f} {line.ratio:6.3f} {line.ideal / line.ratio:8.1%}"
                f" {line.cpu_s:7.2f} {line.peak_mb:8.0f} {line.max_logp_gap:9.1e} {line.max_grad_gap:9.1e}"
            )
    if not found:
        raise ConfigError(f"no case has {only!r} in its name", key="--only")
    write_json(json_target, found)


def cases(size: str, captures: Path) -> list[Case]:
    if size == "small":
        return [sharing_most(5, 4096), shared_prompt(8, 1024, 1024), side_branches(1024, 100, 16)]
    stated = [sharing_most(5, 16384), shared_prompt(8, 2048, 2048), side_branches(4096, 200, 16)]
    recorded = recorded_trees(("claude--basic", "qwen--basic"), captures)
    return stated + [
        recorded_case(name, tree, roles, j_max=None, bytes_per_token=16)[0] for name, (tree, roles) in recorded.items()
    ]


def bench_model() -> Qwen3ForCausalLM:
    """Qwen3, 4 layers, hidden 256, 4 query and 2 key heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=262_144,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    replace_norms(model)
    return model


def run_case(work: Work, repeats: int, wanted: frozenset[str] = frozenset()) -> list[MethodLine]:
    """The wanted methods (none named: all) on one case, interleaved."""
    model = work.model
    runs = {name: run for name, run in work.methods().items() if not wanted or name in {"flattened", *wanted}}
    measured: dict[str, list[Timing]] = {name: [] for name in runs}
    logp: dict[str, Tensor] = {}
    gradient: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            timing, logp[name] = _timed(run)
            measured[name].append(timing)
            say(f"  {work.name}: {name} took {measured[name][-1].cpu_s:.1f} s")
            gradient[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    ideal = ModelCost.of(model.config).ideal(work.row)
    flattened = min(m.cpu_s for m in measured["flattened"])
    lines = []
    for name, runs_of in measured.items():
        cpu_s = min(m.cpu_s for m in runs_of)
        gap = torch.linalg.norm(gradient[name] - gradient["flattened"]) / torch.linalg.norm(gradient["flattened"])
        logp_gap = float((logp[name] - logp["flattened"]).abs().max())
        share = 1.0 if name == "flattened" else ideal
        peak_mb = min(m.peak_mb for m in runs_of)
        lines.append(MethodLine(work.name, name, share, cpu_s / flattened, peak_mb, logp_gap, float(gap), cpu_s))
    return lines


def _timed(run: Callable[[], Tensor]) -> tuple[Timing, Tensor]:
    found: list[Tensor] = []
    timing = measure(lambda: found.append(run()))
    return timing, found[0]


def _constant(coef_O: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda logp_O: coef_O


class Work:
    """One case: each method returns the log-prob of every distinct token (O,) and leaves the gradient in `.grad`."""

    def __init__(self, model: Qwen3ForCausalLM, case: Case, chunk_tokens: int):
        self.model, self.name, self.paths = model, case.name, case.paths
        self.row = build_row(case.paths)
        token_row_O = np.flatnonzero(self.row.parent_R >= 0)
        self.token_row_O = token_row_O[np.argsort(self.row.parent_R[token_row_O], kind="stable")]
        self.targets = Targets.of_rows(self.row, self.token_row_O)
        self.coef_O = torch.from_numpy(np.random.default_rng(1).normal(size=len(token_row_O)).astype(np.float32))
        self.chunk_tokens = chunk_tokens

    def methods(self) -> dict[str, Callable[[], Tensor]]:
        found = {"flattened": self.flattened, "chains": self.chains, "chains-chunked": self.chunked}
        if self.row.num_rows <= MAX_DENSE_ROWS:
            found["dense"] = self.dense
        if (packing := trl_rows.packing_module()) is not None:
            found["trl"] = lambda: self.trl(packing)
        return found

    def chains(self) -> Tensor:
        return self._tree(self.row.num_rows)

    def chunked(self) -> Tensor:
        return self._tree(self.chunk_tokens)

    def flattened(self) -> Tensor:
        """Every path by itself, one after the other; a shared token's coefficient counts in the first path only."""
        model = TreeModel(self.model, TrainerConfig(chunk_tokens=1 << 20))
        coef_R, logp_R = torch.zeros(self.row.num_rows), torch.zeros(self.row.num_rows)
        coef_R[self.token_row_O] = self.coef_O
        for path, rows_T in zip(self.paths, self.row.rows_P, strict=True):
            row = build_row([LayoutPath(path.token_ids_T, (((0, 0, 0), len(path.token_ids_T)),))])
            own_T = torch.from_numpy(rows_T[1:])
            coef_T = coef_R[own_T]
            coef_R[own_T] = 0
            output = model.train(row, Targets.of_rows(row, np.arange(1, row.num_rows)), _constant(coef_T))
            logp_R[own_T] = output.logp_O
        return logp_R[self.token_row_O]

    def dense(self) -> Tensor:
        """The packed row with an R x R mask through SDPA."""
        from transformers import AttentionInterface, AttentionMaskInterface

        mask = torch.from_numpy(self._visible())[None, None]

        def attend(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float | None = None, **options: Any
        ) -> tuple[Tensor, None]:
            attended = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
            return attended.transpose(1, 2), None

        AttentionInterface.register("bench-dense", attend)
        AttentionMaskInterface.register("bench-dense", lambda *a, **k: None)
        model = TreeModel(self.model, TrainerConfig(chunk_tokens=1 << 20))
        model.model.set_attn_implementation("bench-dense")
        model.calls = None
        return model.train(self.row, self.targets, lambda logp: self.coef_O).logp_O

    def trl(self, packing: ModuleType) -> Tensor:
        """TRL's layout and its gathered keys."""
        seen, fresh_P, rows_O = set(), [], []
        for rows_T in self.row.rows_P:
            fresh_T = np.array([row not in seen for row in rows_T.tolist()])
            fresh_T[0] = False
            seen.update(rows_T.tolist())
            fresh_P.append(fresh_T)
            rows_O.append(rows_T[fresh_T])
        packed = trl_rows.pack(packing, self.paths, fresh_P)
        row_of_target_O = np.concatenate(rows_O)
        packed["targets"] = torch.from_numpy(self.row.token_ids_R[row_of_target_O].astype(np.int64))
        row, targets, order = trl_rows.as_row(packed)
        at_O = torch.from_numpy(row_of_target_O[order])
        coef_R, logp_R = torch.zeros(self.row.num_rows), torch.zeros(self.row.num_rows)
        coef_R[self.token_row_O] = self.coef_O
        model = TreeModel(self.model, TrainerConfig(chunk_tokens=1 << 20))
        model.model.set_attn_implementation(trl_rows.register(packed))
        model.calls = None
        logp_R[at_O] = model.train(row, targets, lambda logp: coef_R[at_O]).logp_O
        return logp_R[self.token_row_O]

    def _visible(self) -> np.ndarray:
        visible = np.zeros((self.row.num_rows, self.row.num_rows), bool)
        for index, parent in enumerate(self.row.parent_R.tolist()):
            if parent >= 0:
                visible[index] = visible[parent]
            visible[index, index] = True
        return visible

    def _tree(self, chunk_tokens: int) -> Tensor:
        model = TreeModel(self.model, TrainerConfig(chunk_tokens=chunk_tokens))
        return model.train(self.row, self.targets, lambda logp: self.coef_O).logp_O
