"""A small reference harness: its own program, which knows nothing of who serves the model.

It speaks Chat Completions through the official `openai` client, writes, reads and runs files in the current folder,
hands pieces of work to sub-agents with a fresh context, and, when its context is full, asks the model for a summary and
goes on from that. `python -m qwengyre_harness --help` tells the rest.
"""

from qwengyre_harness.main import main, preload

__all__ = ["main", "preload"]
