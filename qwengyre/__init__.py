"""QwenGyre: reinforcement learning for long-horizon agents in harnesses that nobody can change."""

__version__ = "0.1.0"
