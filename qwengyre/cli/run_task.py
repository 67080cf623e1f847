"""`qwengyre run-task TASK`: one execution of one task, to see what a harness does."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from qwengyre.cli.output import say, say_progress
from qwengyre.core.errors import ConfigError, EngineError
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.core.records import Outcome
from qwengyre.engines.api import Serving
from qwengyre.engines.config import EngineConfig
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.gateway import Execution
from qwengyre.gateway.serve import GatewayServer
from qwengyre.models.hub import folder_of
from qwengyre.runtime.run_config import load_run
from qwengyre.sandbox.config import HarnessConfig
from qwengyre.sandbox.harness import ExecutionSpec, GatewayAddress
from qwengyre.sandbox.launcher import Launcher
from qwengyre.sandbox.task import Task, load_task
from qwengyre.sandbox.task_images import run_on_images
from qwengyre.sandbox.workspace import keep_copy
from qwengyre.trajectory.records import Opened

SERVER = ServerId("engine")
NAME = ExecutionId("execution")
LOOK_EVERY_S = 0.2  # a person watches


class Trial(msgspec.Struct, frozen=True):
    """What one execution needs."""

    task: Task
    harness: HarnessConfig
    engine: EngineConfig
    gateway: GatewayConfig
    model_dir: Path
    url: str
    """Of a server in place of an engine here; empty for none."""
    temperature: float
    keep: Path


def run_task(
    task: Annotated[Path, typer.Argument(metavar="TASK", help="The folder of one task.")],
    run_file: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.toml", help="Take harness, policy and engine from here.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --run: override a key.")] = None,
    harness: Annotated[str, typer.Option(metavar="COMMAND", help="The harness, such as 'my-agent {instruction}'.")] = "",
    model: Annotated[Path | None, typer.Option(help="Folder of the model; with --engine, of its tokenizer.")] = None,
    engine: Annotated[str, typer.Option(metavar="URL", help="A completions server, in place of an engine here.")] = "",
    isolation: Annotated[
        str, typer.Option(help="`bwrap`, or `none` for a harness that you trust; the run file's by default.")
    ] = "",
    keep: Annotated[Path, typer.Option(help="Folder to make: workspace, output, records.")] = Path("run-task"),
) -> None:
    """Run one execution of one task: the harness's output as it comes, then its score. The workspace is kept.

    `qwengyre inspect` and `export` read the folder that it leaves.
    """
    if keep.exists():
        raise ConfigError("this already exists: name a folder that is not", file=str(keep), key="--keep")
    if run_file is None and not harness:
        raise ConfigError("name a harness, or a run file that does (--run)", key="--harness")
    trial = _trial(task, run_file, overrides or [], keep)
    changes: dict[str, object] = {"warm_start": False, "warm_modules": ()}
    if harness:
        changes["command"] = tuple(shlex.split(harness))
    if isolation:
        changes["isolation"] = isolation
    trial = msgspec.structs.replace(
        trial,
        harness=msgspec.convert(msgspec.to_builtins(trial.harness) | changes, HarnessConfig),
        model_dir=folder_of(model, say_progress) if model else trial.model_dir,
        url=engine or trial.url,
    )
    if not (trial.model_dir / "tokenizer.json").is_file():
        raise ConfigError("name the folder of a model, or a run file that does (--run)", key="--model")
    keep.mkdir(parents=True)
    outcome = asyncio.run(_run(trial))
    if outcome.detail:
        say(outcome.detail)
    say(f"{outcome.end.value}, {outcome.validity.value}, score {outcome.score:g}, after {outcome.duration_s:.1f} s")
    say(f"its workspace is in {keep / 'workspace'}; its calls: qwengyre inspect {keep}")


def _trial(folder: Path, run_file: Path | None, overrides: list[str], keep: Path) -> Trial:
    task = load_task(folder)
    if run_file is None:
        harness = HarnessConfig(command=("true",))
        return Trial(task, harness, EngineConfig(), GatewayConfig(), Path(), "", 1.0, keep)
    config = load_run(run_file, overrides, say_progress)
    if config.sandbox.kind != "own":
        message = "this command runs harnesses in sandboxes of QwenGyre's own: `harbor trial start` runs one trial of Harbor's"
        raise ConfigError(message, file=str(run_file), key="sandbox.kind")
    (task,) = run_on_images([task], config.sandbox, config.harness, say)
    model_dir = Path(config.policy.model)
    if not config.policy.model:
        from qwengyre.warmup import warm_up

        model_dir = warm_up(config.warmup, Path(config.policy.cache), config.runtime.seed, say)
    url = config.engine.url if config.engine.engine == "served" else ""
    gateway = msgspec.structs.replace(config.gateway, processes=1, port=0, public_url="")
    return Trial(task, config.harness, config.engine, gateway, model_dir, url, config.policy.temperature, keep)


async def _run(trial: Trial) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="qwengyre-task-") as private:
        (Path(private) / "harness").mkdir()
        config = GatewayProcessConfig(
            model=str(trial.model_dir),
            journal=str(trial.keep / "gateway.log"),
            secret_file=str(Path(private) / "secret"),
            control_socket=str(Path(private) / "control.sock"),
            harness_socket=str(Path(private) / "harness" / "harness.sock"),
            port=0,
            gateway=trial.gateway,
        )
        server = GatewayServer(config)
        async with _engine(trial) as (engine, most), server:
            await server.gateway.set_server(SERVER, engine)
            most = min(trial.gateway.max_context_tokens, most)
            execution = await server.gateway.open(_opened(trial, most))
            execution.route.set(SERVER)
            assert server.listening is not None
            address = GatewayAddress(str(config.harness_socket), trial.gateway.url(0, server.listening.port))
            work = Path(private) / "work"
            async with Launcher(trial.harness, [address], work=work, failed=trial.keep / "failed") as launcher:
                return await _execute(trial, launcher, server, work / f"{NAME}.0", execution)


async def _execute(trial: Trial, launcher: Launcher, server: GatewayServer, folder: Path, execution: Execution) -> Outcome:
    """Run the harness, its output shown as it comes; the workspace is copied as the harness left it, before it is scored."""

    async def close() -> int:
        calls = await server.gateway.close(NAME)
        await asyncio.to_thread(keep_copy, launcher.workspace_of(NAME), trial.keep / "workspace")
        output.look(is_over=True)
        return len(calls)

    keys = execution.keys
    spec = ExecutionSpec(NAME, trial.task, keys.key, keys.path.removesuffix("/v1"))
    output = Output(folder / "harness.log")
    following = asyncio.create_task(output.follow())
    try:
        return await launcher.run_execution(spec, close)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class Output:
    """Prints what is added to a file, line by line."""

    def __init__(self, log: Path) -> None:
        self._log, self._seen, self._rest = log, 0, b""

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self, *, is_over: bool = False) -> None:
        """Print what is new; a last line without its end only when there is no more to come."""
        with contextlib.suppress(FileNotFoundError), open(self._log, "rb") as file:
            file.seek(self._seen)
            data = file.read()
            self._seen += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in [*lines, *([self._rest] if is_over and self._rest else [])]:
                say(line.decode(errors="replace"))


@contextlib.asynccontextmanager
async def _engine(trial: Trial) -> AsyncIterator[tuple[Serving, int]]:
    """What answers the calls, and the longest context that it takes."""
    if trial.url:
        from qwengyre.engines.completions import CompletionsEngine, choose_served, open_http

        async with open_http(trial.url) as http:
            try:
                served = await choose_served(http, trial.engine.served_as, trial.model_dir.name)
            except EngineError as error:
                raise ConfigError(str(error), key="--engine") from error
            most = served.max_model_len or trial.gateway.max_context_tokens
            yield CompletionsEngine(http, served.id, max_context_tokens=most), most
        return
    from qwengyre.cli.engine_here import open_engine

    async with open_engine(trial.model_dir, trial.engine) as engine:
        yield engine, trial.engine.max_context_tokens


def _opened(trial: Trial, max_context_tokens: int) -> Opened:
    return Opened(
        session=-1,
        execution=NAME,
        attempt=0,
        seed=0,
        temperature=trial.temperature,
        trainable=True,
        max_context_tokens=max_context_tokens,
        max_tokens_per_call=trial.gateway.max_tokens_per_call,
        model="policy",
    )
