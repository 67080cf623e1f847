"""Trees of recorded harness sessions (tests/captures) as bench cases: replayed through the real gateway, sampled for training.

The replay's tokenizer has one token per byte; a real one has about a quarter as many. `bytes_per_token` thins every node
alike, so the tree keeps its shape.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qwengyre.bench.trees import VOCABULARY, Case
from qwengyre.core import arrays
from qwengyre.core.errors import ConfigError
from qwengyre.core.records import Role, Trajectory
from qwengyre.trajectory.layout import LayoutPath

if TYPE_CHECKING:
    from qwengyre.core.ids import CallId
    from qwengyre.trajectory.tree import TrajectoryTree

CAPTURES = Path("tests/captures")


def recorded_trees(names: Sequence[str], captures: Path = CAPTURES) -> dict[str, tuple[TrajectoryTree, dict[CallId, Role]]]:
    """(tree, roles) of each capture, by name. Raises ConfigError when there is no such recording."""
    from qwengyre.gateway.rendering import Rendering
    from qwengyre.testing.capture_replay import Replay
    from qwengyre.testing.tokenizers import write_byte_tokenizer
    from qwengyre.trajectory.roles import assign_roles
    from qwengyre.trajectory.tree import TrajectoryTree

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        rendering = Rendering.from_folder(write_byte_tokenizer(Path(folder)), {"name": "qwen3", "thinking_retention": "all"})
        for name in names:
            file = captures / f"{name}.jsonl.gz"
            if not file.exists():
                raise ConfigError("no such recording: run the bench from the repository, or give --captures", file=str(file))
            workspace = Path(folder) / name
            workspace.mkdir()
            execution = asyncio.run(Replay(file, rendering, workspace).run())
            tree = TrajectoryTree(execution.session.calls)
            found[name] = (tree, assign_roles(tree.calls))
    return found


def recorded_case(
    name: str, tree: TrajectoryTree, roles: Mapping[CallId, Role], *, j_max: int | None, bytes_per_token: int, seed: int = 0
) -> tuple[Case, int]:
    """The trajectories that are drawn with `j_max`, as a case, and how many tokens of them are trained."""
    from qwengyre.trajectory.sampling import sample_trajectories

    chosen = sample_trajectories(tree, roles, j_max=j_max, rng=np.random.default_rng(seed))
    trained = sum(int(arrays.unpack(t.trainable_T, arrays.FLAG).sum()) for t in chosen)
    return Case(name, tuple(thinned(t, bytes_per_token) for t in chosen)), trained


def thinned(trajectory: Trajectory, by: int) -> LayoutPath:
    """Every `by`-th token of each node, from its first on: what paths share, they still share."""
    token_ids_T = arrays.unpack(trajectory.token_ids_T, arrays.TOKEN)
    pieces, segments, offset = [], [], 0
    for segment in trajectory.segments:
        piece = token_ids_T[offset : offset + segment.num_tokens : by] % VOCABULARY
        pieces.append(piece)
        segments.append(((0, segment.node, 0), len(piece)))
        offset += segment.num_tokens
    return LayoutPath(np.concatenate(pieces), tuple(segments))
