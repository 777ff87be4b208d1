"""Text whose accepted, recovered and bonus tokens can be told apart: by colour, or by marks where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from specdec_kernels import config
from specdec_kernels.demo.trace import Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["legend", "pieces", "render", "use_color"]

_COLORS = {Origin.PLAIN: "", Origin.ACCEPTED: "\x1b[32m", Origin.RECOVERED: "\x1b[31m", Origin.BONUS: "\x1b[36m"}
_MARKS = {Origin.PLAIN: ("", ""), Origin.ACCEPTED: ("⟦", "⟧"), Origin.RECOVERED: ("‹", "›"), Origin.BONUS: ("«", "»")}
_RESET = "\x1b[0m"


def use_color(stream: TextIO) -> bool:
    """True for a terminal, unless the environment asks for none (NO_COLOR)."""
    return stream.isatty() and not config.settings().no_color


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; a character spread over several tokens belongs to the one that completes it."""
    texts, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        complete = text.rstrip("\ufffd") if end < len(tokens) else text
        texts.append(complete[len(shown) :])
        shown = complete if len(complete) > len(shown) else shown
    return texts


def render(texts: Sequence[str], origins: Sequence[Origin], *, color: bool) -> str:
    """One string of `texts`, neighbours of the same origin under one colour or pair of marks.

    Raises
    ------
    ValueError
        Not one origin for every text.
    """
    shown = []
    for origin, group in groupby(zip(texts, origins, strict=True), key=lambda pair: pair[1]):
        text = "".join(piece for piece, _ in group)
        if text:
            shown.append(_styled(text, origin, color))
    return "".join(shown)


def _styled(text: str, origin: Origin, color: bool) -> str:
    if not color:
        before, after = _MARKS[origin]
        return before + text + after
    start = _COLORS[origin]
    return f"{start}{text}{_RESET}" if start else text


def legend(*, color: bool) -> str:
    """One line that explains the colours or marks."""
    words = {
        Origin.ACCEPTED: "accepted draft tokens",
        Origin.RECOVERED: "recovered after a rejection",
        Origin.BONUS: "bonus after a full acceptance",
        Origin.PLAIN: "drawn without a draft",
    }
    return ", ".join(_styled(word, origin, color) for origin, word in words.items())
