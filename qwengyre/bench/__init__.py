"""Benches: each measures one claim in one run and prints the figures. `qwengyre bench NAME`."""

from typing import Final

COMMANDS: Final = {
    "journal": ("qwengyre.bench.journal:journal", "Appends, reads and durable records per second of a journal."),
    "launch": ("qwengyre.bench.launch:launch", "CPU time of starting and scoring one execution, cold and warm."),
}
"""Name -> ("module:function", one line of help)."""
