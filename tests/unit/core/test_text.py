"""Text of others, made safe to show."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwengyre.core.text import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ümläut, 漢字, 👩‍👩‍👧", "plain, ümläut, 漢字, 👩‍👩‍👧"),
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb", "a\nb"),
        ("progress\rerror: fake", "progress\\rerror: fake"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b]52;c;cm0gLXJm\x1b\\", "\\x1b]52;c;cm0gLXJm\\x1b\\"),
        ("\x9b2J\x90q", "\\x9b2J\\x90q"),
        ("back\b\b\x7f\x0b\x0c\x00", "back\\x08\\x08\\x7f\\x0b\\x0c\\x00"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("a\u2066b\u200bc\ufeff", "a\\u2066b\\u200bc\\ufeff"),
        ("\u2028line", "\\u2028line"),
        ("\U000e0041tag", "\\U000e0041tag"),
        (b"name\xff".decode("utf-8", "surrogateescape"), "name\\xff"),
        ("half \ud83d pair", "half \\ud83d pair"),
    ],
)
def test_what_acts_is_written_as_an_escape(text, shown):
    assert printable(text) == shown


def test_one_line_is_one_line():
    assert one_line("a\nerror: fake\r\n\tb") == "a\\nerror: fake\\r\\n\\tb"


@given(st.text(st.characters(categories=None), max_size=30))
def test_nothing_that_acts_is_left_and_everything_can_be_encoded(text):
    for shown, kept in ((printable(text), "\n\t"), (one_line(text), "")):
        shown.encode("utf-8")
        acting = [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in kept]
        assert acting == [] and not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
        assert (one_line(shown) if not kept else printable(shown)) == shown
