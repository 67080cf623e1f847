"""Recorded log-probs against a forward of the trainer: under each token's own policy version they must agree.

`O` compared tokens, `T` tokens of one path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from qwengyre.core import arrays
from qwengyre.core.records import MicroStep, TrainingExecution, Trajectory
from qwengyre.models.placement import HOST
from qwengyre.trainer.records import AuditReport
from qwengyre.trainer.rows import Targets, layout_paths, with_routes
from qwengyre.trainer.tree_model import TreeModel
from qwengyre.trajectory.layout import LayoutPath, build_row

ROW_TOKENS = 8192
"""Flattened tokens of the executions that are compared in one forward."""


def audit(tree_model: TreeModel, micro_steps: Sequence[MicroStep], load: Callable[[int], None]) -> AuditReport:
    """`load(version)` puts a version's weights into the model; called once per version, in ascending order.

    An execution is run once for every version that sampled some of its trainable tokens; only those tokens are compared.
    """
    executions = {e.execution: e for micro_step in micro_steps for e in micro_step.executions}
    by_version: dict[int, list[TrainingExecution]] = {}
    for execution in executions.values():
        for version in _versions(execution):
            by_version.setdefault(version, []).append(execution)
    num_tokens, total, worst, worst_execution = 0, 0.0, 0.0, ""
    for version in sorted(by_version):
        load(version)
        for group in _grouped(by_version[version]):
            gap_O, origin_O = _gaps(tree_model, group, version)
            num_tokens, total = num_tokens + len(gap_O), total + float(gap_O.sum())
            if len(gap_O) and worst == worst and not gap_O.max() <= worst:
                worst, worst_execution = float(gap_O.max()), group[int(origin_O[gap_O.argmax()])].execution
    return AuditReport(num_tokens, worst, total / max(num_tokens, 1), worst_execution)


def path_logprobs(tree_model: TreeModel, trajectory: Trajectory, temperature: float) -> np.ndarray:
    """float32 (T,): every token given those before it; 0 for the first."""
    token_ids_T = arrays.unpack(trajectory.token_ids_T, arrays.TOKEN)
    row = build_row([LayoutPath(token_ids_T, (((0, 0, 0), len(token_ids_T)),))])
    at = np.arange(1, len(token_ids_T))
    logp_O = tree_model.logprobs(row, _compared(at - 1, token_ids_T[at], np.full(len(at), temperature))).logp_O
    return np.concatenate([np.zeros(1, np.float32), logp_O.to(HOST).numpy().astype(np.float32)])[: len(token_ids_T)]


def _versions(execution: TrainingExecution) -> set[int]:
    found: set[int] = set()
    for trajectory in execution.trajectories:
        trainable_T = arrays.unpack(trajectory.trainable_T, arrays.FLAG)
        found.update(arrays.unpack(trajectory.version_T, arrays.VERSION)[trainable_T].tolist())
    return found


def _grouped(executions: list[TrainingExecution]) -> Iterator[list[TrainingExecution]]:
    group: list[TrainingExecution] = []
    size = 0
    for execution in executions:
        tokens = sum(t.num_tokens for t in execution.trajectories)
        if group and size + tokens > ROW_TOKENS:
            yield group
            group, size = [], 0
        group.append(execution)
        size += tokens
    if group:
        yield group


def _gaps(tree_model: TreeModel, executions: list[TrainingExecution], version: int) -> tuple[np.ndarray, np.ndarray]:
    """|recorded - forward| of the tokens of `version` (O,), and the index of their execution."""
    paths, _, records = layout_paths(executions)
    row = with_routes(build_row(paths), [trajectory for _, trajectory in records])
    index = {id(execution): i for i, execution in enumerate(executions)}
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    for rows_T, (execution, trajectory) in zip(row.rows_P, records, strict=True):
        trainable_T = arrays.unpack(trajectory.trainable_T, arrays.FLAG)
        at = np.flatnonzero(trainable_T & (arrays.unpack(trajectory.version_T, arrays.VERSION) == version))
        columns[0].append(rows_T[at - 1])
        columns[1].append(arrays.unpack(trajectory.token_ids_T, arrays.TOKEN)[at])
        columns[2].append(np.full(len(at), execution.temperature))
        columns[3].append(arrays.unpack(trajectory.logprob_T, arrays.LOGPROB)[at])
        columns[4].append(np.full(len(at), index[id(execution)]))
    row_O, token_O, temperature_O, behavior_O, origin_O = (np.concatenate(column) for column in columns)
    order = np.argsort(row_O, kind="stable")
    output = tree_model.logprobs(row, _compared(row_O[order], token_O[order], temperature_O[order]))
    return np.abs(output.logp_O.to(HOST).numpy() - behavior_O[order]), origin_O[order]


def _compared(row_O: np.ndarray, token_O: np.ndarray, temperature_O: np.ndarray) -> Targets:
    """Targets without a loss."""
    num = len(row_O)
    zeros_O, none_O = np.zeros(num), np.zeros(num, np.int64)
    return Targets(
        row_O=row_O.astype(np.int64),
        token_O=token_O.astype(np.int64),
        behavior_O=zeros_O,
        advantage_O=zeros_O,
        temperature_O=temperature_O,
        weight_O=zeros_O,
        trajectory_O=none_O,
        num_tokens_J=np.array([num]),
        origin_J=(),
    )
