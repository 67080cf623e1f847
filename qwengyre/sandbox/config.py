"""The `[harness]` table of a run file."""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from qwengyre.sandbox.command import PLACEHOLDERS, wrong_placeholder

Isolation = Literal["bwrap", "none"]
NO_COMMAND: Final = 'command must not be empty: command = ["my-agent", "{instruction}"]'


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one execution, and each run of its evaluator, may use."""

    memory_mb: int = 1024
    """Memory of all processes together; shared memory, /tmp and a workspace in memory included; without swap."""
    processes: int = 128
    """Processes and threads alive at once."""
    disk_mb: int = 256
    """Size of the workspace, and of any one file. Over it the harness is killed and the workspace is scored as it is."""
    files: int = 20_000
    """Files and folders in the workspace."""
    workspace: Literal["memory", "disk"] = "memory"
    """Where workspaces are while they are worked in. `memory`: each in a file system of this size, so that the kernel itself limits it. `disk`: in
    the run folder, looked at every second; more can be written in between, so it needs `best_effort`. Bubblewrap only."""
    scratch_mb: int = 128
    """Size of /tmp (where HOME is) and of /dev/shm, each in memory. Bubblewrap only."""
    open_files: int = 1024
    """Open files of one process."""
    cpus: float = 2.0
    """Processors in use at once. All executions together weigh at most as much as the processes of the run beside them."""
    best_effort: bool = False
    """Start even where the kernel cannot limit an execution as a whole. Without cgroups, as in many containers, the limits then hold
    for each process by itself (its memory without shared memory) and for the number of processes; nothing limits the processor.
    Without file systems of their own, workspaces are checked every second. If this is false, such a run does not start."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name not in ("cpus", "best_effort", "workspace") and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.workspace == "memory" and self.disk_mb >= self.memory_mb:
            raise ValueError('memory_mb must be above disk_mb, which is part of it: raise it, or set workspace = "disk"')
        if not (math.isfinite(self.cpus) and self.cpus >= 0.01):
            raise ValueError("cpus must be at least 0.01 and finite")


class HarnessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which program is the agent, and how it is run and scored."""

    command: tuple[str, ...] = ()
    """The harness as a command line, without a shell; without meaning where Harbor runs its own agents (`sandbox.kind`). Placeholders: {instruction} its text, {instruction_file} a read-only
    file, {workspace} the working folder, {model} the model's name."""
    stdin: bool = False
    """Give the instruction on standard input (else it is empty)."""
    env: dict[str, str] = {}
    """More environment variables for the harness. The gateway's address and key (`OPENAI_BASE_URL`, `ANTHROPIC_API_KEY` and their
    like) are set for each execution: a run refuses to start if they are set here."""
    isolation: Isolation = "bwrap"
    """`bwrap`: own workspace, the rest hidden or read-only, no network but the gateway. `none`: trusted harnesses only."""
    readable: tuple[str, ...] = ()
    """More absolute paths of this machine that a harness and its evaluator may read, each where it is."""
    warm_start: bool = False
    """Fork harnesses from a process that has imported them already: `command` must be `python -m MODULE ...`. The module may
    define `preload()`, called once; it must leave no thread behind."""
    warm_modules: tuple[str, ...] = ()
    """More modules to import once, before the first execution."""
    timeout_s: float | None = None
    """Replaces `[agent] timeout_sec` of every task. At the timeout the workspace is scored as it is."""
    overall_timeout_s: float = 3600.0
    """Harness and evaluation together. At this timeout the execution is dropped."""
    verifier_timeout_s: float | None = None
    """Replaces `[verifier] timeout_sec` of every task."""
    evaluator_tries: int = 3
    """How often a failing evaluator (no score, not a score of 0) is run before the execution is dropped."""
    keep_failed: int = 20
    """How many workspaces of failed executions are kept in the run folder."""
    keep: Literal["failed", "sample", "all"] = "sample"
    """What else is kept there: nothing, the newest few of the lowest, of the highest and of other rewards, or everything."""
    keep_sample_mb: int = 512
    """Size of that sample; older ones make room."""
    limits: LimitsConfig = LimitsConfig()
    """Memory, processes and disk of one execution."""

    def __post_init__(self) -> None:
        if self.command and not self.command[0]:
            raise ValueError(NO_COMMAND)
        if any("\0" in part for part in self.command):
            raise ValueError("command holds a NUL byte")
        for part in self.command:
            if wrong := wrong_placeholder(part):
                known = ", ".join(PLACEHOLDERS)
                raise ValueError(f"command: {wrong[0]} is not a placeholder. Did you mean {wrong[1]}? There are {known}")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"env: {name!r} cannot be a variable: no empty name, no `=` in it, no NUL byte")
        if relative := [path for path in self.readable if not path.startswith("/")]:
            raise ValueError(f"readable: {relative[0]} is not an absolute path")
        if self.warm_modules and not self.warm_start:
            raise ValueError("warm_modules needs warm_start = true")
        if self.warm_start and self.module is None:
            raise ValueError('warm_start needs command = ["python", "-m", "MODULE", ...]')
        for name in ("timeout_s", "overall_timeout_s", "verifier_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0 and finite")
        if self.evaluator_tries < 1 or self.keep_failed < 0 or self.keep_sample_mb < 0:
            raise ValueError("evaluator_tries must be at least 1, keep_failed and keep_sample_mb at least 0")

    def shared_by(self, num: int) -> HarnessConfig:
        """For each of `num` processes that run harnesses: what they keep together is what one would."""
        keep_failed, keep_sample_mb = -(-self.keep_failed // num), self.keep_sample_mb // num
        return msgspec.structs.replace(self, keep_failed=keep_failed, keep_sample_mb=keep_sample_mb)

    @property
    def module(self) -> str | None:
        """MODULE of a command `python -m MODULE ...`, else None."""
        program = self.command[0].rsplit("/", 1)[-1] if self.command else ""
        is_module = len(self.command) >= 3 and program.startswith("python") and self.command[1] == "-m"
        return self.command[2] if is_module else None
