"""`qwengyre gateway`: any harness in front of any completions server, every token recorded, no training."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer

from qwengyre.cli.options import named_as
from qwengyre.cli.output import say
from qwengyre.core.errors import ConfigError, EngineError, EngineUnavailable
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.engines.completions import CompletionsEngine, ServedModel, choose_served, open_http
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.records import Opened
from qwengyre.gateway.serve import GatewayServer

SERVER = ServerId("engine")


def gateway(
    engine: Annotated[
        str, typer.Option(help="Base URL of a completions server that knows token ids, such as http://host:8000/v1.")
    ],
    model: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.json.")],
    served_as: Annotated[str, typer.Option(help="The model's name at that server, where it serves several.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the records; `qwengyre inspect` and `export` read it.")] = Path(
        "gateway-run"
    ),
    execution: Annotated[
        list[str] | None, typer.Option(help="Name of an execution, once for each harness that will call.")
    ] = None,
    port: Annotated[int, typer.Option(help="TCP port on this machine; 0 takes a free one.")] = 8100,
    renderer: Annotated[str, typer.Option(help="Chat template, by its name in the `renderers` package, or auto.")] = "auto",
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of every call, whatever the harness asks for.")] = 1.0,
    max_context_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt and answer together.")] = 32768,
    api_key: Annotated[str, typer.Option(envvar="QWENGYRE_ENGINE_KEY", help="Key of the completions server.")] = "none",
) -> None:
    """Serve an engine to any harness and record every token, without training.

    Prints a base URL and a key for each execution. Stop it with Ctrl-C; started again with the same folder it goes on.
    """
    logging.basicConfig(level=logging.WARNING)
    config = GatewayProcessConfig(
        model=str(model),
        journal=str(out / "gateway.log"),
        secret_file=str(out / "secret"),
        control_socket=str(out / "control.sock"),
        port=port,
        gateway=GatewayConfig(
            renderer={"name": renderer}, max_context_tokens=max_context_tokens, max_tokens_per_call=max_context_tokens
        ),
    )
    if not (model / "tokenizer.json").is_file():
        raise ConfigError("there is no tokenizer.json in this folder", file=str(model), key="--model")
    if not engine.startswith(("http://", "https://")):
        raise ConfigError(f"{engine!r} is no URL: it begins with http:// or https://", key="--engine")
    target = Target(url=engine.rstrip("/") + "/", key=api_key, served_as=served_as)
    with named_as("--renderer", "gateway.renderer"):
        asyncio.run(serve_alone(config, target, execution or ["main"], temperature))


class Target(msgspec.Struct, frozen=True):
    """The completions server."""

    url: str
    key: str
    served_as: str = ""


async def serve_alone(config: GatewayProcessConfig, target: Target, names: list[str], temperature: float) -> None:
    """Open the executions, route them to the one engine, and serve until a signal."""
    server = GatewayServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    async with open_http(target.url, target.key) as http:
        served = await _served(http, target, config)
        max_context_tokens = min(config.gateway.max_context_tokens, served.max_model_len or config.gateway.max_context_tokens)
        engine = CompletionsEngine(http, served.id, max_context_tokens=max_context_tokens)
        async with server:
            await server.gateway.set_server(SERVER, engine)
            for name in names:
                execution = await server.gateway.open(_opened(name, temperature, max_context_tokens, served.id))
                execution.route.set(SERVER)
                base = f"http://{config.host}:{server.listening.port}{execution.keys.path}"
                anthropic = base.removesuffix("/v1")
                say(f"{name}: OPENAI_BASE_URL={base} ANTHROPIC_BASE_URL={anthropic} API_KEY={execution.keys.key}")
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


def _opened(name: str, temperature: float, max_context_tokens: int, model: str) -> Opened:
    return Opened(
        session=-1,
        execution=ExecutionId(name),
        attempt=0,
        seed=0,
        temperature=temperature,
        trainable=True,
        max_context_tokens=max_context_tokens,
        max_tokens_per_call=max_context_tokens,
        model=model,
    )
