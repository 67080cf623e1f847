"""How far an answer goes on: the sampled tokens that the client saw as text before a stop string.

Tokens end where the tokenizer ends them, not where a stop string begins. Those before the stop string are trained and are the
next prompt; the one in which it begins, and all after it, are recorded, masked and never context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from qwengyre.gateway.answer_log import AnswerLog
from qwengyre.gateway.protocol.deltas import AnswerSoFar
from qwengyre.gateway.protocol.parse import Parser
from qwengyre.gateway.protocol.text import BROKEN, Decode

MakeParser = Callable[[], Parser]
"""A parser that has read nothing yet; every one that it makes reads the same tokens the same way."""


class Seen(msgspec.Struct, frozen=True):
    """What the client saw of an answer: its first `num_tokens` tokens, then `rest`."""

    num_tokens: int
    rest: str = ""
    """Text of a token that the stop string cut in two: the client saw it, so it is context, but it was not sampled as it stands."""


def seen_at(answer: AnswerLog, position: int, token_ids: Sequence[int], make_parser: MakeParser, decode: Decode) -> Seen:
    """What a client at `position` of an answer saw; `token_ids` are all that was sampled of it so far."""
    is_all = position >= len(answer.deltas)
    most = len(token_ids) if is_all else answer.num_tokens(position)
    if not answer.has_stops or (is_all and not answer.withholds):
        return Seen(most)
    return seen_before(token_ids[:most], answer.said(position).turn().text, make_parser, decode)


def seen_before(token_ids: Sequence[int], shown: str, make_parser: MakeParser, decode: Decode) -> Seen:
    """The longest run of leading tokens whose text is a beginning of `shown`, all the text that the client was shown.

    Whitespace that the parser holds back is not text yet: a token of it counts only where `shown` has it, too.
    """

    def text(num_tokens: int) -> str:
        return text_of(token_ids[:num_tokens], make_parser()).rstrip(BROKEN)

    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if shown.startswith(text(middle)):
            low = middle
        else:
            high = middle - 1
    said = text(low)
    rest = shown[len(said) :]
    while low and said and not _goes_on(_trailing_space(decode(token_ids[:low])), rest):
        low -= 1
        said = text(low)
        rest = shown[len(said) :]
    return Seen(low, rest if rest.strip() else "")


def text_of(token_ids: Sequence[int], parser: Parser) -> str:
    """The visible text of an answer that ends with `token_ids`."""
    answer = AnswerSoFar()
    for delta in (*parser.feed(token_ids), *parser.finish()):
        answer.add(delta)
    return answer.turn().text


def _goes_on(space: str, rest: str) -> bool:
    """Whether the whitespace after the text of the tokens belongs to what was shown. Before a `rest` there must be none: it brings
    its own."""
    return not space if rest.strip() else rest.startswith(space)


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]
