"""The policy that a run on CPUs starts from: a tiny Qwen3, trained on scripted demonstrations of varying quality."""

from qwengyre.warmup.warm_up import warm_up

__all__ = ["warm_up"]
