"""`qwengyre gateway` and `serve`: any harness in front of any completions server, or of a model here; every token recorded, no training."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import msgspec
import typer

from qwengyre.cli.options import named_as
from qwengyre.cli.output import say, say_progress
from qwengyre.config.load import loads
from qwengyre.core.errors import ConfigError, EngineError, EngineUnavailable
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.api import Serving
from qwengyre.engines.completions import CompletionsEngine, ServedModel, choose_served, open_http
from qwengyre.engines.config import EngineConfig
from qwengyre.engines.outages import TellsOutages
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.serve import GatewayServer
from qwengyre.models.hub import folder_of
from qwengyre.telemetry.log_lines import log_to
from qwengyre.trajectory.records import Opened

SERVER = ServerId("engine")

Out = Annotated[Path, typer.Option(help="Folder for the records; `qwengyre inspect` and `export` read it.")]
Executions = Annotated[list[str] | None, typer.Option(help="Name of an execution, once for each harness that will call.")]
Port = Annotated[int, typer.Option(help="TCP port on this machine; 0 takes a free one.")]
RendererName = Annotated[str, typer.Option(help="Chat template, by its name in the `renderers` package, or auto.")]
Temperature = Annotated[float, typer.Option(min=0, help="Temperature of every call, whatever the harness asks for.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key as in a run file, such as gateway.renderer.enable_thinking=false."),
]


def gateway(
    engine: Annotated[
        str, typer.Option(help="Base URL of a completions server that knows token ids, such as http://host:8000/v1.")
    ],
    model: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.json, or its name on the hub.")],
    served_as: Annotated[str, typer.Option(help="The model's name at that server, where it serves several.")] = "",
    out: Out = Path("gateway-run"),
    execution: Executions = None,
    port: Port = 8100,
    renderer: RendererName = "auto",
    temperature: Temperature = 1.0,
    max_context_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt and answer together.")] = 32768,
    overrides: Overrides = None,
    api_key: Annotated[str, typer.Option(envvar="QWENGYRE_ENGINE_KEY", help="Key of the completions server.")] = "none",
) -> None:
    """Serve an engine to any harness and record every token, without training.

    Prints a base URL and a key for each execution. Stop it with Ctrl-C; started again with the same folder, it continues.
    """
    if not engine.startswith(("http://", "https://")):
        raise ConfigError(f"{engine!r} is not a URL: expected http:// or https://", key="--engine")
    settings = read_settings(overrides, renderer, max_context_tokens)
    target = Target(url=engine.rstrip("/") + "/", key=api_key, served_as=served_as)
    config = process_config(folder_of(model, say_progress), out, port, settings.gateway)
    run_alone(config, lambda: completions_engine(config, target), execution or ["main"], temperature)


def serve(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of a model, such as a checkpoint of a run, or a name on the hub.")
    ],
    out: Out = Path("gateway-run"),
    execution: Executions = None,
    port: Port = 8100,
    renderer: RendererName = "auto",
    temperature: Temperature = 1.0,
    max_context_tokens: Annotated[int, typer.Option(min=2, help="Longest prompt and answer together.")] = 4096,
    overrides: Overrides = None,
) -> None:
    """Serve a model on this machine's processor to any harness and record every token, without training.

    As `gateway`, with the embedded engine in place of a server. Prints a base URL and a key for each execution.
    """
    from qwengyre.cli.engine_here import open_engine  # torch, which no other server needs

    settings = read_settings(overrides, renderer, max_context_tokens)
    if settings.engine.engine != "embedded":
        raise ConfigError("`serve` has the embedded engine only: put `qwengyre gateway` before another", key="engine.engine")
    model = folder_of(model, say_progress)
    config = process_config(model, out, port, settings.gateway)

    @contextlib.asynccontextmanager
    async def engine() -> AsyncIterator[Served]:
        async with open_engine(model, settings.engine) as opened:
            yield Served(opened, model.name or "policy", settings.engine.max_context_tokens)

    run_alone(config, engine, execution or ["main"], temperature)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The tables of a run file that count without a run."""

    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()


def read_settings(overrides: list[str] | None, renderer: str, max_context_tokens: int) -> Settings:
    """`--set gateway.renderer.enable_thinking=false` and the like, above what the options say. Raises ConfigError."""
    block_size = EngineConfig().block_size
    options = {
        "gateway.renderer.name": f'"{renderer}"',
        "gateway.max_context_tokens": max_context_tokens,
        "gateway.max_tokens_per_call": max_context_tokens,
        "engine.max_context_tokens": max(2, max_context_tokens),
        "engine.kv_blocks": max(EngineConfig().kv_blocks, max_context_tokens // block_size + 2),
    }
    settings = loads("", Settings, [*(f"{key}={value}" for key, value in options.items()), *(overrides or [])])
    check_stands_alone(settings.gateway)
    return settings


def check_stands_alone(gateway: GatewayConfig) -> None:
    """Raises ConfigError for what only the gateways of a run have."""
    if gateway.processes > 1:
        raise ConfigError(
            "only a run has several gateways: start this command once for each, with --port and --out",
            key="gateway.processes",
        )
    if gateway.port:
        raise ConfigError("this is for runs: a gateway that stands alone has --port", key="gateway.port")


def process_config(model: Path, out: Path, port: int, gateway: GatewayConfig) -> GatewayProcessConfig:
    """Raises ConfigError for a folder that is missing, or has no tokenizer."""
    if not model.is_dir():
        wrong = "this is a file: name the folder of a model" if model.exists() else "there is no such folder: name a model's"
        raise ConfigError(wrong, file=str(model))
    if not (model / "tokenizer.json").is_file():
        raise ConfigError("there is no tokenizer.json in this folder: name a model's", file=str(model))
    return GatewayProcessConfig(
        model=str(model),
        journal=str(out / "gateway.log"),
        secret_file=str(out / "secret"),
        control_socket=str(out / "control.sock"),
        port=port,
        gateway=gateway,
    )


class Target(msgspec.Struct, frozen=True):
    """The completions server."""

    url: str
    key: str
    served_as: str = ""


class Served(NamedTuple):
    """An engine, and what it serves."""

    engine: Serving
    model: str
    max_context_tokens: int


OpenEngine = Callable[[], AbstractAsyncContextManager[Served]]


@contextlib.asynccontextmanager
async def completions_engine(config: GatewayProcessConfig, target: Target) -> AsyncIterator[Served]:
    """The server's, once it has been asked what it serves."""
    async with open_http(target.url, target.key) as http:
        served = await _served(http, target, config)
        most = min(config.gateway.max_context_tokens, served.max_model_len or config.gateway.max_context_tokens)
        yield Served(CompletionsEngine(http, served.id, max_context_tokens=most), served.id, most)


def run_alone(config: GatewayProcessConfig, open_engine: OpenEngine, names: list[str], temperature: float) -> None:
    """Open the executions, route them to the one engine, and serve until a signal."""
    log_to(None, logging.WARNING)
    with named_as("--renderer", "gateway.renderer"):
        asyncio.run(_serve_alone(config, open_engine, names, temperature))


async def _serve_alone(config: GatewayProcessConfig, open_engine: OpenEngine, names: list[str], temperature: float) -> None:
    server = GatewayServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    async with open_engine() as served, server:
        engine = TellsOutages(served.engine, functools.partial(say, err=True), config.gateway.max_hold_s)
        await server.gateway.set_server(SERVER, engine)
        most = min(config.gateway.max_context_tokens, served.max_context_tokens)
        for name in names:
            execution = await server.gateway.open(_opened(name, temperature, config, served, most))
            execution.route.set(SERVER)
            assert server.listening is not None
            base = config.gateway.url(0, server.listening.port) + execution.keys.path
            anthropic = base.removesuffix("/v1")
            say(
                f"{name}: OPENAI_BASE_URL={base} ANTHROPIC_BASE_URL={anthropic} GOOGLE_GEMINI_BASE_URL={anthropic} API_KEY={execution.keys.key}"
            )
        await server.stop.wait()
    say(f"records: {config.journal}")


async def _served(http: httpx.AsyncClient, target: Target, config: GatewayProcessConfig) -> ServedModel:
    """The model to ask for: the one named, else the one that the server has. Raises ConfigError when it does not have it."""
    default = Path(config.model).name
    try:
        return await choose_served(http, target.served_as, default)
    except EngineUnavailable as error:
        wanted = target.served_as or default
        say(f"{error}: calls are held until {wanted!r} is served there", err=True)
        return ServedModel(wanted)
    except EngineError as error:
        raise ConfigError(str(error), key="--served-as" if target.served_as else "--engine") from error


def _opened(name: str, temperature: float, config: GatewayProcessConfig, served: Served, max_context_tokens: int) -> Opened:
    return Opened(
        session=-1,
        execution=ExecutionId(name),
        attempt=0,
        seed=0,
        temperature=temperature,
        trainable=True,
        max_context_tokens=max_context_tokens,
        max_tokens_per_call=min(config.gateway.max_tokens_per_call, max_context_tokens),
        model=served.model,
    )
