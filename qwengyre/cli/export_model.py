"""`qwengyre export-model`: a policy of a run as a folder that transformers, vLLM and QwenGyre itself open."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from safetensors import SafetensorError

from qwengyre.cli.output import say
from qwengyre.config.recorded import RecordedConfig
from qwengyre.core.errors import ConfigError, ModelRefused
from qwengyre.engines.config import EngineConfig
from qwengyre.models.adapter_record import ADAPTER, Adapter, Base
from qwengyre.runtime.config import PolicyConfig, RuntimeConfig
from qwengyre.telemetry.folder import RunFolder
from qwengyre.trainer import checkpoint
from qwengyre.trainer.config import TrainerConfig
from qwengyre.warmup.config import WarmupConfig
from qwengyre.warmup.warm_up import warmed_up


class PolicySource(NamedTuple):
    """Where the policy of one step lies in a run folder."""

    files: Path
    """Folder of its config, tokenizer and renderer."""
    weights: Path
    is_snapshot: bool
    """Whether its weights have the names, and lie in the pieces, that they have in a trainer's memory."""


def export_model(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder; the run may be going on.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write; it must not hold anything yet.")],
    step: Annotated[
        int | None,
        typer.Option(min=0, help="The policy after this many steps, 0 for the one it began with; the newest by default."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with [trainer.lora]: the adapters alone, as PEFT reads them, not merged.")
    ] = False,
) -> None:
    """Write a policy of a run as a folder of its own: weights, config, tokenizer, and how it was spoken to (renderer.json).

    Adapters are merged into the weights that they change.

    Steps whose checkpoint is gone (runtime.keep_checkpoints) are taken from the run's snapshots, as far as those were kept.
    """
    folder = RunFolder.open(run)
    if RecordedConfig(folder.config).table("engine", EngineConfig).engine == "paced":
        raise ConfigError("the engine of this run is paced: it has no weights", file=str(folder.path))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("this already exists: name a folder that is not, or an empty one", file=str(out), key="--out")
    known = policies(folder)
    if not known:
        raise ConfigError("this run has not saved a policy yet", file=str(folder.path))
    chosen = max(known) if step is None else step
    if chosen not in known:
        raise ConfigError(
            f"there is no policy of step {chosen}: this run has {_ranges(known)}", file=str(folder.path), key="--step"
        )
    _write(folder, known[chosen], out, with_base=not adapter)
    if adapter:
        say(f"wrote the adapters after step {chosen} to {out}: PEFT opens them")
        return
    say(f"wrote the policy after step {chosen} to {out}")
    say(f"serve it with `vllm serve {shlex.quote(str(out))}`, or train on from it: policy.model = {str(out)!r}")


def policies(folder: RunFolder) -> dict[int, PolicySource]:
    """Every policy that the run still has, by its step: its checkpoint, else its snapshot."""
    found = {step: PolicySource(folder.policy, path, True) for step, path in folder.snapshot_files().items()}
    found |= {
        step: PolicySource(
            path, path / (checkpoint.ADAPTER_WEIGHTS if checkpoint.is_adapter(path) else checkpoint.WEIGHTS), False
        )
        for step, path in checkpoint.checkpoints(folder.checkpoints).items()
    }
    return dict(sorted(found.items()))


def _write(folder: RunFolder, source: PolicySource, out: Path, *, with_base: bool) -> None:
    try:
        trained = RecordedConfig(folder.config).table("trainer", TrainerConfig).lora
        if trained.rank:
            _write_adapted(folder, source, out.absolute(), Adapter(trained.rank, trained.scales_by), with_base=with_base)
            return
        if not with_base:
            raise ConfigError("this run trained whole weights: leave it out", file=str(folder.path), key="--adapter")
        weights = _as_published(folder, source.weights) if source.is_snapshot else source.weights
        checkpoint.write_model(out.absolute(), source.files, weights)
    except FileNotFoundError as error:
        raise ConfigError(
            "this is gone: a run in progress keeps only its newest checkpoints; try again", file=str(error.filename)
        ) from error
    except SafetensorError as error:
        raise ConfigError(f"these weights are damaged: {error}", file=str(source.weights)) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(out)) from error


def _write_adapted(folder: RunFolder, source: PolicySource, out: Path, adapter: Adapter, *, with_base: bool) -> None:
    """Adapters as PEFT reads them, or merged into the weights of the folder that the run began with."""
    from qwengyre.models.adapters import from_peft, merged, peft_config, to_peft  # imports torch

    found = checkpoint.read_weights(source.weights)
    adapters, base = found if source.is_snapshot else from_peft(found), _folder_of_the_base(folder)
    if not with_base:
        told = peft_config(adapter, list(adapters), str(base.absolute()))
        checkpoint.write_model(out, folder.policy, to_peft(adapters), told)
        return
    from qwengyre.models.load import snapshot_in_folder

    try:
        whole = merged(Base(base).arrays(), adapters | {ADAPTER: adapter.packed()})
        checkpoint.write_model(out, folder.policy, snapshot_in_folder(base, whole))
    except ModelRefused as error:
        raise ConfigError(str(error), file=str(source.weights)) from error


def _as_published(folder: RunFolder, snapshot: Path) -> dict[str, np.ndarray]:
    """A snapshot's weights by the names of the model's folder, with what that keeps beside them. Raises ConfigError."""
    weights = checkpoint.read_weights(snapshot)
    for like in _folders_of_the_model(folder):
        if (like / checkpoint.CONFIG).is_file() and any(like.glob("model*.safetensors")):
            from qwengyre.models.load import snapshot_in_folder  # imports torch

            try:
                return snapshot_in_folder(like, weights)
            except ModelRefused as error:
                raise ConfigError(str(error), file=str(snapshot)) from error
    raise ConfigError(
        "this snapshot has the weights as a trainer has them in memory, and nothing is left that says what they are called in a model's"
        " folder: neither a checkpoint of the run nor the folder that it began with. Put back one of them",
        file=str(snapshot),
    )


def _folders_of_the_model(folder: RunFolder) -> Iterator[Path]:
    """Whole folders of the run's model, whatever its weights: the newest checkpoints, then the one that the run began with."""
    yield from reversed(checkpoint.checkpoints(folder.checkpoints).values())
    yield _folder_of_the_base(folder)


def _folder_of_the_base(folder: RunFolder) -> Path:
    """The folder that the run began with, which may be gone."""
    config = RecordedConfig(folder.config)
    policy = config.table("policy", PolicyConfig)
    if policy.model:
        return Path(policy.model)
    return warmed_up(config.table("warmup", WarmupConfig), Path(policy.cache), config.table("runtime", RuntimeConfig).seed)


def _ranges(steps: dict[int, PolicySource]) -> str:
    """
    >>> _ranges({1: None, 2: None, 3: None, 7: None})
    '1 to 3, 7'
    """
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][1] == step - 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
