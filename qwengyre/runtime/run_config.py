"""The run file as a whole: one table per component, each owned by its folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from qwengyre.config.dump import dump_value
from qwengyre.config.load import Reading, load, parse_override, read
from qwengyre.config.paths import absolute, with_absolute_paths
from qwengyre.core.ids import LocalPath, ModelPlace
from qwengyre.engines.config import EngineConfig
from qwengyre.gateway.config import GatewayConfig
from qwengyre.hooks.config import HooksConfig
from qwengyre.launchers.config import RayConfig
from qwengyre.models.hub import cached, fetch, is_hub_name
from qwengyre.rpc.tls import TlsConfig
from qwengyre.runtime.config import EvaluationConfig, PolicyConfig, RuntimeConfig, TasksConfig
from qwengyre.sandbox.config import NO_COMMAND, HarnessConfig
from qwengyre.sandbox.kinds import SandboxTable
from qwengyre.sandbox.task_images import absolute_image
from qwengyre.scheduler.config import SchedulerConfig
from qwengyre.telemetry.tracking_config import TrackingConfig
from qwengyre.trainer.config import TrainerConfig
from qwengyre.trainer.published import PUBLISHED
from qwengyre.trajectory.config import TrajectoryConfig
from qwengyre.transfer.config import TransferConfig
from qwengyre.warmup.config import WarmupConfig


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything a run depends on. Written back to the run folder as resolved."""

    tasks: TasksConfig
    harness: HarnessConfig
    sandbox: SandboxTable = SandboxTable()
    runtime: RuntimeConfig = RuntimeConfig()
    policy: PolicyConfig = PolicyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    trajectory: TrajectoryConfig = TrajectoryConfig()
    hooks: HooksConfig = HooksConfig()
    tracking: TrackingConfig = TrackingConfig()
    transfer: TransferConfig = TransferConfig()
    tls: TlsConfig = TlsConfig()
    ray: RayConfig = RayConfig()
    warmup: WarmupConfig = WarmupConfig()

    def __post_init__(self) -> None:
        if self.trajectory.divide_by_std is None:
            divides = PUBLISHED[self.trainer.objective].divides_by_std
            trajectory = msgspec.structs.replace(self.trajectory, divide_by_std=divides)
            msgspec.structs.force_setattr(self, "trajectory", trajectory)
        if self.sandbox.kind == "own" and not self.harness.command:
            raise ValueError(f"harness.{NO_COMMAND}")
        if self.sandbox.kind == "harbor" and self.hooks.reward:
            raise ValueError(
                'hooks.reward reads workspaces, which Harbor leaves in its environments: leave out sandbox.kind = "harbor"'
            )
        if self.sandbox.hosts and self.hooks.reward:
            raise ValueError("hooks.reward reads workspaces in the controller's process: leave out sandbox.hosts")
        if self.runtime.launcher == "ray" and self.transfer.transport == "shm":
            raise ValueError(
                'transfer.transport "shm" does not reach other hosts: with launcher "ray" use "tcp" or leave it at "auto"'
            )

    @property
    def has_harnesses_outside(self) -> bool:
        """Whether harnesses reach their gateway by its TCP port, not by its socket in a sandbox of ours."""
        return self.harness.isolation == "none" or self.sandbox.kind == "harbor"


def load_run(
    path: str | Path, overrides: list[str] | tuple[str, ...] = (), progress: Callable[[str], None] = lambda line: None
) -> RunConfig:
    """Read the run file at `path`; `overrides` are "table.key=value". Raises ConfigError with file, line and key.

    Relative paths, of the file as of overrides, are taken from the current folder and are absolute in what is returned, so that a run
    can be resumed and looked at from anywhere. A model of the hub is fetched, of which `progress` is told; in its place stands the folder
    of its revision.
    """
    config = _resolved(load(path, RunConfig, overrides), Path(path))
    if not is_hub_name(config.policy.model, Path.cwd()):
        return config
    return _with_model(config, str(fetch(config.policy.model, progress)))


def resolved_changes(overrides: Sequence[str], config: RunConfig) -> tuple[str, ...]:
    """Overrides with the values that they have in `config`, so that they mean the same wherever they are read again."""
    table = msgspec.to_builtins(config)
    found = []
    for override in overrides:
        key, _ = parse_override(override)
        value = functools.reduce(lambda inner, part: inner[part], key, table)
        found.append(f"{'.'.join(key)}={dump_value(value)}")
    return tuple(found)


def read_run(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Reading[RunConfig]:
    """As `load_run`, but what is wrong comes with what is right, and nothing is fetched: a model of the hub that is not here yet keeps its name.

    Raises ConfigError for a file that is not TOML.
    """
    reading = read(path, RunConfig, overrides)
    return Reading(_resolved(reading.value, Path(path)) if reading.value is not None else None, reading.mistakes)


def _resolved(config: RunConfig, file: Path) -> RunConfig:
    here = Path.cwd()
    if (config.hooks.are_wanted or config.tasks.source) and not config.hooks.folder:
        hooks = msgspec.structs.replace(config.hooks, folder=LocalPath(str(file.parent)))
        config = msgspec.structs.replace(config, hooks=hooks)
    config = with_absolute_paths(config, here)
    if config.policy.model:
        config = _with_model(config, place_of(config.policy.model, here))
    if config.sandbox.image:
        image = absolute_image(config.sandbox.image, here)
        config = msgspec.structs.replace(config, sandbox=msgspec.structs.replace(config.sandbox, image=image))
    program, *arguments = config.harness.command or ("",)
    if "/" in program and not program.startswith("{"):
        command = (absolute(program, here), *arguments)
        config = msgspec.structs.replace(config, harness=msgspec.structs.replace(config.harness, command=command))
    return config


def place_of(model: str, here: Path) -> str:
    """The absolute path of a model's folder; its name, if it is one of the hub's that was not fetched yet."""
    if not is_hub_name(model, here):
        return absolute(model, here)
    return str(cached(model) or model)


def _with_model(config: RunConfig, model: str) -> RunConfig:
    return msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, model=ModelPlace(model)))
