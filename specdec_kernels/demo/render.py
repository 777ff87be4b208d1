"""Text whose accepted, recovered and bonus tokens can be told apart: by colour, or by marks where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from .. import config
from ..decoding import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Detokenizer", "legend", "pieces", "render", "use_color"]

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


class Detokenizer:
    """The text that each token adds; a character spread over several tokens belongs to the one that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before = self._shown = 0  # text up to `_shown` is out; from `_before` it is decoded again, for its spaces

    def _texts(self) -> tuple[str, str]:
        """Of the text of the tokens from `_before` on: what has been shown, and all of it."""
        known, all_of_it = (
            self._tokenizer.decode(tokens, skip_special_tokens=True)
            for tokens in (self._tokens[self._before : self._shown], self._tokens[self._before :])
        )
        return known, all_of_it

    def add(self, token: int) -> str:
        """What `token` adds."""
        self._tokens.append(token)
        known, text = self._texts()
        if text.endswith("\ufffd"):  # the start of a character whose other bytes are still to come
            return ""
        self._before, self._shown = self._shown, len(self._tokens)
        return text[len(known) :]

    def rest(self) -> str:
        """What is left of a character that no token completed."""
        known, text = self._texts()
        return text[len(known) :]


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds, as `Detokenizer` has it; the last one has the rest."""
    text = Detokenizer(tokenizer)
    texts = [text.add(token) for token in tokens]
    if texts:
        texts[-1] += text.rest()
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
