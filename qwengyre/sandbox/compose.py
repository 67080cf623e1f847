"""`environment/docker-compose.yaml` of a task of one container: what of it an image is run by, and what cannot be given here."""

from __future__ import annotations

from typing import Final

import yaml

from qwengyre.core.errors import ConfigError

HONORED: Final = frozenset({"build", "image", "environment", "working_dir", "user"})
NEEDLESS: Final = frozenset(
    [
        "command",
        "tty",
        "stdin_open",
        "init",
        "container_name",
        "hostname",
        "restart",
        "stop_grace_period",
        "stop_signal",
        "platform",
        "pull_policy",
        "labels",
        "logging",
        "mem_limit",
        "cpus",
        "cpu_count",
        "memswap_limit",
        "shm_size",
        "pids_limit",
        "deploy",
        "ulimits",
        "network_mode",
        "networks",
        "expose",
        "security_opt",
    ]
)
"""What keeps a container of Docker alive, names or limits it. A sandbox lives as long as its harness; `[harness.limits]` bounds it."""
OF_TERMINAL_BENCH: Final = ("T_BENCH_", "CONTEXT_DIR", "HOST_VERIFIER_LOGS_PATH", "HOST_AGENT_LOGS_PATH", "ENV_")
"""Variables in a mount that its runner, or Harbor's, sets for its own log folders."""
Wanted = dict[str, object]


def read_compose(text: str) -> Wanted:
    """`image`, or `context` and `dockerfile`; `env`, `workdir`, `user`. Raises ConfigError (without a file) for what has no meaning here."""
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from None
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or not services:
        raise ConfigError("names no services")
    if len(services) > 1:
        raise ConfigError("tasks of several containers cannot run in this sandbox", key="services")
    ((name, service),) = services.items()
    if not isinstance(service, dict):
        raise ConfigError("must be a table", key=f"services.{name}")
    where = f"services.{name}"
    _refuse_others(service, where)
    found: Wanted = {"env": _variables(service.get("environment"), f"{where}.environment")}
    for key, ours in (("working_dir", "workdir"), ("user", "user")):
        if key in service:
            found[ours] = _plain(service[key], f"{where}.{key}")
    if "build" in service:
        return found | _build(service["build"], f"{where}.build")
    if "image" not in service:
        raise ConfigError("names neither an image nor what to build", key=where)
    return found | {"image": _plain(service["image"], f"{where}.image")}


def _refuse_others(service: Wanted, where: str) -> None:
    for key, value in service.items():
        if key in HONORED or key in NEEDLESS or not value:
            continue
        if key == "volumes" and isinstance(value, list) and all(_is_of_runner(volume) for volume in value):
            continue
        raise ConfigError("cannot be given to a sandbox: leave it out, or make it part of the image", key=f"{where}.{key}")


def _is_of_runner(volume: object) -> bool:
    source = str(volume.get("source", "") if isinstance(volume, dict) else volume)
    return source.startswith("${") and source[2:].startswith(OF_TERMINAL_BENCH)


def _build(build: object, where: str) -> Wanted:
    if isinstance(build, str):
        build = {"context": build}
    if not isinstance(build, dict):
        raise ConfigError("must be a folder or a table", key=where)
    for key in build.keys() - {"context", "dockerfile"}:
        raise ConfigError("is not known here: context and dockerfile are", key=f"{where}.{key}")
    context = str(build.get("context", "."))
    if context.startswith("${") and context.strip("${}") in ("CONTEXT_DIR",):
        context = "."
    if _plain(context, f"{where}.context").rstrip("/") not in (".", ""):
        raise ConfigError("only the task's own environment/ is built: write `.`", key=f"{where}.context")
    return {"dockerfile": _plain(build.get("dockerfile", "Dockerfile"), f"{where}.dockerfile")}


def _variables(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, list):
        value = dict(str(line).partition("=")[::2] for line in value)
    if not isinstance(value, dict):
        raise ConfigError("must be a table or a list of variables", key=where)
    variables = {str(name): "" if text is None else str(text) for name, text in value.items()}
    return {name: _plain(text, f"{where}.{name}") for name, text in variables.items() if not _is_of_runner(text)}


def _plain(value: object, where: str) -> str:
    text = str(value)
    if "${" in text or "\0" in text:
        raise ConfigError(f"{text!r} quotes the environment of this machine, which no sandbox is given", key=where)
    return text
