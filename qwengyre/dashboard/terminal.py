"""The one kind of console: whatever text is drawn on it, only our own styles and cursor movements reach the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from qwengyre.core.text import printable


class SafeConsole(Console):
    """A rich console that writes characters that act on a terminal as escapes, where they come from text and not from rich itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                yield Segment(printable(segment.text), segment.style)
            else:
                yield segment
