"""What every trainer of a cell must do: in one process, over two ranks, and the one that only takes time.

Each trainer is built as a cell builds it, in a process of its own: a core and a satellite.
"""

from __future__ import annotations

import inspect
import os
import secrets
import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from qwengyre.cell.ranks.trainer import RankedTrainer
from qwengyre.core.errors import MembershipBroken, StaleRead, TrainerError
from qwengyre.core.records import MicroStep
from qwengyre.engines.config import EngineConfig
from qwengyre.models.adapter_record import ADAPTER
from qwengyre.models.load import load
from qwengyre.models.probe import PROBE, probe_in
from qwengyre.models.rounding import probe_of
from qwengyre.paced.trainer import PacedTrainer
from qwengyre.rpc.refusal import Refused, rebuild
from qwengyre.rpc.store import KeyStore
from qwengyre.rpc.tether import tethered
from qwengyre.testing.engines import write_tiny_qwen3
from qwengyre.testing.paced import PLAN
from qwengyre.testing.tokenizers import write_byte_tokenizer
from qwengyre.testing.training import micro_step, random_execution
from qwengyre.trainer.api import CellTrainer, Membership
from qwengyre.trainer.checkpoint import read_published
from qwengyre.trainer.config import LoraConfig, TrainerConfig
from qwengyre.trainer.member import MemberTrainer
from qwengyre.transfer.api import Exposure
from qwengyre.transfer.config import TransferConfig
from qwengyre.transfer.shm import cleanup
from qwengyre.transfer.transports import TransportPlace

pytestmark = pytest.mark.integration
SECRET = b"secret"
COMES_S, STAYS_AWAY_S = 120.0, 1.0
"""For members that all come, on a busy machine; for one that never does."""
DEVICE = os.environ.get("QWENGYRE_TEST_DEVICE", "cpu")
"""`make test-gpu` holds trainers on a device to the same contract."""
CONFIG = TrainerConfig(learning_rate=0.01, clip_low=0.999, clip_high=1e6, device=DEVICE)


class Kind(NamedTuple):
    name: str
    trainer: type
    engine: str
    ranks: int = 1
    computes: bool = True
    """Else it only takes time: no sums, nothing to audit."""
    lora: LoraConfig = LoraConfig()


KINDS = [
    Kind("whole", MemberTrainer, "embedded"),
    Kind("ranked", RankedTrainer, "embedded", ranks=2),
    Kind("adapters", MemberTrainer, "embedded", lora=LoraConfig(rank=4)),
    Kind("paced", PacedTrainer, "paced", computes=False),
]


class Host:
    """A trainer in a process of its own."""

    def __init__(self, *orders: object) -> None:
        self._connection, its = Pipe()
        command = tethered("tests.contract.trainer_host", [str(its.fileno())])
        self._process = subprocess.Popen(command, pass_fds=[its.fileno()])
        its.close()
        self._connection.send(orders)

    def wait_ready(self) -> None:
        self.pid = self._connection.recv()

    def begin(self, method: str, *args: object) -> None:
        self._connection.send((method, args))

    def end(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, Refused):
            raise rebuild(answer)
        return answer

    def __call__(self, method: str, *args: object) -> Any:
        self.begin(method, *args)
        return self.end()

    def close(self) -> None:
        self._connection.send(None)
        self._process.wait()


class Bench:
    """A core and a satellite of one kind; `snapshot` is of the weights that both started with."""

    def __init__(self, kind: Kind, folder: Path, prefix: str) -> None:
        self.kind, self.folder = kind, folder
        self.place = TransportPlace(TransferConfig(transport="shm"), prefix, "127.0.0.1")
        model = write_tiny_qwen3(folder / "model") if kind.computes else write_byte_tokenizer(folder / "model")
        (folder / "plan.json").write_bytes(msgspec.json.encode(PLAN))
        engine = EngineConfig(engine=kind.engine, paced_plan="" if kind.computes else str(folder / "plan.json"))
        config = msgspec.structs.replace(CONFIG, ranks=kind.ranks, lora=kind.lora)
        self.store = KeyStore("127.0.0.1", SECRET)
        self.core, self.satellite = (Host(model, engine, config, self.place, SECRET) for _ in range(2))
        for host in (self.core, self.satellite):
            host.wait_ready()
        self.transport = self.place.open()
        self._memberships = 0
        self.core("save_checkpoint", folder / "start", 0, model, {})

    def connect(self, world: int = 2, timeout_s: float = COMES_S) -> None:
        self._memberships += 1
        hosts = (self.core, self.satellite)[:world]
        for rank, host in enumerate(hosts):
            host.begin("connect", Membership(self._memberships, rank, world, self.store.address, timeout_s))
        for host in hosts:
            host.end()

    def start_over(self, step: int = 0) -> Exposure:
        """Both at the beginning of `step`, with the weights that they started with."""
        self.core("load_checkpoint", self.folder / "start")
        self.core("restore")
        snapshot = self.core("expose", step, 0)
        self.satellite("restore")
        self.satellite("pull", snapshot)
        for host in (self.core, self.satellite):
            host("begin_step", step)
        return snapshot

    def reduce(self, num_members: int = 2) -> None:
        hosts = (self.core, self.satellite)[:num_members]
        for host in hosts:
            host.begin("reduce", num_members)
        for host in hosts:
            host.end()

    def weights(self) -> dict[str, np.ndarray]:
        published = self.core("publishable")
        return {name: array for name, array in published.items() if name not in (PROBE, ADAPTER)}

    def close(self) -> None:
        for host in (self.core, self.satellite):
            host.close()
        self.transport.close()
        self.store.close()


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if request.param.ranks > 1 and DEVICE == "cuda":
        pytest.skip("ranks of one cell need a device each, and their groups meet over gloo")
    folder = tmp_path_factory.mktemp(request.param.name)
    prefix = f"qg-test-{secrets.token_hex(6)}"
    made = Bench(request.param, folder, prefix)
    yield made
    made.close()
    cleanup(prefix)


def claim(number: int, step: int = 0) -> MicroStep:
    rng = np.random.default_rng(number)
    return micro_step(f"m{number}", step, random_execution(rng, 0, advantage=(-1.0) ** number))


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_kind_has_every_method_of_the_interface_with_its_parameters(bench: Bench):
    for name, method in inspect.getmembers(CellTrainer, inspect.isfunction):
        if not name.startswith("_"):
            expected = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(bench.kind.trainer, name)).parameters) == expected, name


def test_a_step_of_two_members_moves_the_core_and_the_satellite_reads_it(bench: Bench):
    bench.connect()
    bench.start_over()
    before = bench.weights()
    for number, host in enumerate((bench.core, bench.satellite)):
        assert host("compute", claim(number)).tokens_trained > 0
    bench.reduce()
    stats = bench.core("apply", 2)
    assert (stats.step, stats.applied, stats.reason, stats.num_executions) == (0, True, "", 2)
    after = bench.weights()
    assert not equal(after, before)
    snapshot = bench.core("expose", 1, 0)
    bench.satellite("pull", snapshot)
    bench.satellite("begin_step", 1)
    assert bench.satellite("compute", claim(2, step=1)).micro_step == "m2"


def test_what_is_exposed_is_one_version_until_the_next(bench: Bench):
    first = bench.start_over()
    assert first.version == 0
    bench.transport.read(first)
    second = bench.core("expose", 5, 0)
    assert second.version == 5
    with pytest.raises(StaleRead):
        bench.transport.read(first)
    with pytest.raises(StaleRead):
        bench.satellite("pull", first)
    bench.satellite("pull", second)


def test_a_micro_step_of_another_step_is_refused(bench: Bench):
    bench.start_over(3)
    with pytest.raises(TrainerError, match="belongs to step 2"):
        bench.core("compute", claim(0, step=2))
    assert bench.core("compute", claim(0, step=3)).tokens_trained > 0


def test_a_step_without_executions_changes_nothing(bench: Bench):
    bench.start_over()
    before = bench.weights()
    bench.core("compute", claim(0))
    bench.core("reduce", 1)
    stats = bench.core("apply", 0)
    assert not stats.applied and stats.reason
    assert equal(bench.weights(), before)


def test_a_reduction_can_be_done_again_with_fewer_and_is_forgotten_with_its_step(bench: Bench):
    """The sums are the trainer's own until they are applied: nobody counts twice, and nobody who left counts."""
    bench.connect()
    norms = {}
    for how in ("alone", "together", "again", "anew"):
        bench.start_over()
        bench.core("compute", claim(0))
        bench.satellite("compute", claim(1))
        if how != "alone":
            bench.reduce()
        if how == "again":
            bench.core("reduce", 1)
        if how == "anew":
            bench.core("begin_step", 0)
            bench.core("compute", claim(0))
        norms[how] = bench.core("apply", 1).gradient_norm
    assert norms["alone"] == norms["again"] == norms["anew"]
    if bench.kind.computes:
        assert norms["together"] != norms["alone"]


def test_a_member_that_does_not_come_breaks_the_sum_and_leaves_the_own_one_whole(bench: Bench):
    if not bench.kind.computes:
        pytest.skip("sums nothing, so it waits for nobody")
    bench.start_over()
    bench.core("compute", claim(0))
    alone = bench.core("apply", 1).gradient_norm
    bench.connect(timeout_s=STAYS_AWAY_S)
    bench.start_over()
    bench.core("compute", claim(0))
    with pytest.raises(MembershipBroken):
        bench.core("reduce", 2)
    with pytest.raises(MembershipBroken):
        bench.core("connect", Membership(99, 0, 2, bench.store.address, STAYS_AWAY_S))
    bench.connect(world=1)
    bench.core("reduce", 1)
    assert bench.core("apply", 1).gradient_norm == alone


def test_a_checkpoint_brings_back_weights_and_step(bench: Bench, tmp_path: Path):
    bench.start_over()
    bench.core("compute", claim(0))
    bench.core("apply", 1)
    saved = bench.weights()
    bench.core("save_checkpoint", tmp_path / "c", 1, bench.folder / "model", {"journal_position": 9})
    bench.core("save_weights", tmp_path / "w.safetensors")
    assert equal(load_file(tmp_path / "w.safetensors"), saved)
    bench.core("begin_step", 1)
    bench.core("compute", claim(1, step=1))
    bench.core("apply", 1)
    assert not equal(bench.weights(), saved)
    found = bench.core("load_checkpoint", tmp_path / "c")
    assert (found["step"], found["extra"]) == (1, {"journal_position": 9})
    assert equal(bench.weights(), saved)


def test_a_cell_that_serves_meanwhile_goes_on_with_the_same_weights(bench: Bench):
    bench.start_over()
    before = bench.weights()
    bench.core("offload")
    bench.core("restore")
    assert equal(bench.weights(), before)
    bench.satellite("offload")
    bench.satellite("restore")
    bench.satellite("pull", bench.core("expose", 1, 0))
    bench.satellite("begin_step", 0)
    assert bench.satellite("compute", claim(0)).tokens_trained > 0


def test_what_engines_read_has_the_probe_of_the_model_s_own_forward(bench: Bench, tmp_path: Path):
    """Also from the ranks of a cell, and out of a file; so that an engine can show that it computes with these weights."""
    bench.start_over()
    probe = probe_in(bench.core("publishable"))
    if not bench.kind.computes:
        assert probe is None
        return
    plain = probe_of(load(bench.folder / "model", torch.float32))
    assert probe is not None and probe.token_ids == plain.token_ids
    assert plain.gap(probe.logprobs) <= plain.bound("float32")
    assert probe.sensitivity == pytest.approx(plain.sensitivity, rel=0.5)
    bench.core("save_weights", tmp_path / "w.safetensors")
    assert probe_in(read_published(tmp_path / "w.safetensors")) == probe


def test_an_audit_compares_or_says_that_it_cannot(bench: Bench, tmp_path: Path):
    bench.start_over()
    before = bench.weights()
    bench.core("save_weights", tmp_path / "v000000.safetensors")
    if not bench.kind.computes:
        with pytest.raises(TrainerError, match="audit_logprobs"):
            bench.core("audit", [claim(0)], tmp_path)
        return
    report = bench.core("audit", [claim(0)], tmp_path)
    assert report.num_tokens > 0 and report.max_logprob_gap >= report.mean_logprob_gap > 0
    assert equal(bench.weights(), before)
    with pytest.raises(TrainerError, match="version 0 cannot be audited"):
        bench.core("audit", [claim(0)], tmp_path / "nowhere")


def test_leaving_a_membership_twice_is_harmless(bench: Bench):
    bench.connect()
    for _ in range(2):
        bench.core("close")
        bench.satellite("close")
