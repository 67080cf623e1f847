"""A micro-step becomes one tree row and the arrays of its trained tokens. numpy only.

`R` rows, `O` trained tokens, `J` trained trajectories, `T` tokens of one path.
"""

from __future__ import annotations

import msgspec
import numpy as np

from qwengyre.core import arrays
from qwengyre.core.errors import PathTooLong, TrainerError
from qwengyre.core.ids import ExecutionId
from qwengyre.core.records import MicroStep, TrainingExecution, Trajectory
from qwengyre.trainer.aggregation import token_weights
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trajectory.layout import NO_ROUTE, LayoutPath, SegmentKey, TreeRow, build_row

SHARED_PROMPT = -1
"""Tree number of the prompt that several executions share."""


class Targets(msgspec.Struct, frozen=True):
    """Trained tokens, sorted by `row_O`: the row whose hidden state predicts them."""

    row_O: np.ndarray
    token_O: np.ndarray
    behavior_O: np.ndarray
    advantage_O: np.ndarray
    temperature_O: np.ndarray
    weight_O: np.ndarray
    """By the aggregation: 1 / T_e by default."""
    trajectory_O: np.ndarray
    num_tokens_J: np.ndarray
    origin_J: tuple[tuple[str, int], ...]
    """(execution, index of the trajectory in it), for messages."""
    squared_advantages: float = 0.0
    """Sum over executions; one of which only a part is here counts by that part of its tokens."""

    @classmethod
    def plain(cls, row_O: np.ndarray, token_O: np.ndarray) -> Targets:
        """For log-probs at temperature 1 alone: no advantages, one trajectory."""
        num = len(row_O)
        zeros_O = np.zeros(num)
        return cls(
            row_O=row_O,
            token_O=token_O,
            behavior_O=zeros_O,
            advantage_O=zeros_O,
            temperature_O=np.ones(num),
            weight_O=zeros_O,
            trajectory_O=np.zeros(num, np.int64),
            num_tokens_J=np.array([num]),
            origin_J=(),
        )

    @classmethod
    def of_rows(cls, row: TreeRow, token_row_O: np.ndarray) -> Targets:
        """`plain` ones for the tokens of some rows that have one before them, sorted by that one."""
        return cls.plain(row.parent_R[token_row_O].astype(np.int64), row.token_ids_R[token_row_O].astype(np.int64))

    def counters(self) -> list[float]:
        """What a step sums besides the gradient (NUM_COUNTERS,): tokens, trajectories, squared advantages."""
        return [len(self.token_O), len(self.num_tokens_J), self.squared_advantages]


class MicroStepRow(msgspec.Struct, frozen=True):
    row: TreeRow
    targets: Targets


def build(micro_step: MicroStep, config: TrainerConfig, model: str = "the model") -> MicroStepRow:
    """Lay out the executions that have something to train. `model` is its name, for messages.

    Raises PathTooLong beyond `max_row_tokens`, TrainerError for a trained token with nothing before it.
    """
    active = [e for e in micro_step.executions if e.num_trainable and (e.advantage != 0 or config.kl_coefficient > 0)]
    paths, origins, executions = layout_paths(active, config.merge_prompt_tokens)
    row = with_routes(build_row(paths), [trajectory for _, trajectory in executions])
    if row.num_rows > config.max_row_tokens:
        execution, path = origins[max(range(len(paths)), key=lambda index: len(paths[index].token_ids_T))]
        raise PathTooLong(model, execution=execution, path=path, num_tokens=row.num_rows, max_tokens=config.max_row_tokens)
    return MicroStepRow(row, _targets(row, origins, executions, config))


def with_routes(row: TreeRow, trajectories: list[Trajectory]) -> TreeRow:
    """The experts that the paths of `row` know; a token that several have, of the first that knows it."""
    widths = {len(t.routes_T) // t.num_tokens for t in trajectories if t.routes_T and t.num_tokens}
    if not widths:
        return row
    if len(widths) > 1:
        raise TrainerError(f"routes of one micro-step are {sorted(widths)} bytes a token: they are of different models")
    [width] = widths
    routes_RB = np.full((row.num_rows, width), NO_ROUTE, np.uint8)
    for rows_T, trajectory in zip(reversed(row.rows_P), reversed(trajectories), strict=True):
        if trajectory.routes_T:
            routes_TB = np.frombuffer(trajectory.routes_T, np.uint8).reshape(-1, width)
            known_T = routes_TB[:, 0] != NO_ROUTE
            routes_RB[rows_T[known_T]] = routes_TB[known_T]
    return msgspec.structs.replace(row, routes_RB=routes_RB)


def layout_paths(
    executions: list[TrainingExecution], merge_prompt_tokens: int = 0
) -> tuple[list[LayoutPath], list[tuple[ExecutionId, int]], list[tuple[TrainingExecution, Trajectory]]]:
    """Paths of `executions` for the layout, with their (execution, index) and records, in the same order."""
    tokens = [[arrays.unpack(t.token_ids_T, arrays.TOKEN) for t in e.trajectories] for e in executions]
    shared = _shared_prompt(executions, tokens) if merge_prompt_tokens else np.zeros(0, np.int32)
    if len(shared) < merge_prompt_tokens:
        shared = shared[:0]
    paths, origins, records = [], [], []
    for tree, execution in enumerate(executions):
        for index, trajectory in enumerate(execution.trajectories):
            token_ids_T = tokens[tree][index]
            segments = tuple(((tree, s.node, 0), s.num_tokens) for s in trajectory.segments)
            if len(shared) and np.array_equal(token_ids_T[: len(shared)], shared):
                segments = _behind(segments, len(shared))
            paths.append(LayoutPath(token_ids_T, segments))
            origins.append((execution.execution, index))
            records.append((execution, trajectory))
    return paths, origins, records


def _shared_prompt(executions: list[TrainingExecution], tokens: list[list[np.ndarray]]) -> np.ndarray:
    """Longest prefix of the first paths of all executions that holds no trained token."""
    if len(executions) < 2:
        return np.zeros(0, np.int32)
    base = tokens[0][0]
    length = len(base)
    for execution, paths in zip(executions, tokens, strict=True):
        trained = np.flatnonzero(arrays.unpack(execution.trajectories[0].version_T, arrays.VERSION) >= 0)
        head = paths[0][: min(length, int(trained[0]) if len(trained) else len(paths[0]))]
        length = arrays.common_prefix(head, base)
    return base[:length]


def _behind(segments: tuple[tuple[SegmentKey, int], ...], num_shared: int) -> tuple[tuple[SegmentKey, int], ...]:
    """The same path, with its first `num_shared` tokens under the key of the shared prompt."""
    found = [((SHARED_PROMPT, 0, 0), num_shared)]
    left = num_shared
    for (tree, node, first), num_tokens in segments:
        skipped = min(left, num_tokens)
        left -= skipped
        if num_tokens > skipped:
            found.append(((tree, node, first + skipped), num_tokens - skipped))
    return tuple(found)


def _targets(
    row: TreeRow,
    origins: list[tuple[ExecutionId, int]],
    records: list[tuple[TrainingExecution, Trajectory]],
    config: TrainerConfig,
) -> Targets:
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("row", "token", "behavior", "advantage", "temperature", "execution", "trajectory")
    }
    counts: list[int] = []
    kept: list[tuple[ExecutionId, int]] = []
    for rows_T, origin, (execution, trajectory) in zip(row.rows_P, origins, records, strict=True):
        at = np.flatnonzero(arrays.unpack(trajectory.trainable_T, arrays.FLAG))
        if not len(at):
            continue
        if at[0] == 0:
            raise TrainerError(f"execution {origin[0]}, path {origin[1]}: its first token is trained but nothing predicts it")
        columns["row"].append(rows_T[at - 1])
        columns["token"].append(arrays.unpack(trajectory.token_ids_T, arrays.TOKEN)[at])
        columns["behavior"].append(arrays.unpack(trajectory.logprob_T, arrays.LOGPROB)[at])
        columns["advantage"].append(np.full(len(at), execution.advantage))
        columns["temperature"].append(np.full(len(at), execution.temperature))
        columns["execution"].append(np.full(len(at), execution.num_trainable))
        columns["trajectory"].append(np.full(len(at), len(counts)))
        counts.append(len(at))
        kept.append(origin)
    joined = {name: np.concatenate(parts) if parts else np.zeros(0, np.int64) for name, parts in columns.items()}
    order = np.argsort(joined["row"], kind="stable")
    by_row = {name: column[order] for name, column in joined.items()}
    num_tokens_J = np.asarray(counts, np.int64)
    return Targets(
        row_O=by_row["row"],
        token_O=by_row["token"].astype(np.int64),
        behavior_O=by_row["behavior"],
        advantage_O=by_row["advantage"],
        temperature_O=by_row["temperature"],
        weight_O=token_weights(config, by_row["execution"], num_tokens_J[by_row["trajectory"]]),
        trajectory_O=by_row["trajectory"],
        num_tokens_J=num_tokens_J,
        origin_J=tuple(kept),
        squared_advantages=float((by_row["advantage"] ** 2 / np.maximum(by_row["execution"], 1)).sum()),
    )
