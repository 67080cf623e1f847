"""The update of a step does not depend on how many cells computed it, who joined when, or who died: real processes, gloo."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import nullcontext
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from qwengyre.rpc.store import KeyStore
from qwengyre.testing.training import InDouble, micro_step, random_execution, tiny_hybrid, tiny_qwen3, tiny_qwen3_moe
from qwengyre.trainer.api import Membership
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.trainer import Trainer

pytestmark = pytest.mark.integration
NUM_CELLS, NUM_EXECUTIONS = 4, 8
SECRET = b"secret"
DEADLINE_S = 300.0
"""Nobody is missing: only a fault comes to it. Where somebody is, `DEATH_S` is waited for."""
DEATH_S = 20.0
BOUNDS = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 1e-4}
"""Largest relative L2 difference of a sum or an update. In bfloat16 it is that of float32: whichever cell computes a micro-step rounds its
gradient alike, and sums, moments and the weights that are updated are in float32. Only the order of those sums differs."""


class Cells:
    """Trainer processes in their fixed order; `call` waits for the answer, `together` starts all before it waits."""

    def __init__(
        self,
        forks: Connection,
        folder: Path,
        dtype: str,
        num_processes: int = NUM_CELLS,
        ranks_per_cell: int = 1,
        chunk_tokens: int = 8192,
        model: nn.Module | None = None,
        lora_rank: int = 0,
    ):
        torch.set_num_threads(1)
        (model or tiny_qwen3()).save_pretrained(folder / "model")
        self.folder, self.membership, self.bound = folder, 0, BOUNDS[dtype]
        self.store = KeyStore("127.0.0.1", SECRET)
        with Listener(str(folder / "control"), "AF_UNIX") as listener:
            names = (str(folder / "control"), str(folder / "model"), f"qgt{secrets.token_hex(3)}", dtype)
            forks.send((*names, num_processes, ranks_per_cell, chunk_tokens, lora_rank))
            accepted = [listener.accept() for _ in range(num_processes)]
        by_cell = {connection.recv(): connection for connection in accepted}
        self.pids = [pid for _, pid in sorted(by_cell)]
        self.connections = [by_cell[key] for key in sorted(by_cell)]
        self.order = list(range(num_processes))

    def call(self, cell, method, *args):
        self.connections[cell].send((method, args))
        return self.connections[cell].recv()

    def together(self, cells, method, args_of):
        for cell in cells:
            self.connections[cell].send((method, args_of(cell)))
        return [self.connections[cell].recv() for cell in cells]

    def call_all(self, cells, method, *args):
        return self.together(cells, method, lambda cell: args)

    def connect(self, timeout_s=DEADLINE_S):
        """A new membership of the cells in `order`."""
        self.membership += 1
        args_of = lambda cell: (self.member(self.order.index(cell), len(self.order), timeout_s), SECRET)  # noqa: E731
        assert self.together(self.order, "connect", args_of) == [None] * len(self.order)

    def member(self, rank, world, timeout_s=DEADLINE_S):
        return Membership(self.membership, rank, world, self.store.address, timeout_s)

    def kill(self, cell):
        self.order.remove(cell)
        os.kill(self.pids[cell], signal.SIGKILL)
        with pytest.raises(EOFError):
            self.connections[cell].recv()

    def close(self):
        for cell in self.order:
            self.connections[cell].send(None)
        for cell in self.order:
            with pytest.raises(EOFError):
                self.connections[cell].recv()
        self.store.close()


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """What starts the trainers of every test here."""
    address = str(tmp_path_factory.mktemp("forks") / "control")
    with Listener(address, "AF_UNIX") as listener:
        process = subprocess.Popen([sys.executable, Path(__file__).with_name("trainer_process.py"), address])
        connection = listener.accept()
    yield connection
    connection.send(None)
    process.wait()


def four_cells(forks, folder, kind):
    """In a dtype, or with adapters in float32."""
    has_adapters = kind == "adapters"
    return Cells(forks, folder, "float32" if has_adapters else kind, lora_rank=4 if has_adapters else 0)


@pytest.fixture(scope="module", params=[*BOUNDS, "adapters"])
def cells(request, forks, tmp_path_factory):
    cells = four_cells(forks, tmp_path_factory.mktemp("cells"), request.param)
    cells.start = cells.call(0, "weights")
    cells.connect()
    yield cells
    cells.close()


def micro_steps():
    rng = np.random.default_rng(5)
    return [micro_step(f"m{i}", 0, random_execution(rng, i, advantage=(-1.0) ** i * (1 + i % 3))) for i in range(NUM_EXECUTIONS)]


def run_step(cells, claims, joins=None):
    """`claims`: the cell of each micro-step in order; a cell joins with its first claim, or before claim `joins[cell]`.

    Return summed gradient and change of the weights.
    """
    cells.call(0, "start_over", cells.start)
    snapshot = cells.call(0, "expose", cells.membership)
    cells.call(0, "begin_step", 0)
    joined = [0]
    for step, cell in zip(micro_steps(), claims, strict=True):
        if cell not in joined:
            cells.call(cell, "restore")
            assert cells.call(cell, "pull", snapshot) is None
            cells.call(cell, "begin_step", 0)
            joined.append(cell)
        assert cells.call(cell, "compute", step).tokens_trained > 0
    members = [cell for cell in cells.order if cell in joined]
    assert members == cells.order[: len(members)], "members are a prefix"
    if len(members) > 1:
        cells.together(members, "reduce", lambda cell: (len(members),))
    sums = cells.call(0, "sums")
    assert cells.call(0, "apply", NUM_EXECUTIONS).applied
    update = cells.call(0, "weights") - cells.start
    for cell in members[1:]:
        cells.call(cell, "offload")
    return sums, update


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def kinds_of(refusals):
    return {refusal.partition(":")[0] for refusal in refusals}


def test_one_two_three_and_four_cells_and_joins_in_mid_step_agree(cells):
    sums, update = run_step(cells, [0] * NUM_EXECUTIONS)
    for claims in ([0, 1] * 4, [0, 1, 2, 0, 1, 2, 0, 1], [3, 2, 1, 0] * 2, [0, 0, 0, 1, 0, 1, 2, 1], [0, 0, 0, 0, 0, 0, 1, 1]):
        other_sums, other_update = run_step(cells, claims)
        assert distance(other_sums, sums) <= cells.bound, claims
        assert distance(other_update, update) <= cells.bound, claims
    assert np.array_equal(run_step(cells, [0] * NUM_EXECUTIONS)[1], update), "one cell alone is bitwise deterministic"


@pytest.mark.parametrize("kind", ["bfloat16", "adapters"])
def test_member_that_dies_leaves_the_core_s_sums_unharmed_and_the_rest_goes_on(forks, tmp_path, kind):
    """In the type that has the most to lose (weights, master weights and sums are three arrays of two types), and with adapters."""
    cells = four_cells(forks, tmp_path, kind)
    cells.start = cells.call(0, "weights")
    cells.connect(DEATH_S)
    sums, update = run_step(cells, [0] * NUM_EXECUTIONS)
    steps = micro_steps()
    cells.call(0, "start_over", cells.start)
    snapshot = cells.call(0, "expose", 50)
    for cell in cells.order:
        if cell:
            cells.call(cell, "restore")
            cells.call(cell, "pull", snapshot)
        cells.call(cell, "begin_step", 0)
    for index, step in enumerate(steps):
        cells.call((0, 0, 1, 2, 3)[index % 5], "compute", step)
    before = cells.call(0, "sums")
    lost = [step for index, step in enumerate(steps) if index % 5 == 3]
    cells.kill(2)
    assert kinds_of(cells.together(cells.order, "reduce", lambda cell: (NUM_CELLS,))) == {"MembershipBroken"}
    assert np.array_equal(cells.call(0, "sums"), before)
    cells.connect()
    for step in lost:
        cells.call(1, "compute", step)
    cells.together(cells.order, "reduce", lambda cell: (3,))
    assert distance(cells.call(0, "sums"), sums) <= cells.bound
    assert cells.call(0, "apply", NUM_EXECUTIONS).applied
    assert distance(cells.call(0, "weights") - cells.start, update) <= cells.bound
    for cell in cells.order[1:]:
        cells.call(cell, "offload")
    assert distance(run_step(cells, [0, 1, 3, 0, 1, 3, 0, 1])[0], sums) <= cells.bound
    cells.close()


@pytest.mark.parametrize(("dtype", "chunk_tokens"), [("float32", 8192), ("float64", 20)])
def test_two_cells_of_two_ranks_agree_with_one_process(forks, tmp_path, dtype, chunk_tokens):
    """FSDP2 inside the cells; shard r of the satellite is summed to shard r of the core and read from its rank r.

    With few tokens to a chunk, ranks have very different numbers of chunks; one of them has nothing in one micro-step.
    """
    cells = Cells(forks, tmp_path, dtype, num_processes=4, ranks_per_cell=2, chunk_tokens=chunk_tokens)
    core, satellite, everyone = (0, 1), (2, 3), (0, 1, 2, 3)
    cells.together(everyone, "connect", lambda p: (cells.member(p // 2, 2), SECRET, p % 2))
    snapshots = cells.together(core, "expose", lambda p: (0,))
    assert cells.together(satellite, "pull", lambda p: (snapshots[p % 2],)) == [None, None]
    cells.together(everyone, "begin_step", lambda p: (0,))
    executions = [e for step in micro_steps() for e in step.executions]
    claims = ((core, executions[:3]), (satellite, executions[3:4]), (core, executions[4:6]), (satellite, executions[6:]))
    for number, (cell, part) in enumerate(claims):
        step = micro_step(f"m{number}", 0, *part)
        stats = cells.together(cell, "compute", lambda p, step=step: (step,))
        assert sum(s.tokens_trained for s in stats) == sum(e.num_trainable for e in part)
    before = cells.call_all(core, "whole_weights")[0]
    cells.together(everyone, "reduce", lambda p: (2,))
    sums = cells.call_all(core, "sums_by_name")
    applied = cells.together(core, "apply", lambda p: (NUM_EXECUTIONS,))
    after = cells.call_all(core, "whole_weights")[0]
    cells.call_all(core, "save_checkpoint", tmp_path / "checkpoint", 1, tmp_path / "model")
    cells.close()

    config = TrainerConfig(learning_rate=0.01, clip_low=0.999, clip_high=1e6, dtype=dtype)
    alone = Trainer(tmp_path / "model", config, None)
    alone.begin_step(0)
    alone.compute(micro_step("all", 0, *executions))
    expected = {name: array.copy() for name, array in alone.flat.whole(alone.flat_gradient()).items()}
    start = {name: array.copy() for name, array in alone.whole_weights().items()}
    stats = alone.apply(NUM_EXECUTIONS)
    bound = BOUNDS[dtype]
    assert distance(_joined(sums), _joined([expected])) <= bound
    change = _joined([after]) - _joined([before])
    assert distance(change, _joined([alone.whole_weights()]) - _joined([start])) <= bound
    assert [a.gradient_norm for a in applied] == pytest.approx([stats.gradient_norm] * 2, rel=bound)
    alone.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(_joined([alone.whole_weights()]), _joined([after])), "a checkpoint does not depend on the ranks"


@pytest.mark.parametrize(
    ("family", "num_ranks", "dtype", "chunk_tokens"),
    [
        ("qwen3.5", 2, "float64", 20),
        ("qwen3.5", 4, "float32", 8192),
        ("qwen3-next", 2, "float64", 8192),
        ("qwen3-next", 4, "float32", 20),
        ("qwen3-moe", 2, "float64", 20),
        ("qwen3-moe", 4, "float32", 8192),
    ],
)
def test_hybrids_and_mixtures_in_a_cell_of_ranks_agree_with_one_process(forks, tmp_path, family, num_ranks, dtype, chunk_tokens):
    """States of recurrent layers go from chunk to chunk, and their gradients back, inside layers that FSDP2 gathers and frees."""
    model = tiny_qwen3_moe() if family == "qwen3-moe" else tiny_hybrid(family)
    cells = Cells(forks, tmp_path, dtype, num_ranks, num_ranks, chunk_tokens, model)
    ranks, executions = range(num_ranks), [e for step in micro_steps() for e in step.executions]
    claims = [micro_step(f"m{number}", 0, *part) for number, part in enumerate((executions[:5], executions[5:]))]
    cells.call_all(ranks, "begin_step", 0)
    for claim in claims:
        cells.call_all(ranks, "compute", claim)
    sums = cells.call_all(ranks, "sums_by_name")
    before = cells.call_all(ranks, "whole_weights")[0]
    assert all(stats.applied for stats in cells.call_all(ranks, "apply", NUM_EXECUTIONS))
    after = cells.call_all(ranks, "whole_weights")[0]
    cells.close()
    config = TrainerConfig(learning_rate=0.01, clip_low=0.999, clip_high=1e6, dtype=dtype)
    with InDouble() if dtype == "float64" else nullcontext():
        alone = Trainer(tmp_path / "model", config, None)
        alone.begin_step(0)
        for claim in claims:
            alone.compute(claim)
        assert distance(_joined(sums), _joined([alone.flat.whole(alone.flat_gradient())])) <= BOUNDS[dtype]
        alone.apply(NUM_EXECUTIONS)
    change = _joined([after]) - _joined([before])
    assert distance(change, _joined([alone.whole_weights()]) - _joined([before])) <= BOUNDS[dtype]


def test_what_one_rank_refuses_all_refuse_and_the_cell_goes_on(forks, tmp_path):
    cells = Cells(forks, tmp_path, "float32", num_processes=2, ranks_per_cell=2, chunk_tokens=16)
    ranks = (0, 1)
    good, other = (e for step in micro_steps()[:2] for e in step.executions)
    broken = msgspec.structs.replace(
        other, trajectories=tuple(msgspec.structs.replace(t, logprob_T=_all_nan(t.logprob_T)) for t in other.trajectories)
    )
    cells.call_all(ranks, "begin_step", 0)
    assert kinds_of(cells.call_all(ranks, "compute", micro_step("bad", 0, good, broken))) == {"NonFiniteLoss"}
    assert not any(sums.any() for sums in cells.call_all(ranks, "sums"))
    assert [stats.applied for stats in cells.call_all(ranks, "apply", 2)] == [False, False]
    cells.call_all(ranks, "begin_step", 1)
    cells.call_all(ranks, "compute", micro_step("good", 1, good, other))
    assert [stats.applied for stats in cells.call_all(ranks, "apply", 2)] == [True, True]
    cells.close()


def _all_nan(logprob_T):
    return np.full(len(logprob_T) // 4, np.nan, "<f4").tobytes()


def _joined(shards):
    """Shards by rank, joined along their first axis, as one flat array in the order of names."""
    return np.concatenate([np.concatenate([shard[name] for shard in shards]).ravel() for name in shards[0]])
