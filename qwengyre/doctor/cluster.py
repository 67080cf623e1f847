"""Examinations of a Ray cluster: every node as a machine of its own, then what must agree between them, then node to node.

Needs the extra `ray`. Each node runs a `Probe`; what crosses is JSON.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

import qwengyre
from qwengyre.core.errors import TransferError
from qwengyre.doctor import machine, transfers
from qwengyre.doctor.finding import Finding, examine
from qwengyre.doctor.installed import installed_version
from qwengyre.launchers.on_ray import join_cluster
from qwengyre.transfer.api import Exposure, Transport

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

DEADLINE_S: Final = 120.0  # the first actor on a node starts a process there
MAX_SKEW_S: Final = 0.5  # half a second moves no conclusion that is drawn from the logs of several nodes
NUM_ASKS: Final = 5  # the fastest answer has the least error
COMPARED: Final = ("torch", "transformers", "tokenizers", "renderers", "safetensors", "msgspec", "numpy", "ray")
Asked = TypeVar("Asked")


class Facts(msgspec.Struct, frozen=True):
    """What must be equal on all nodes."""

    python: str
    qwengyre: str
    packages: dict[str, str]
    sees_shared: bool

    def versions(self) -> dict[str, str]:
        return {"python": self.python, "qwengyre": self.qwengyre, **self.packages}


class NodeProbe:
    """One per node, as a Ray actor."""

    def __init__(self) -> None:
        import ray

        self._host = ray.util.get_node_ip_address()
        self._transport: Transport | None = None
        """Kept open while others read."""

    def findings(self) -> bytes:
        """Of this node alone. Network between processes is measured between nodes instead."""
        return msgspec.json.encode(examine((*machine.EXAMINATIONS, transfers.hcas)))

    def facts(self, shared: str, word: str) -> bytes:
        path = Path(shared)
        packages = {name: installed_version(name) or "none" for name in COMPARED}
        sees = path.is_file() and path.read_text() == word
        return msgspec.json.encode(Facts(machine.python()[0].found, qwengyre.__version__, packages, sees))

    def now(self) -> float:
        return time.time()

    def expose(self) -> bytes:
        self._transport, exposure = transfers.expose("tcp", self._host)
        return msgspec.json.encode(exposure)

    def read(self, exposure: bytes) -> bytes | str:
        """The rate, or why there is none."""
        try:
            return msgspec.json.encode(transfers.measure(msgspec.json.decode(exposure, type=Exposure), self._host))
        except TransferError as error:
            return str(error)


def examine_cluster(address: str, shared: Path) -> list[Finding]:
    """`shared` is a folder that all nodes should see. Raises ConfigError when no cluster answers at `address`."""
    join_cluster(address, key="--cluster")
    import ray

    try:
        nodes, dead = [node for node in ray.nodes() if node["Alive"]], [node for node in ray.nodes() if not node["Alive"]]
        findings = [
            Finding(
                "node",
                "note",
                "Ray has declared it dead",
                "restart `ray start` there, or leave it out",
                node["NodeManagerAddress"],
            )
            for node in dead
        ]
        probes, silent = _place(nodes)
        findings += silent
        for node, probe in probes:
            findings += [msgspec.structs.replace(finding, node=node) for finding in _ask(probe.findings.remote(), list[Finding])]
        return [*findings, *_agreement(probes, shared), *_clocks(probes), *_rates(probes)]
    finally:
        ray.shutdown()


def _place(nodes: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, ActorHandle]], list[Finding]]:
    """A probe on every node that starts one; findings for the others."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probes, silent = [], []
    for index, node in enumerate(nodes):
        name = f"{node['NodeManagerAddress']} #{index}"
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probe = ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=on_node).remote()
        try:
            ray.get(probe.now.remote(), timeout=DEADLINE_S)
            probes.append((name, probe))
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            todo = "install the same environment there, under the same path, and see Ray's logs on it"
            silent.append(Finding("node", "missing", f"runs nothing of ours: {str(error).splitlines()[0]}", todo, name))
    return probes, silent


def _ask(answer: ObjectRef, kind: type[Asked]) -> Asked:
    import ray

    return msgspec.json.decode(ray.get(answer, timeout=DEADLINE_S), type=kind)


def _agreement(probes: Sequence[tuple[str, ActorHandle]], shared: Path) -> list[Finding]:
    """Versions, and the folder that must be shared."""
    mark = shared / f".qwengyre-doctor-{time.time_ns()}"
    mark.write_text(mark.name)
    try:
        facts = {node: _ask(probe.facts.remote(str(mark.absolute()), mark.name), Facts) for node, probe in probes}
    finally:
        mark.unlink()
    findings = []
    for name in ("python", "qwengyre", *COMPARED):
        found = {node: fact.versions()[name] for node, fact in facts.items()}
        findings.append(_agreed(f"{name} on all nodes", found))
    blind = [node for node, fact in facts.items() if not fact.sees_shared]
    todo = (
        "mount one file system under the same path everywhere: checkpoints, snapshots, logs and the policy lie there"
        if blind
        else ""
    )
    where = (
        f"{shared.absolute()} is not the same folder on {', '.join(blind)}" if blind else f"{shared.absolute()} is seen by all"
    )
    return [*findings, Finding("shared folder", "missing" if blind else "ok", where, todo)]


def _agreed(what: str, found: dict[str, str]) -> Finding:
    """
    >>> _agreed("torch on all nodes", {"a": "2.13", "b": "2.13", "c": "2.12"}).found
    '2.13, but c has 2.12'
    """
    [(most, _)] = Counter(found.values()).most_common(1)
    others = {node: version for node, version in found.items() if version != most}
    if not others:
        return Finding(what, "ok", most)
    listed = ", ".join(f"{node} has {version}" for node, version in others.items())
    return Finding(
        what, "missing", f"{most}, but {listed}", "install the same versions everywhere: records and weights travel between them"
    )


def _clocks(probes: Sequence[tuple[str, ActorHandle]]) -> list[Finding]:
    """Offset of each node's clock from this machine's, by the quickest of a few questions."""
    import ray

    findings = []
    for node, probe in probes:
        asked = []
        for _ in range(NUM_ASKS):
            began = time.time()
            there = ray.get(probe.now.remote(), timeout=DEADLINE_S)
            ended = time.time()
            asked.append((ended - began, there - (began + ended) / 2))
        round_trip_s, skew_s = min(asked)
        is_near = abs(skew_s) <= MAX_SKEW_S + round_trip_s / 2
        todo = "" if is_near else "run chrony or another NTP client there: logs and tables of several nodes are compared by time"
        found = f"{skew_s * 1e3:+.1f} ms from here (answers take {round_trip_s * 1e3:.1f} ms)"
        findings.append(Finding("clock skew", "ok" if is_near else "note", found, todo, node))
    return findings


def _rates(probes: Sequence[tuple[str, ActorHandle]]) -> list[Finding]:
    """Each node reads from the one before it, one pair at a time; with it, that the second can connect to the first."""
    import ray

    if len(probes) < 2:
        return [Finding("bandwidth between nodes", "note", "one node only: nothing to measure", "")]
    findings = []
    for (source, owner), (node, reader) in zip(probes, [*probes[1:], probes[0]], strict=True):
        what = f"bandwidth from {source}"
        answer = ray.get(reader.read.remote(ray.get(owner.expose.remote(), timeout=DEADLINE_S)), timeout=DEADLINE_S)
        if isinstance(answer, str):
            todo = "let nodes connect to each other on ports above 1024, and give Ray the address of the fast network (--node-ip-address)"
            findings.append(Finding(what, "missing", answer, todo, node))
        else:
            findings.append(
                msgspec.structs.replace(transfers.rated(what, msgspec.json.decode(answer, type=transfers.Rate)), node=node)
            )
    return findings
