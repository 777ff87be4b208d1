"""Text whose accepted, recovered and bonus tokens can be told apart: by colour, or by marks where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from .. import config
from ..decoding import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["legend", "pieces", "render", "use_color"]

_COLORS = {Provenance.ACCEPTED: "\x1b[32m", Provenance.RECOVERED: "\x1b[31m", Provenance.BONUS: "\x1b[36m"}
_MARKS = {Provenance.ACCEPTED: ("⟦", "⟧"), Provenance.RECOVERED: ("‹", "›"), Provenance.BONUS: ("", "")}
_WORDS = {
    Provenance.ACCEPTED: "accepted draft tokens",
    Provenance.RECOVERED: "recovered after a rejection",
    Provenance.BONUS: "bonus after a fully accepted (or empty) draft",
}
_RESET = "\x1b[0m"


def use_color(stream: TextIO) -> bool:
    """True for a terminal, unless the environment asks for none (NO_COLOR)."""
    return stream.isatty() and not config.settings().no_color


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; a character spread over several tokens belongs to the one that completes it."""
    texts, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        if end < len(tokens):
            text = text.rstrip("\ufffd")  # the start of a character whose other bytes are still to come
        texts.append(text[len(shown) :])
        shown = max(shown, text, key=len)
    return texts


def render(texts: Sequence[str], origins: Sequence[int], *, color: bool) -> str:
    """One string of `texts`, neighbours of the same origin under one colour or pair of marks.

    Parameters
    ----------
    texts : sequence of str
        What each token adds, as `pieces` gives it.
    origins : sequence of int
        A `Provenance` for each of them.
    color : bool
        Colours (ANSI escapes) instead of marks.

    Raises
    ------
    ValueError
        Not one origin for every text.
    """
    shown = []
    for origin, group in groupby(zip(texts, origins, strict=True), key=lambda pair: pair[1]):
        text = "".join(piece for piece, _ in group)
        if text:
            shown.append(_styled(text, Provenance(origin), color))
    return "".join(shown)


def legend(*, color: bool) -> str:
    """One line that explains the colours or marks."""
    return ", ".join(_styled(word, origin, color) for origin, word in _WORDS.items())


def _styled(text: str, origin: Provenance, color: bool) -> str:
    if color:
        return f"{_COLORS[origin]}{text}{_RESET}"
    before, after = _MARKS[origin]
    return before + text + after
