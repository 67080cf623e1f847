"""The numbers of a model's config.json, checked before anything is built from them. Imports no torch: a controller looks, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from qwengyre.core.errors import ConfigError

MAX_BYTES: Final = 16 * 1024 * 1024
"""The largest that was seen, with the quantization of each layer, has 200 KiB."""
COUNTS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "head_dim",
)
MAX_COUNT: Final = 1 << 31
POSITIVE: Final = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "rope_theta")
NESTED: Final = ("text_config", "rope_parameters", "rope_scaling")
NEEDED: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def read_config_file(model_dir: Path) -> dict[str, Any]:
    """The config of a model, with numbers that can be meant. Raises ConfigError with file and key."""
    path = Path(model_dir) / "config.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"more than {MAX_BYTES:,} bytes: not the config of a model", file=str(path))
        found = msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"this file of a model cannot be read: {error}", file=str(path)) from error
    for key, message in wrong_numbers(found):
        raise ConfigError(message, file=str(path), key=key)
    return found


def require(config: Mapping[str, Any], model_dir: Path, names: tuple[str, ...] = NEEDED) -> None:
    """Raises ConfigError for a key without which there is no model."""
    for name in names:
        if config.get(name) is None:
            raise ConfigError(
                "missing: the model cannot be built without it", file=str(Path(model_dir) / "config.json"), key=name
            )


def wrong_numbers(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Key and what is wrong with it; null is as good as a key that is not there."""
    for name in COUNTS:
        value = config.get(name)
        values = value if isinstance(value, list) and value else [value]  # some families give one for each layer
        if value is not None and not all(type(one) is int and 1 <= one <= MAX_COUNT for one in values):
            yield prefix + name, f"must be a whole number from 1 on, not {value!r:.60}"
    for name in POSITIVE:
        value = config.get(name)
        if value is not None and not (type(value) in (int, float) and math.isfinite(value) and value > 0):
            yield prefix + name, f"must be a number above 0, not {value!r:.60}"
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(kv_heads) is int and kv_heads > 0 and heads % kv_heads:
        yield prefix + "num_key_value_heads", f"must divide num_attention_heads ({heads}), not {kv_heads}"
    for name in NESTED:
        if isinstance(inner := config.get(name), Mapping):
            yield from wrong_numbers(inner, f"{prefix}{name}.")
        elif inner is not None:
            yield prefix + name, f"must be a table, not {inner!r:.60}"
