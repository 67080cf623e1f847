"""The hooks of one run, loaded: for the controller, and for whoever checks a run file."""

from __future__ import annotations

from typing import Final, NamedTuple

from qwengyre.core.errors import ConfigError
from qwengyre.hooks.callbacks import load_callbacks
from qwengyre.hooks.config import HooksConfig
from qwengyre.hooks.load import SOURCE, Hook, HookRef, load_hook

SIGNATURES: Final = {
    "reward": "(execution)",
    "group_filter": "(group)",
    "advantage": "(group)",
    "choice": "(paths)",
    "token_loss": "(batch, config)",
}
"""Key of a hook -> what it is called with."""


class LoadedHooks(NamedTuple):
    reward: Hook | None = None
    group_filter: Hook | None = None
    advantage: Hook | None = None
    choice: Hook | None = None
    token_loss: Hook | None = None
    """Called by cells and their ranks, which load it for themselves."""
    callbacks: tuple[Hook, ...] = ()
    source: Hook | None = None
    """`tasks.source`."""

    @property
    def judges_groups(self) -> bool:
        return any(hook is not None for hook in (self.group_filter, self.advantage, self.choice))


NO_HOOKS: Final = LoadedHooks()


def load_hooks(config: HooksConfig, source: str = "") -> LoadedHooks:
    """Import all that the run file names; `source` is `tasks.source`. Raises ConfigError with all that is wrong."""
    mistakes: list[ConfigError] = []
    found: dict[str, Hook] = {}
    for key, signature in SIGNATURES.items():
        if path := getattr(config, key):
            try:
                found[key] = load_hook(HookRef(f"hooks.{key}", path, config.folder), signature)
            except ConfigError as error:
                mistakes.append(error)
    callbacks: list[Hook] = []
    for path in config.callbacks:
        try:
            callbacks.append(load_callbacks(path, config.folder))
        except ConfigError as error:
            mistakes.append(error)
    sourced = None
    try:
        sourced = load_hook(HookRef(SOURCE, source, config.folder), "(progress)") if source else None
    except ConfigError as error:
        mistakes.append(error)
    if mistakes:
        raise ConfigError.of_all(mistakes)
    return LoadedHooks(**found, callbacks=tuple(callbacks), source=sourced)
