"""From a dotted path in the run file to a function that can be called: found, imported, and its signature looked at, or refused.

The folder of the run file comes first in the search path, as that of a script does. A module that is already imported from elsewhere is
never taken for the one that lies there.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError, HookFailed, QwenGyreError
from qwengyre.core.near import nearest

SOURCE: Final = "tasks.source"
"""Key of the only hook that may be a generator."""
DOTTED: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""`module:name`, the module with its packages."""


class HookRef(msgspec.Struct, frozen=True):
    """Where a hook is, for every process that needs it."""

    key: str
    """In the run file, such as `hooks.reward`."""
    path: str
    """`module:name`."""
    folder: str
    """Comes first in the search path."""
    digest: str = ""
    """SHA-256 of the module's file at the controller, "" before that is known: another process refuses another file."""


class Hook:
    """A function or class of the user's own. Calling it raises HookFailed, with file and line, for whatever goes wrong inside."""

    def __init__(self, ref: HookRef, target: Callable[..., Any], file: str, line: int | None) -> None:
        self.ref, self.target, self.file, self.line = ref, target, file, line

    def __call__(self, *given: Any) -> Any:
        try:
            return self.target(*given)
        except QwenGyreError:
            raise
        except Exception as error:  # whatever the user's code raises: told with its place
            raise self.failed(error) from error

    def failed(self, error: BaseException) -> HookFailed:
        """What `error`, which came out of it, is to the user."""
        file, line = _place_of(error.__traceback__, self.file) or (self.file, self.line)
        return HookFailed(self.ref.key, f"{self.ref.path} raised {type(error).__name__}: {error}", file=file, line=line)

    def refused(self, reason: str) -> HookFailed:
        """What it returned cannot be used."""
        return HookFailed(self.ref.key, f"{self.ref.path} {reason}", file=self.file, line=self.line)


def load_hook(ref: HookRef, signature: str) -> Hook:
    """Import it. `signature` names what it is called with, such as "(execution)".

    Raises ConfigError with the hook's key, and file and line where there are any: a path that is none, a module or a name that is not
    there (with the nearest that is), a module that fails to import, what cannot be called with these arguments, a coroutine.
    """
    if not DOTTED.fullmatch(ref.path):
        raise ConfigError(f"write a hook as module:name, such as my_rules:reward; this is {ref.path!r}", key=ref.key)
    module_name, _, name = ref.path.partition(":")
    module = _import(ref, module_name)
    file = str(getattr(module, "__file__", "") or "")
    if not hasattr(module, name):
        near = nearest(name, [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")])
        hint = f". Did you mean {module_name}:{near}?" if near else ""
        raise ConfigError(f"{module_name} has no {name}{hint}", file=file or None, key=ref.key)
    target = getattr(module, name)
    line = _line_of(target)
    _check_signature(ref, target, signature, file, line)
    digest = _digest(file)
    if ref.digest and digest != ref.digest:
        message = (
            f"{ref.path} is another file here than at the controller: copy it, or put it on a file system that all hosts share"
        )
        raise ConfigError(message, file=file, key=ref.key)
    return Hook(msgspec.structs.replace(ref, digest=digest), target, file, line)


def _import(ref: HookRef, name: str) -> ModuleType:
    _let_folder_come_first(ref, name.partition(".")[0])
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ConfigError(_not_found(ref, name), key=ref.key) from error
        raise _failed_import(ref, name, error) from error
    except (Exception, SystemExit) as error:  # a module of the user's own may raise anything
        raise _failed_import(ref, name, error) from error


def _let_folder_come_first(ref: HookRef, top: str) -> None:
    """Raises ConfigError where a module of that name in the folder would hide one that others import."""
    folder = Path(ref.folder)
    if ref.folder and (not sys.path or sys.path[0] != ref.folder):
        sys.path[:] = [ref.folder, *(entry for entry in sys.path if entry != ref.folder)]
        importlib.invalidate_caches()
    lies_there = next((path for path in (folder / f"{top}.py", folder / top / "__init__.py") if path.is_file()), None)
    taken = sys.modules.get(top)
    if not ref.folder or lies_there is None:
        return
    if top in sys.stdlib_module_names or top == "qwengyre":
        raise ConfigError(f"its module is called as Python's own {top}: rename it", file=str(lies_there), key=ref.key)
    if taken is None:
        return
    place = Path(str(getattr(taken, "__file__", "") or ""))
    if place == lies_there:
        return
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    if any(place.is_relative_to(root) for root in installed):
        raise ConfigError(
            f"the name {top} is taken by the package in {place.parent}: rename it", file=str(lies_there), key=ref.key
        )
    for known in [known for known in sys.modules if known == top or known.startswith(f"{top}.")]:
        del sys.modules[known]  # that of another run of this process


def _not_found(ref: HookRef, name: str) -> str:
    folder, top = Path(ref.folder or "."), name.partition(".")[0]
    there = sorted(path.stem for path in folder.glob("*.py")) if folder.is_dir() else []
    near = nearest(top, there)
    hint = f". Did you mean {near}:{ref.path.partition(':')[2]}?" if near else ""
    return f"there is no module {name} in {folder}, nor among what is installed{hint}"


def _failed_import(ref: HookRef, name: str, error: BaseException) -> ConfigError:
    if isinstance(error, SyntaxError) and error.filename:
        return ConfigError(f"{name} is not Python: {error.msg}", file=error.filename, line=error.lineno, key=ref.key)
    file, line = _place_of(error.__traceback__, ref.folder) or (None, None)
    return ConfigError(f"{name} cannot be imported: {type(error).__name__}: {error}", file=file, line=line, key=ref.key)


def _check_signature(ref: HookRef, target: object, signature: str, file: str, line: int | None) -> None:
    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{ref.path} {why}", file=file or None, line=line, key=ref.key)

    if not callable(target):
        raise refuse(f"is no function: it is called with {signature}")
    if inspect.iscoroutinefunction(target):
        raise refuse("is a coroutine: take `async` away, hooks run in threads of their own")
    if inspect.isgeneratorfunction(target) and ref.key != SOURCE:
        raise refuse("has a `yield`: a hook returns its value")
    arguments = [part.strip() for part in signature.strip("()").split(",") if part.strip()]
    try:
        inspect.signature(target).bind(*arguments)
    except TypeError as error:
        raise refuse(f"cannot be called with {signature}: {error}") from error
    except ValueError:
        return  # a function of C may not tell its signature


def _line_of(target: object) -> int | None:
    try:
        return inspect.getsourcelines(inspect.unwrap(target))[1]  # type: ignore[arg-type]
    except (TypeError, OSError):
        return None


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _place_of(trace: TracebackType | None, own: str) -> tuple[str, int] | None:
    """File and line of the innermost frame in the user's own files, else of the innermost that is not Python's import system or ours."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<")]
    root = str(Path(own).parent if own.endswith(".py") else own)
    theirs = [frame for frame in frames if root and Path(frame.filename).is_relative_to(root)]
    others = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    for found in (theirs, others):
        if found:
            return found[-1].filename, found[-1].lineno or 1
    return None
