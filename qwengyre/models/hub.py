"""Models by their name on the Hugging Face hub, such as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@REVISION`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from qwengyre.core.errors import ConfigError
from qwengyre.core.near import nearest

NAME: Final = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Of a model's repository: no pickled weights, no weights of other frameworks, no code."""
LEFT_OUT: Final = ("original/*", "onnx/*", "metal/*")
"""The same weights again, in layouts that transformers does not read."""


def is_hub_name(model: str, here: Path) -> bool:
    """Whether `model` names a repository of the hub. A folder of that name goes first.

    >>> is_hub_name("Qwen/Qwen3-0.6B@main", Path("/")), is_hub_name("./models/mine", Path("/")), is_hub_name("/models/mine", Path("/"))
    (True, False, False)
    """
    return NAME.fullmatch(model) is not None and not (here / model).exists()


def refuse_folder_name(name: str, here: Path) -> None:
    """Raises ConfigError for a name of the hub that is rather a folder's, misspelt: its first part, or one much like it, is a folder here.

    With a revision it is the hub's for certain.
    """
    found = NAME.fullmatch(name)
    owner, _, rest = name.partition("/")
    if found is None or found["revision"]:
        return
    folders = {folder.name: folder for folder in here.iterdir() if folder.is_dir()}
    near = owner if owner in folders else nearest(owner, [one for one, folder in folders.items() if (folder / rest).is_dir()])
    if near is None:
        return
    inside = [one.name for one in folders[near].iterdir() if one.is_dir()]
    like = rest if near != owner else nearest(rest, inside)
    hint = f"did you mean {near}/{like}?" if like else f"{near} is a folder here, without it."
    raise _refused(name, f"there is no such folder. {hint} A model of the hub with this name is {name}@main")


def fetch(name: str, say: Callable[[str], None]) -> Path:
    """The folder of a model of the hub, fetched into the hub's own cache unless it is there; its name is the revision's.

    HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and the like count. Raises ConfigError.
    """
    refuse_folder_name(name, Path.cwd())
    known = cached(name)
    if known is None:
        say(f"{name}: fetching from the hub")
    folder = _snapshot(name, is_local=False)
    if folder != known:
        say(f"{name}: revision {folder.name}, in {folder}")
    return folder


def folder_of(model: Path, say: Callable[[str], None]) -> Path:
    """Of a command's argument: a folder as it is, a name of the hub fetched. Raises ConfigError."""
    return fetch(str(model), say) if is_hub_name(str(model), Path.cwd()) else model


def cached(name: str) -> Path | None:
    """The folder, if all of the model was fetched before. Asks no network."""
    try:
        return _snapshot(name, is_local=True)
    except ConfigError:
        return None


def _snapshot(name: str, *, is_local: bool) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    found = NAME.fullmatch(name)
    assert found is not None, f"{name} is not a name of the hub"
    repository, revision = found["repository"], found["revision"]
    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(LEFT_OUT), local_files_only=is_local
        )
    except GatedRepoError as error:
        raise _refused(
            name, f"the hub gives it to those only who accepted its terms: do so on its page, and set HF_TOKEN ({error})"
        ) from error
    except RepositoryNotFoundError as error:
        raise _refused(
            name, "there is no such folder here, and no such model on the hub (a private one needs HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise _refused(name, f"the hub has no revision {revision!r} of it") from error
    except LocalEntryNotFoundError as error:
        raise _refused(
            name, "there is no such folder here, and the hub cannot be reached for it: download it elsewhere and name its folder"
        ) from error
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise _refused(name, f"the hub did not give it: {error}") from error
    return Path(folder)


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{name}: {reason}", key="policy.model")
