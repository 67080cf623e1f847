"""Images, documents and sounds in a conversation: texts that say what was left out, for a policy that reads text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from qwengyre.gateway.protocol.fields import Honored

MEDIA: Final[dict[str, str]] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "container_upload": "file",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
    "input_video": "video",
    "search_result": "search result",
}
"""What a part is, by its type in any dialect."""
LEFT_OUT: Final = Honored("as a text that says what was left out, for this model reads text only; of plain text the text itself")
_SOURCES: Final = ("source", "image_url", "file", "input_audio", "video_url")
_URL_CHARS: Final = 200
"""A longer URL holds data, or nothing that a policy could use."""


def text_instead(part: Mapping[str, Any]) -> str | None:
    """The text in place of a part that is not text; None for a part of no kind that is known.

    >>> text_instead({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}})
    '[image/png of 8 bytes left out: this model reads text only]'
    """
    kind = MEDIA.get(str(part.get("type")))
    if kind is None:
        return None
    source = next((part[name] for name in _SOURCES if isinstance(part.get(name), dict)), part)
    written = _written(part, source)
    if written is not None:
        return written
    url = _first_text(source, ("url", "image_url", "file_url")) or _first_text(part, _SOURCES)
    data = _first_text(source, ("data", "file_data")) or (url if url.startswith("data:") else "")
    media_type = _first_text(source, ("media_type",)) or _media_type(data) or kind
    name = _first_text(source, ("filename",)) or _first_text(part, ("title", "filename"))
    parts = [media_type, *([repr(name[:_URL_CHARS])] if name else []), *([f"of {_num_bytes(data)} bytes"] if data else [])]
    if url and not data and len(url) <= _URL_CHARS:
        parts.append(f"at {url}")
    return f"[{' '.join(parts)} left out: this model reads text only]"


def _written(part: Mapping[str, Any], source: Mapping[str, Any]) -> str | None:
    """The text of a part that has nothing but text."""
    title = [part["title"]] if isinstance(part.get("title"), str) else []
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return "\n".join([*title, source["data"]])
    content = source.get("content", part.get("content"))
    if isinstance(content, str):
        return "\n".join([*title, content])
    if isinstance(content, Sequence) and content:
        inner = [_inner_text(item) for item in content if isinstance(item, dict)]
        return "\n".join([*title, *(text for text in inner if text is not None)])
    return None


def _inner_text(part: Mapping[str, Any]) -> str | None:
    text = part.get("text")
    return text if isinstance(text, str) else text_instead(part)


def _first_text(part: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((part[name] for name in names if isinstance(part.get(name), str)), "")


def _media_type(url: str) -> str:
    return url.removeprefix("data:").partition(",")[0].partition(";")[0] if url.startswith("data:") else ""


def _num_bytes(data: str) -> int:
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    return len(encoded.rstrip("=")) * 3 // 4
