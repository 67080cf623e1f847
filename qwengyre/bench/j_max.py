"""`qwengyre bench j-max`: what a cap on trajectories costs in trained tokens and saves in time, with shared prefixes computed once or not.

On recorded executions of Claude Code and Qwen Code. The paper has 41.4 % and 74.8 % of the uncapped time at J_max 1 and 5,
without computing shared prefixes once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from qwengyre.bench.measure import measure
from qwengyre.bench.output import JsonTarget, say, write_json
from qwengyre.bench.recorded import CAPTURES, recorded_case, recorded_trees
from qwengyre.bench.tree_training import Work, bench_model

SESSIONS = ("claude--basic", "claude--nested", "claude--compact", "qwen--basic", "qwen--compact")
CAPS: tuple[int | None, ...] = (1, 2, 5, None)


class Line(msgspec.Struct, frozen=True):
    j_max: str
    trained_share: float
    """Of the tokens that no cap trains."""
    time_flattened: float
    """Of flattened paths without a cap."""
    time_shared: float
    """Shared prefixes computed once; of flattened paths without a cap."""
    time_shared_of_uncapped: float


def j_max(
    json_target: JsonTarget = None,
    captures: Annotated[Path, typer.Option(help="Folder of recordings.")] = CAPTURES,
    bytes_per_token: Annotated[
        int, typer.Option(help="Bytes of a recording that make one token; 4 is like a real tokenizer.")
    ] = 16,
) -> None:
    """Time and trained tokens for J_max = 1, 2, 5 and none, on recorded executions."""
    torch.set_num_threads(1)
    trees = recorded_trees(SESSIONS, captures)
    model = bench_model()
    totals = {cap: [0, 0.0, 0.0] for cap in CAPS}
    for name, (tree, roles) in trees.items():
        for cap in CAPS:
            case, trained = recorded_case(name, tree, roles, j_max=cap, bytes_per_token=bytes_per_token)
            work = Work(model, case, chunk_tokens=1 << 20)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            totals[cap][0] += trained
            totals[cap][1] += measure(work.flattened).cpu_s
            totals[cap][2] += measure(work.chains).cpu_s
    all_trained, all_flat, all_shared = totals[None]
    found = [
        Line("none" if cap is None else str(cap), trained / all_trained, flat / all_flat, shared / all_flat, shared / all_shared)
        for cap, (trained, flat, shared) in totals.items()
    ]
    say(f"{'J_max':>5} {'trained':>8} {'flattened':>10} {'shared':>8} {'shared, of its own uncapped':>28}")
    for line in found:
        say(
            f"{line.j_max:>5} {line.trained_share:8.1%} {line.time_flattened:10.1%} {line.time_shared:8.1%}"
            f" {line.time_shared_of_uncapped:28.1%}"
        )
    write_json(json_target, found)
