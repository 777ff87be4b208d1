"""Runs side by side in a terminal, each as it happens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = 16  # of text; the last ones are shown
_SECONDS = 0.2  # between two pictures: drawing one takes milliseconds from the run


class Run:
    """A column: one run's first answer, its tokens by origin, and its speed. A streamer of `generate`."""

    def __init__(self, columns: Columns, name: str) -> None:
        self._columns, self.name = columns, name
        self._text = render.Detokenizer(columns.tokenizer)
        self.texts: list[str] = []
        self.origins: list[int] = []
        self._count = 0
        self._began: float | None = None
        self._seconds = 0.0

    def step(self, tokens: list[np.ndarray], origins: list[np.ndarray]) -> None:
        """Take in what a step gave."""
        if self._began is None:  # what came before is prefill
            self._began = time.perf_counter()
        else:
            self._count += sum(map(len, tokens))
            self._seconds = time.perf_counter() - self._began
        self.texts += [self._text.add(token) for token in tokens[0].tolist()]
        self.origins += origins[0].tolist()
        self._columns.draw()

    @property
    def title(self) -> str:
        """The run's name, and its tokens a second since its first step."""
        return f"{self.name}, {self._count / self._seconds:.1f} tokens/s" if self._count else self.name


class Columns:
    """Several runs side by side; on leaving, the picture is gone.

    Parameters
    ----------
    title : str
        A line above them.
    tokenizer
        Of the runs' tokens.
    stream : TextIO
        A terminal.
    """

    def __init__(self, title: str, tokenizer: PreTrainedTokenizerBase, stream: TextIO) -> None:
        self.tokenizer = tokenizer
        self._title = title
        self._color = render.use_color(stream)
        self._console = Console(file=stream, no_color=not self._color)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
        self._runs: list[Run] = []
        self._drawn = 0.0

    def __enter__(self) -> Columns:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, name: str) -> Run:
        """The next column, and what `generate` streams to it."""
        self._runs.append(Run(self, name))
        self.draw()
        return self._runs[-1]

    def draw(self) -> None:
        """Draw what there is, unless it was drawn a moment ago."""
        now = time.perf_counter()
        if now - self._drawn >= _SECONDS:
            self._live.update(self._picture(), refresh=True)
            self._drawn = now

    def _picture(self) -> Table:
        table = Table(title=self._title, title_justify="left", expand=True)
        width = self._console.width // len(self._runs) - 4
        for run in self._runs:
            table.add_column(run.title, ratio=1)
        rows = [self._last_lines(run, width) for run in self._runs]
        table.add_row(*rows)
        return table

    def _last_lines(self, run: Run, width: int) -> Text:
        text = Text.from_ansi(render.render(run.texts, run.origins, color=self._color))
        lines = text.wrap(self._console, max(width, 1))[-_ROWS:]
        return Text("\n").join([*lines, *[Text()] * (_ROWS - len(lines))])
