"""`qwengyre gateway`: any harness in front of any completions server, every token recorded, no training."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated

import httpx
import typer

from qwengyre.core.errors import ConfigError
from qwengyre.core.ids import ExecutionId, ServerId
from qwengyre.gateway.completions_engine import CompletionsEngine
from qwengyre.gateway.config import GatewayConfig, GatewayProcessConfig
from qwengyre.gateway.records import Opened
from qwengyre.gateway.serve import GatewayServer

SERVER = ServerId("engine")
PATIENT_S = 3600.0


def gateway(
    engine: Annotated[
        str, typer.Option(help="Base URL of a completions server that knows token ids, such as http://host:8000/v1.")
    ],
    model: Annotated[Path, typer.Option(help="Folder with the model's tokenizer.json.")],
    served_as: Annotated[str, typer.Option(help="The model's name at that server.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the records; `qwengyre inspect` and `export` read it.")] = Path(
        "gateway-run"
    ),
    execution: Annotated[
        list[str] | None, typer.Option(help="Name of an execution, once for each harness that will call.")
    ] = None,
    port: Annotated[int, typer.Option(help="TCP port on this machine; 0 takes a free one.")] = 8100,
    renderer: Annotated[str, typer.Option(help="Chat template, by its name in the `renderers` package, or auto.")] = "auto",
    temperature: Annotated[float, typer.Option(help="Temperature of every call, whatever the harness asks for.")] = 1.0,
    max_context_tokens: Annotated[int, typer.Option(help="Longest prompt and answer together.")] = 32768,
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
        gateway=GatewayConfig(renderer={"name": renderer}, max_context_tokens=max_context_tokens),
    )
    if not engine.startswith(("http://", "https://")):
        raise ConfigError(f"{engine!r} is no URL: it begins with http:// or https://", key="--engine")
    http = httpx.AsyncClient(
        base_url=engine.rstrip("/") + "/",
        headers={"authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(PATIENT_S, connect=10.0),
        limits=httpx.Limits(max_connections=None),
    )
    client = CompletionsEngine(http, served_as or model.name, max_context_tokens=max_context_tokens)
    names = execution or ["main"]
    asyncio.run(serve_alone(config, client, names, temperature))


async def serve_alone(config: GatewayProcessConfig, engine: CompletionsEngine, names: list[str], temperature: float) -> None:
    """Open the executions, route them to the one engine, and serve until a signal."""
    server = GatewayServer(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop.set)
    async with server:
        await server.gateway.set_server(SERVER, engine)
        for name in names:
            execution = await server.gateway.open(_opened(name, temperature, config))
            execution.route.set(SERVER)
            base = f"http://{config.host}:{server.listening.port}{execution.keys.path}"
            typer.echo(
                f"{name}: OPENAI_BASE_URL={base} ANTHROPIC_BASE_URL={base.removesuffix('/v1')} API_KEY={execution.keys.key}"
            )
        await server.stop.wait()
    await engine.close()
    typer.echo(f"records: {config.journal}")


def _opened(name: str, temperature: float, config: GatewayProcessConfig) -> Opened:
    return Opened(
        session=-1,
        execution=ExecutionId(name),
        attempt=0,
        seed=0,
        temperature=temperature,
        trainable=True,
        max_context_tokens=config.gateway.max_context_tokens,
        max_tokens_per_call=config.gateway.max_context_tokens,
        model=Path(config.model).name,
    )
