"""`qwengyre bench j-max`: what a cap on trajectories costs in trained tokens and saves in time, with shared prefixes computed once or not.

On recorded executions of real harnesses. The paper has 41.4 % and 74.8 % of the uncapped time at J_max 1 and 5, without
computing shared prefixes once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch
import typer

from qwengyre.bench.measure import measure
from qwengyre.bench.output import say
from qwengyre.bench.recorded import CAPTURES, recorded_case, recorded_trees
from qwengyre.bench.tree_training import Work, bench_model
from qwengyre.cli.json_output import JsonTarget, write_json

SESSIONS = ("claude--basic", "claude--nested", "claude--compact", "qwen--basic", "qwen--compact", "codex--basic")
CAPS: tuple[int | None, ...] = (1, 2, 5, None)


class CapLine(msgspec.Struct, frozen=True):
    j_max: str
    trained_share: float
    """Of the tokens that no cap trains."""
    time_flattened: float
    """Of flattened paths without a cap."""
    time_shared: float
    """Shared prefixes computed once; of flattened paths without a cap."""
    time_shared_of_uncapped: float


class PathsCost(NamedTuple):
    """What some paths take."""

    trained: int = 0
    flat_s: float = 0.0
    shared_s: float = 0.0

    def plus(self, other: PathsCost) -> PathsCost:
        return PathsCost(self.trained + other.trained, self.flat_s + other.flat_s, self.shared_s + other.shared_s)


def _spent(work: Work, trained: int) -> PathsCost:
    for parameter in work.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return PathsCost(trained, measure(work.flattened).cpu_s, measure(work.chains).cpu_s)


def j_max(
    json_target: JsonTarget = None,
    captures: Annotated[Path, typer.Option(help="Folder of recordings.")] = CAPTURES,
    bytes_per_token: Annotated[
        int, typer.Option(min=1, help="Bytes of a recording that make one token; 4 is like a real tokenizer.")
    ] = 16,
) -> None:
    """Time and trained tokens for J_max = 1, 2, 5 and none, on recorded executions."""
    torch.set_num_threads(1)
    trees = recorded_trees(SESSIONS, captures)
    model = bench_model()
    totals = {cap: PathsCost() for cap in CAPS}
    for name, (tree, roles) in trees.items():
        spent: dict[int, PathsCost] = {}
        for cap in CAPS:
            case, trained = recorded_case(name, tree, roles, j_max=cap, bytes_per_token=bytes_per_token)
            num_paths = len(case.paths)
            if num_paths not in spent:
                spent[num_paths] = _spent(Work(model, case, chunk_tokens=1 << 20), trained)
                say(
                    f"{name}, {num_paths} paths: flattened {spent[num_paths].flat_s:.1f} s, shared {spent[num_paths].shared_s:.1f} s"
                )
            totals[cap] = totals[cap].plus(spent[num_paths])
    uncapped = totals[None]
    found = [
        CapLine(
            "none" if cap is None else str(cap),
            total.trained / uncapped.trained,
            total.flat_s / uncapped.flat_s,
            total.shared_s / uncapped.flat_s,
            total.shared_s / uncapped.shared_s,
        )
        for cap, total in totals.items()
    ]
    say(f"{'J_max':>5} {'trained':>8} {'flattened':>10} {'shared':>8} {'shared, of its own uncapped':>28}")
    for line in found:
        say(
            f"{line.j_max:>5} {line.trained_share:8.1%} {line.time_flattened:10.1%} {line.time_shared:8.1%}"
            f" {line.time_shared_of_uncapped:28.1%}"
        )
    write_json(json_target, found)
