"""Workloads of the simulator: what is to be trained, on what, and how long things take. Hours unless a unit is named."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from qwengyre.config.convert import Converter
from qwengyre.core.errors import ConfigError


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One workload; symbols in brackets are the paper's.

    The unloaded duration of execution i of query q is `median_h * exp(sigma_query * z_q + sigma_execution * z_qi)` with z
    standard normal, the same for every policy (common random numbers).
    """

    steps: int
    """Optimizer steps [S]."""
    groups_per_step: int
    """Rollout groups of one step [B]."""
    executions_per_group: int
    """Executions of one query [N]."""
    steps_per_burst: int
    """Steps between two publishes [mu]."""
    dispatch_depth: float
    """Steps' worth of groups dispatched ahead [phi]."""
    nodes: int
    """Nodes of the pool."""
    cell_nodes: int
    """Nodes of one cell."""
    slots_per_node: float
    """Executions that one node serves at once."""
    median_h: float
    """Median of an execution's unloaded duration."""
    sigma_query: float
    """Spread of the log-duration between queries."""
    sigma_execution: float
    """Spread of the log-duration within a query."""
    overall_timeout_h: float
    """An execution older than this since it started is dropped; its group still counts."""
    train_node_hours_per_step: float
    """Training work of one step."""
    distinct_share: float = 1.0
    """Tokens that an execution's chosen paths do not share, as a share of all their tokens. 1: each path is trained by itself."""
    train_share_by_duration: float
    """Share t of an execution's training work that grows with its duration."""
    micro_steps_per_group: int
    """Equal micro-steps that a group is cut into."""
    replica_overhead: float = 0.0
    """A micro-step takes work / cell_nodes * (1 + replica_overhead * (members - 1)).

    Members are data-parallel replicas of `cell_nodes` nodes: one cell of all nodes (Colocate) is nodes / cell_nodes of them.
    """
    optimizer_s: float = 10.0
    """Serial, per step."""
    publish_s: float = 60.0
    """Serial, per burst."""
    to_training_s: float = 8.52
    """Role switch; neither role is served meanwhile (the paper's measured mean)."""
    to_rollout_s: float = 3.46
    """Role switch back (the paper's measured mean)."""
    move_stall_s: float = 5.0
    """What a moved execution loses."""
    foresight_error: float | None = None
    """Spread of the error with which a group's log-duration is known before it is dispatched; sigma_execution / sqrt(N) is
    one earlier group's. Unset: nothing is known, and there is no order but that of dispatch.
    """
    decode_share: float = 0.0
    """Share g of an execution's time that is decoding, hence slows down with the load of its server."""
    slowdown: float = 1.0
    """How much slower decoding is on a server whose slots all decode."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "groups_per_step",
            "executions_per_group",
            "steps_per_burst",
            "nodes",
            "cell_nodes",
            "micro_steps_per_group",
        ):
            _require(getattr(self, name) >= 1, f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("slots_per_node", "median_h", "overall_timeout_h"):
            value = getattr(self, name)
            _require(value > 0, f"{name} = {value} must be above zero")
            _require(value >= MIN_VALUE, f"{name} = {value:g} is below {MIN_VALUE:g}: is its unit right?")
        error = self.foresight_error
        _require(error is None or 0 <= error <= MAX_SIGMA, f"foresight_error = {error} is a standard deviation: 0 to {MAX_SIGMA}")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            _require(value >= 0, f"{name} = {value} must not be below zero")
        for name in ("slots_per_node", "median_h", "overall_timeout_h", "slowdown", *NOT_NEGATIVE):
            _require(getattr(self, name) <= MOST, f"{name} = {getattr(self, name):g} is beyond {MOST:g}: is its unit right?")
        for name in ("sigma_query", "sigma_execution"):
            _require(
                getattr(self, name) <= MAX_SIGMA,
                f"{name} = {getattr(self, name):g} is the standard deviation of a log-duration (0.1 to 0.6 is usual): at most {MAX_SIGMA}",
            )
        _require(self.distinct_share > 0, f"distinct_share = {self.distinct_share} must be above zero: every path has a token")
        for name in ("train_share_by_duration", "decode_share", "distinct_share"):
            _require(getattr(self, name) <= 1, f"{name} = {getattr(self, name)} is a share: at most 1")
        _require(self.slowdown >= 1, f"slowdown = {self.slowdown} must be at least 1: a loaded server is not faster")
        _require(self.nodes <= MAX_NODES, f"nodes = {self.nodes} is beyond {MAX_NODES}, the most that are simulated")
        _require(
            self.nodes % self.cell_nodes == 0,
            f"cells of {self.cell_nodes} nodes do not divide {self.nodes} nodes: set cell_nodes to one of {_divisors(self.nodes)}",
        )
        self._require_size()
        slots = self.num_cells * self.slots(self.cell_nodes)
        _require(
            slots >= self.executions_per_group and self.slots(self.cell_nodes) >= 1,
            f"{self.nodes} nodes in cells of {self.cell_nodes} serve {slots} executions at once, but one group has "
            f"{self.executions_per_group}: raise nodes or slots_per_node, or lower executions_per_group",
        )

    def _require_size(self) -> None:
        """Refuse what no memory holds."""
        _require(
            self.steps_per_burst <= MAX_EXECUTIONS,
            f"steps_per_burst = {self.steps_per_burst} is beyond {MAX_EXECUTIONS}: at most steps = {self.steps} makes a difference",
        )
        for name, of_group in (("executions", "executions_per_group"), ("micro-steps", "micro_steps_per_group")):
            num = self.num_groups * getattr(self, of_group)
            _require(
                num <= MAX_EXECUTIONS,
                f"{num} {name} are more than the {MAX_EXECUTIONS} that are simulated: lower steps, groups_per_step or {of_group}",
            )

    @property
    def num_cells(self) -> int:
        return self.nodes // self.cell_nodes

    @property
    def num_groups(self) -> int:
        return self.steps * self.groups_per_step

    def slots(self, nodes: int) -> int:
        """Executions that a server of `nodes` nodes serves at once: round(nodes * slots_per_node)."""
        return round(nodes * self.slots_per_node)


NOT_NEGATIVE = (
    "dispatch_depth",
    "sigma_query",
    "sigma_execution",
    "train_node_hours_per_step",
    "train_share_by_duration",
    "replica_overhead",
    "optimizer_s",
    "publish_s",
    "to_training_s",
    "to_rollout_s",
    "move_stall_s",
    "decode_share",
)


MIN_VALUE: Final = 1e-9
MOST: Final = 1e9
"""Of every number with a unit: beyond it sums of seconds lose what matters."""
MAX_SIGMA: Final = 5
MAX_NODES: Final = 10_000_000
MAX_EXECUTIONS: Final = 20_000_000


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ValueError(message)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def builtin_workloads() -> dict[str, Workload]:
    """The calibrated workloads that come with QwenGyre, by name."""
    data = msgspec.json.decode(resources.files("qwengyre.sim").joinpath("workloads.json").read_bytes())
    return {name: msgspec.convert(entry, Workload) for name, entry in data["workloads"].items()}


def load_workload(spec: str) -> tuple[str, Workload]:
    """Read `FILE` (JSON or TOML), `FILE:NAME` for one of several under "workloads", or the name of a built-in one.

    Returns its name and the workload. Raises ConfigError that says what to change.
    """
    path, entry = _find(spec)
    if path is None:
        return spec, builtin_workloads()[spec]
    data = _decode(path)
    several = data.get("workloads") if isinstance(data, dict) else None
    if isinstance(several, dict):
        entry = entry or (next(iter(several)) if len(several) == 1 else None)
        if not several:
            raise ConfigError('"workloads" is empty', file=str(path))
        if entry not in several:
            said = f"has no workload {entry!r}" if entry else "holds several workloads"
            raise ConfigError(f"{said}: write {path}:NAME with one of {', '.join(several)}", file=str(path))
        data = several[entry]
    elif entry:
        raise ConfigError(f'has no "workloads" to take {entry!r} from', file=str(path))
    return entry or path.stem, to_workload(data, file=str(path), above=(entry,) if entry else ())


def to_workload(table: object, *, file: str, above: tuple[str, ...] = ()) -> Workload:
    """The workload that a table of keys says; `above` are the keys that it stands under in `file`.

    Raises ConfigError of all that is wrong with it at once.
    """
    if not isinstance(table, dict):
        raise ConfigError("expected a table with the keys of a workload", file=file, key=".".join(above) or None)
    converter = Converter(Workload, name="A workload")
    made: Workload | None = converter.convert(table)
    if made is None or converter.mistakes:
        mistakes = converter.mistakes
        raise ConfigError.of_all([ConfigError(m.message, file=file, key=".".join((*above, *m.key)) or None) for m in mistakes])
    workload: Workload = made
    return workload


def _find(spec: str) -> tuple[Path | None, str | None]:
    if Path(spec).is_file():
        return Path(spec), None
    file, _, entry = spec.rpartition(":")
    if file and Path(file).is_file():
        return Path(file), entry
    if spec in builtin_workloads():
        return None, None
    names = ", ".join(builtin_workloads())
    raise ConfigError(f"no such workload: give a file, FILE:NAME, or one of the built-in {names}", file=file or spec)


def _decode(path: Path) -> object:
    try:
        text = path.read_bytes()
        return msgspec.toml.decode(text) if path.suffix == ".toml" else msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", file=str(path)) from None
