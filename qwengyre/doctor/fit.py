"""Whether a run fits where it is to run, how long its moves take and how fast it may be, before anything is started.

Sizes come from the model's config, built without memory; what a training pass takes at its height comes from the real code over it
(`trainer/footprint.py`). Speeds are the ones given: nothing here measures a device.

`P` parameters, `R` ranks of a cell.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from qwengyre.core.errors import ConfigError
from qwengyre.doctor.finding import Finding
from qwengyre.engines.config import EngineConfig
from qwengyre.trainer.config import TrainerConfig

BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PUBLISHED_BYTES: Final = 4
"""A parameter in a published snapshot: float32, whatever it is trained in."""
KEPT_SNAPSHOTS: Final = 2
"""Published ones that stay readable."""
FLOPS_PER_TRAINED_TOKEN: Final = 6
"""For each parameter that a token meets: a multiplication and an addition forward, twice that backward (arXiv 2001.08361, section 2.1)."""

Role = Literal["engine", "satellite", "core"]


class Speeds(msgspec.Struct, frozen=True):
    """Of one device and of what joins it to others; 0: not known."""

    tflops: float = 0.0
    """Peak, in the dtype that is trained in."""
    utilization: float = 0.4
    """Share of it that training reaches."""
    memory_gb_s: float = 0.0
    link_gb_s: float = 0.0
    """Between the core and the reader of a snapshot."""
    step_tokens: float = 0.0
    """Distinct tokens that one step trains, as its micro-steps count them: a plan wants to know."""


class ModelSizes(msgspec.Struct, frozen=True):
    name: str
    parameters: int
    met: int
    """Parameters that one token meets: of the experts only those that are chosen for it."""
    largest_layer: int
    """Parameters."""
    outside_layers: int
    """Embeddings, head, last norm: gathered as long as a pass lasts."""
    kv_numbers: int
    """Numbers that one token leaves in the keys and values of all layers of attention."""


class MemoryPart(msgspec.Struct, frozen=True):
    """Memory that one rank of a cell needs for one thing."""

    role: Role
    what: str
    place: Literal["device", "host"]
    num_bytes: float


class Fit(msgspec.Struct, frozen=True):
    sizes: ModelSizes
    parts: tuple[MemoryPart, ...]
    findings: tuple[Finding, ...]

    def total(self, role: Role, place: str = "device") -> float:
        return sum(part.num_bytes for part in self.parts if (part.role, part.place) == (role, place))


class PassSizes(msgspec.Struct, frozen=True):
    """Bytes of a training pass at its height, above weights and sums."""

    fixed: float
    per_row: float
    kept_per_row: float

    def peak(self, config: TrainerConfig, rows: int) -> float:
        is_cut = rows > config.chunk_tokens
        return self.fixed + self.per_row * min(rows, config.chunk_tokens) + (self.kept_per_row * rows if is_cut else 0.0)


def measure_model(model_dir: Path, trainer: TrainerConfig) -> tuple[ModelSizes, PassSizes]:
    """From the folder's config alone. Raises ConfigError for one that cannot be built without its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from qwengyre.models.load import read_config
    from qwengyre.models.shrink import small_model
    from qwengyre.trainer.footprint import on_meta, pass_bytes
    from qwengyre.trainer.norms import replace_norms

    file, config = str(Path(model_dir) / "config.json"), read_config(model_dir)
    small = small_model(config)
    if small is None:
        raise ConfigError(
            "a model of this family cannot be made small, so that its passes cannot be tried without weights", file=file
        )
    replace_norms(small)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, trainer.dtype))
    replace_norms(model, like=small)
    tree_model = on_meta(model, small, trainer)
    try:
        found = pass_bytes(tree_model)
    except NotImplementedError as error:
        raise ConfigError(f"what a training pass of it takes depends on its numbers: {error}", file=file) from error
    counts = [sum(p.numel() for p in layer.parameters()) for layer in tree_model.layers]
    total, text = sum(p.numel() for p in model.parameters()), config.get_text_config()
    sizes = ModelSizes(
        name=type(model).__name__,
        parameters=total,
        met=total - _experts_left_out(model, text),
        largest_layer=max(counts, default=0),
        outside_layers=total - sum(counts),
        kv_numbers=_kv_numbers(text),
    )
    return sizes, PassSizes(*found)


def room_here(meminfo: Path = Path("/proc/meminfo")) -> float:
    """Bytes of this process's CUDA device, or that are free in this machine's memory. Raises ConfigError when neither can be told."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if found is None:
        raise ConfigError(f"{meminfo} does not say how much memory is free: give it", key="--device-gb")
    return int(found[1]) * 1024.0


def _experts_left_out(model: Any, text: Any) -> int:
    """Parameters of the experts that a token does not meet."""
    num = next((n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(text, key, 0))), 0)
    chosen = next((n for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk") if (n := getattr(text, key, 0))), 0)
    if not num or not chosen:
        return 0
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return int(held * (1 - chosen / num) + 0.5)


def _kv_numbers(text: Any) -> int:
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_layers = sum(1 for kind in kinds if "attention" in kind and kind != "linear_attention")
    return int(2 * heads * width) * num_layers


def parts_of(sizes: ModelSizes, passes: PassSizes, trainer: TrainerConfig, engine: EngineConfig) -> list[MemoryPart]:
    """What every role of a cell needs, on each of its ranks; the engine lives in the first of them."""
    weight, total = BYTES[trainer.dtype], 4 if trainer.dtype == "bfloat16" else BYTES[trainer.dtype]
    share, rows = sizes.parameters / trainer.ranks, trainer.max_row_tokens
    needed: list[tuple[str, Literal["device", "host"], float]] = [
        ("weights", "device", share * weight),
        ("sums of gradients", "device", share * total),
        ("a pass at its height", "device", passes.peak(trainer, rows)),
    ]
    if trainer.ranks > 1:
        gathered = (2 * sizes.largest_layer + sizes.outside_layers) * (weight + weight)
        needed.append(("layers gathered, with gradients", "device", gathered))
    of_core: list[tuple[str, Literal["device", "host"], float]] = [
        ("moments", trainer.optimizer_device, 2 * share * total),
        ("snapshot of the step", "host", share * weight),
        ("published snapshots", "host", KEPT_SNAPSHOTS * PUBLISHED_BYTES * sizes.parameters),
    ]
    if weight != total or trainer.optimizer_device == "host":
        of_core.append(("weights that are updated", trainer.optimizer_device, share * total))
    kv_tokens, wide = engine.kv_blocks * engine.block_size, BYTES[engine.dtype]
    return [
        MemoryPart("engine", "weights", "device", sizes.parameters * wide),
        MemoryPart("engine", "keys and values", "device", sizes.kv_numbers * kv_tokens * wide),
        *(MemoryPart("satellite", *line) for line in needed),
        *(MemoryPart("core", *line) for line in (*needed, *of_core)),
    ]


def fit(model: tuple[ModelSizes, PassSizes], trainer: TrainerConfig, engine: EngineConfig, room: tuple[float, Speeds]) -> Fit:
    """`room`: bytes of one device, and its speeds. Every finding that says `missing` says what to change."""
    (sizes, passes), (capacity, speeds) = model, room
    made = Fit(sizes, tuple(parts_of(sizes, passes, trainer, engine)), ())
    findings = [_fits(made, role, capacity, trainer) for role in ("engine", "satellite", "core")]
    findings += [*_moves(sizes, trainer, speeds), *_rates(sizes, engine, speeds, trainer)]
    findings.append(_plan(plan_keys(sizes, trainer, engine, speeds)))
    if trainer.lora.rank:
        told = "counted as whole training: gradients, moments and what crosses a link take less with adapters"
        findings.append(Finding("adapters", "note", told))
    return msgspec.structs.replace(made, findings=tuple(findings))


def _fits(made: Fit, role: Role, capacity: float, trainer: TrainerConfig) -> Finding:
    total = made.total(role)
    listed = ", ".join(f"{p.what} {_gb(p.num_bytes)}" for p in made.parts if p.role == role and p.place == "device")
    found = f"{_gb(total)} of {_gb(capacity)} on each device: {listed}"
    return Finding(f"memory, {role}", "ok" if total <= capacity else "missing", found, _advice(made, role, capacity, trainer))


def _advice(made: Fit, role: Role, capacity: float, trainer: TrainerConfig) -> str:
    total, by = made.total(role), {p.what: p.num_bytes for p in made.parts if p.role == role and p.place == "device"}
    if total <= capacity:
        return ""
    if role == "engine":
        if by["weights"] >= capacity:
            return "the weights alone do not fit: take more devices for the engine, or engine.dtype of fewer bytes"
        share = (capacity - by["weights"]) / by["keys and values"]
        return f"lower engine.kv_blocks to at most {share:.0%} of what it is"
    steps, height = [], by["a pass at its height"]
    if trainer.optimizer_device == "device" and role == "core":
        steps.append('trainer.optimizer_device = "host"')
    if trainer.dtype != "bfloat16" and trainer.ranks == 1:
        steps.append('trainer.dtype = "bfloat16"')
    if height > capacity / 4:
        steps.append(f"trainer.chunk_tokens below {trainer.chunk_tokens}, or trainer.head_logits below {trainer.head_logits}")
    sharded = (total - height - by.get("layers gathered, with gradients", 0.0)) * trainer.ranks
    gathered = (2 * made.sizes.largest_layer + made.sizes.outside_layers) * 2 * BYTES[trainer.dtype]
    if (left := capacity - height - gathered) > 0:
        steps.append(f"trainer.ranks = {-int(-sharded // left)}, a device for each")
    return "one or more of: " + "; ".join(steps) if steps else "no setting makes it fit: it needs larger devices"


def _moves(sizes: ModelSizes, trainer: TrainerConfig, speeds: Speeds) -> list[Finding]:
    """What crosses a link when a cell changes its role."""
    joins, serves = sizes.parameters * BYTES[trainer.dtype], sizes.parameters * PUBLISHED_BYTES
    found = []
    for what, num_bytes, ranks in (("to training", joins, trainer.ranks), ("to rollout", serves, 1)):
        rate = speeds.link_gb_s * 1e9 * ranks
        took = f", {num_bytes / rate:.2f} s at {speeds.link_gb_s:g} GB/s a rank" if rate else ""
        todo = "" if rate else "give --link-gb-s, as `qwengyre doctor` or `qwengyre bench weights` measures it, to hear how long"
        found.append(Finding(f"switch {what}", "ok" if rate else "note", f"a cell reads {_gb(num_bytes)}{took}", todo))
    return found


def plan_keys(sizes: ModelSizes, trainer: TrainerConfig, engine: EngineConfig, speeds: Speeds) -> dict[str, float]:
    """What a workload of `qwengyre plan` (`sim/workload.py`) says otherwise for this run, as far as the speeds tell; a device is a node."""
    keys: dict[str, float] = {"cell_nodes": trainer.ranks, "slots_per_node": engine.max_running / trainer.ranks}
    if speeds.link_gb_s:
        serves_s = sizes.parameters * PUBLISHED_BYTES / (speeds.link_gb_s * 1e9)
        joins_s = sizes.parameters * BYTES[trainer.dtype] / (speeds.link_gb_s * 1e9 * trainer.ranks)
        keys |= {"to_training_s": joins_s, "to_rollout_s": serves_s, "publish_s": serves_s}
    if speeds.tflops and speeds.step_tokens:
        seconds = speeds.step_tokens * FLOPS_PER_TRAINED_TOKEN * sizes.met / (speeds.tflops * 1e12 * speeds.utilization)
        keys["train_node_hours_per_step"] = seconds / 3600
    return keys


def _plan(keys: dict[str, float]) -> Finding:
    told = " ".join(f"--set {key}={value:.4g}" for key, value in keys.items())
    lacking = []
    if "to_training_s" not in keys:
        lacking.append("--link-gb-s for what switches take")
    if "train_node_hours_per_step" not in keys:
        lacking.append("--tflops and --step-tokens for what a step takes")
    todo = f"give {', and '.join(lacking)}" if lacking else ""
    return Finding("plan", "note" if lacking else "ok", f"qwengyre plan WORKLOAD {told}", todo)


def _rates(sizes: ModelSizes, engine: EngineConfig, speeds: Speeds, trainer: TrainerConfig) -> list[Finding]:
    found = []
    if speeds.tflops:
        rate = speeds.tflops * 1e12 * speeds.utilization * trainer.ranks / (FLOPS_PER_TRAINED_TOKEN * sizes.met)
        told = f"{rate:,.0f} distinct tokens/s of a cell at {speeds.utilization:.0%} of {speeds.tflops:g} TFLOP/s, attention left out"
        found.append(Finding("training", "ok", told))
    if speeds.memory_gb_s:
        wide, context = BYTES[engine.dtype], engine.max_context_tokens / 2
        read = sizes.met * wide + engine.max_running * context * sizes.kv_numbers * wide
        rate = engine.max_running * speeds.memory_gb_s * 1e9 / read
        told = (
            f"at most {rate:,.0f} tokens/s of a cell: {engine.max_running} calls, contexts half full, {speeds.memory_gb_s:g} GB/s"
        )
        found.append(Finding("decoding", "ok", told))
    if not found:
        todo = "give --tflops and --memory-gb-s of a device to hear how fast it may be"
        found.append(Finding("speed", "note", "not known", todo))
    return found


def _gb(num_bytes: float) -> str:
    """
    >>> _gb(1.5e9), _gb(2_345_678)
    ('1.5 GB', '2.35 MB')
    """
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
