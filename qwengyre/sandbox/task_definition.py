"""What a task's folder says of the image that it is to run on."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.images.wanted import WantedImage
from qwengyre.sandbox.compose import read_compose
from qwengyre.sandbox.task_files import MAX_TEXT_BYTES, Problems, Unreadable, read_file


def read_wanted_image(folder: Path, settings: dict[str, object], problems: Problems) -> WantedImage | None:
    """What the task in `folder` is to run on, by `[environment] docker_image`, else a compose file, else a Dockerfile."""
    environment = folder / "environment"
    base = WantedImage(
        workdir=str(settings.get("workdir") or ""),
        user=str(settings.get("user") if settings.get("user") is not None else ""),
        build_timeout_s=float(str(seconds)) if (seconds := settings.get("build_timeout_sec")) else None,
    )
    is_folder = environment.is_dir() and not environment.is_symlink()  # else another check names it
    compose = _read_compose(environment, problems) if is_folder else None
    changes: dict[str, object] = {}
    for name in ("workdir", "user"):
        if compose and compose.get(name) and not getattr(base, name):
            changes[name] = compose[name]
    if compose and isinstance(variables := compose.get("env"), dict):
        changes["env"] = tuple(sorted(variables.items()))
    if reference := str(settings.get("docker_image") or (compose or {}).get("image") or ""):
        where = folder / "task.toml" if settings.get("docker_image") else environment
        changes |= {"reference": reference, "where": str(where)}
    else:
        dockerfile = str((compose or {}).get("dockerfile", "Dockerfile"))
        if not is_folder or not _is_readable(environment / dockerfile, problems, is_wanted=compose is not None):
            return None
        changes |= {"context": str(environment), "dockerfile": dockerfile, "where": str(environment / dockerfile)}
    if os.path.lexists(environment / "Dockerfile") and reference:
        changes["context"] = str(environment)  # the Dockerfile's, not the workspace's
    return msgspec.structs.replace(base, **changes)


def _read_compose(environment: Path, problems: Problems) -> dict[str, object] | None:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        path = environment / name
        if not os.path.lexists(path):
            continue
        try:
            return read_compose(read_file(path, MAX_TEXT_BYTES).decode())
        except (Unreadable, UnicodeDecodeError) as error:
            problems.error(path, str(error))
        except ConfigError as error:
            problems.error(path, f"{error.key}: {error.message}" if error.key else error.message)
    return None


def _is_readable(path: Path, problems: Problems, *, is_wanted: bool) -> bool:
    try:
        read_file(path, MAX_TEXT_BYTES)
    except FileNotFoundError:
        if is_wanted:
            problems.error(path, "missing: docker-compose.yaml builds it")
        return False
    except Unreadable as error:
        problems.error(path, str(error))
        return False
    return True
