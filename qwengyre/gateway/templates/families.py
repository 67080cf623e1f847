"""Which renderers know the format of a model, by `model_type` of its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qwengyre.gateway.templates.jinja import read_json

QWEN35: Final = ("qwen3.5", "qwen3.6", "qwen3.8")
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "deepseek_v3": ("deepseek-v3", "deepseek-r1"),
    "deepseek_v4": ("deepseek-v4",),
    "gemma4": ("gemma4",),
    "gemma4_text": ("gemma4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "gpt_oss": ("gpt-oss",),
    "hy_v3": ("hy3",),
    "inkling": ("inkling",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "laguna": ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": QWEN35,
    "qwen3_5_moe": QWEN35,
    "qwen3_5_moe_text": QWEN35,
    "qwen3_5_text": QWEN35,
    "qwen3_vl": ("qwen3-vl",),
    "qwen3_vl_moe": ("qwen3-vl",),
}
"""Tried first where the folder has a chat template, and the only ones where it has none."""


def family_of(folder: Path) -> tuple[str, ...]:
    """Renderers for this folder's architecture; none when it is not known. Raises ConfigError for an unreadable config.json."""
    return FAMILIES.get(str(read_json(folder / "config.json").get("model_type")), ())
