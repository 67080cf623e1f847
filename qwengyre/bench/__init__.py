"""Benches: each measures one claim in one run and prints the figures. `qwengyre bench NAME`."""

from typing import Final

COMMANDS: Final = {
    "embedded": ("qwengyre.bench.embedded:embedded", "Tokens per CPU second of the embedded engine, against Hugging Face generate."),
    "journal": ("qwengyre.bench.journal:journal", "Appends, reads and durable records per second of a journal."),
    "launch": ("qwengyre.bench.launch:launch", "CPU time of starting and scoring one execution, cold and warm."),
}
"""Name -> ("module:function", one line of help)."""
