"""How far a client saw an answer, in tokens: these are trained, and the next context goes on after them.

Tokens end where the tokenizer ends them, not where a stop string begins or a client hung up. A token of which the client saw a part
only is masked, as are all after it; they are recorded and never context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from qwengyre.gateway.answer_log import AnswerLog
from qwengyre.gateway.protocol.answer import Parser
from qwengyre.gateway.protocol.deltas import AnswerSoFar
from qwengyre.gateway.protocol.text import BROKEN, Decode
from qwengyre.trajectory.match import Turn

MakeParser = Callable[[], Parser]
"""A parser that has read nothing yet; every one that it makes reads the same tokens the same way."""


class Seen(msgspec.Struct, frozen=True):
    """What the client saw of an answer: its first `num_tokens` tokens, then `rest`."""

    num_tokens: int
    rest: str = ""
    """Text of a token that the stop string cut in two: the client saw it, so it is context, but it was not sampled as it stands."""


def seen_at(answer: AnswerLog, position: int, token_ids: Sequence[int], make_parser: MakeParser, decode: Decode) -> Seen:
    """What a client at `position` of an answer saw; `token_ids` are all that was sampled of it so far."""
    if position >= len(answer.deltas) and answer.is_complete:
        return Seen(len(token_ids))
    return seen_until(token_ids, answer.said(position).turn(), make_parser, decode)


def seen_until(token_ids: Sequence[int], shown: Turn, make_parser: MakeParser, decode: Decode) -> Seen:
    """The most leading tokens that say nothing beyond `shown`, all that the client was shown.

    Whitespace that the parser holds back is not text yet: a token of it counts only where `shown` has it, too.
    """

    def said(num_tokens: int) -> Turn:
        return turn_of(token_ids[:num_tokens], make_parser())

    num_tokens = _most(len(token_ids), lambda count: not _is_beyond(said(count), shown))
    turn = said(num_tokens)
    rest = shown.text[len(turn.text) :]
    while num_tokens and (turn.text or turn.tool_uses) and not _goes_on(_trailing_space(decode(token_ids[:num_tokens])), rest):
        num_tokens -= 1
        turn = said(num_tokens)
        rest = shown.text[len(turn.text) :]
    return Seen(num_tokens, rest if rest.strip() else "")


def turn_of(token_ids: Sequence[int], parser: Parser) -> Turn:
    """The answer that ends with `token_ids`; a character that is not whole yet is left out."""
    answer = AnswerSoFar()
    for delta in (*parser.feed(token_ids), *parser.finish()):
        answer.add(delta)
    turn = answer.turn()
    return msgspec.structs.replace(turn, text=turn.text.rstrip(BROKEN))


def num_tokens_of(reasoning: str, token_ids: Sequence[int], decode: Decode) -> int:
    """The fewest leading tokens of an answer that hold all of its reasoning."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reasoning in decode(token_ids[:middle]) else (middle + 1, high)
    return low


def _most(highest: int, holds: Callable[[int], bool]) -> int:
    """The highest number up to `highest` for which `holds`, which is true from 0 up to it. It is sought near `highest`."""
    step, high = 1, highest + 1
    while high > 0 and not holds(max(0, high - step)):
        high, step = max(0, high - step), step * 2
    low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _is_beyond(turn: Turn, shown: Turn) -> bool:
    """Whether an answer says more than was shown. Tool calls come first: a call that has only begun reads as text."""
    uses, shown_uses = turn.tool_uses, shown.tool_uses
    if len(uses) != len(shown_uses):
        return len(uses) > len(shown_uses)
    if len(turn.reasoning or "") > len(shown.reasoning or "") or not shown.text.startswith(turn.text):
        return True
    return bool(uses) and len(uses[-1].arguments) > len(shown_uses[-1].arguments)


def _goes_on(space: str, rest: str) -> bool:
    """Whether the whitespace after the text of the tokens belongs to what was shown. Before a `rest` there must be none: it brings
    its own."""
    return not space if rest.strip() else rest.startswith(space)


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]
