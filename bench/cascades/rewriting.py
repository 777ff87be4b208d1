"""The rewriting task: telegraphic text back to prose, out of the documentation of the Python standard library.

A pair is a run of consecutive words of a docstring, a comment or a pydoc topic, and the same run in lower case without
punctuation and articles: "return list of strings or none" → "Return a list of the strings, or None." Every word has its
own tokens, so that a run is encoded by joining words.
"""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as pydoc_topics
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec_kernels import assets
from specdec_kernels.assets.corpus import sources

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, EOS, UNKNOWN = 0, 1, 2
VOCAB_SIZE = 2000
SHORTEST, LONGEST = 5, 12  # words of a run
_ARTICLES = {"a", "an", "the"}
_PLAIN_WORD = re.compile(r"[A-Za-z][a-z'-]*[,.;:]?")
_PRINTABLE = re.compile(r"[!-~]{1,16}")
_BLANK_LINES = re.compile(r"\n\s*\n")


def telegraphic(word: str) -> str:
    """`word` as it stands in the source text: several words, or none."""
    words = re.sub(r"[^a-z0-9_]+", " ", word.lower().replace("'", "")).split()
    return " ".join(w for w in words if w not in _ARTICLES)


def paragraphs() -> list[list[str]]:
    """The words of every different paragraph of prose, in the order of the files.

    Raises
    ------
    AssetError
        This Python comes without the source of its standard library.
    """
    found: dict[str, list[str]] = {}
    texts = itertools.chain(pydoc_topics.values(), itertools.chain.from_iterable(map(_texts, sources())))
    for text in texts:
        for part in _BLANK_LINES.split(text):
            words = part.split()
            if len(words) >= SHORTEST and _is_prose(words):
                found[" ".join(words)] = words
    if not found:
        raise assets.AssetError("this Python came without the source of its standard library")
    return list(found.values())


def _texts(path: Path) -> Iterator[str]:
    """Docstrings and blocks of comments of a file; none if it is not in this Python's grammar."""
    source = path.read_text(encoding="utf-8", errors="ignore")
    try:
        nodes = list(ast.walk(ast.parse(source)))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    block: list[str] = []
    last = -1
    for token in tokens:
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield "\n".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            last = token.start[0]
    yield "\n".join(block)


def _is_prose(words: Sequence[str]) -> bool:
    plain = sum(_PLAIN_WORD.fullmatch(word) is not None for word in words)
    return plain >= 0.6 * len(words) and all(map(_PRINTABLE.fullmatch, words))


def train_tokenizer(texts: Sequence[Sequence[str]]) -> Tokenizer:
    """A byte-pair encoding of `VOCAB_SIZE` tokens for both sides; no token spans two words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    sides = (" ".join(side) for words in texts for side in (words, map(telegraphic, words)))
    tokenizer.train_from_iterator(sides, trainer)
    return tokenizer


@dataclass(frozen=True)
class Pair:
    """A run of words, as tokens (EOS included) and as text."""

    source: list[int]
    target: list[int]
    text: str


class Corpus:
    """Paragraphs as tokens, divided into those to train on and those held out.

    Parameters
    ----------
    texts : sequence of sequence of str
        The words of paragraphs.
    tokenizer : Tokenizer
        As `train_tokenizer` makes it.
    """

    def __init__(self, texts: Sequence[Sequence[str]], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        words = sorted({word for text in texts for word in text})
        targets = tokenizer.encode_batch(words)
        sources = tokenizer.encode_batch([telegraphic(word) for word in words])
        self._ids = {w: (s.ids, t.ids) for w, s, t in zip(words, sources, targets, strict=True)}
        held_out = [int(hashlib.sha256(" ".join(text).encode()).hexdigest(), 16) % 20 == 0 for text in texts]
        self.train = [text for text, out in zip(texts, held_out, strict=True) if not out]
        self.held_out = [text for text, out in zip(texts, held_out, strict=True) if out]

    def draw(self, texts: Sequence[Sequence[str]], count: int, seed: int | Sequence[int]) -> list[Pair]:
        """`count` runs from `texts`, in which each word is about as likely as any other."""
        rng = np.random.default_rng(seed)
        sizes = np.array([len(text) for text in texts], dtype=np.float64)
        chosen = rng.choice(len(texts), size=count, p=sizes / sizes.sum())
        return [self._pair(texts[i], rng) for i in chosen]

    def _pair(self, text: Sequence[str], rng: np.random.Generator) -> Pair:
        length = int(rng.integers(SHORTEST, min(LONGEST, len(text)) + 1))
        start = int(rng.integers(0, len(text) - length + 1))
        words = text[start : start + length]
        source, target = ([token for word in words for token in self._ids[word][side]] for side in (0, 1))
        return Pair([*source, EOS], [*target, EOS], " ".join(words))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` up to the first EOS."""
        ids = [token for token in tokens if token >= 0]
        return self.tokenizer.decode(ids[: ids.index(EOS)] if EOS in ids else ids)


def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """``[rows, longest]`` int64, padded with `value` on the right."""
    out = torch.full((len(rows), max(map(len, rows))), value, dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def word_edits(hypothesis: str, reference: str) -> int:
    """The fewest words to substitute, insert or drop to turn one text into the other."""
    b = reference.split()
    row = list(range(len(b) + 1))
    for i, x in enumerate(hypothesis.split(), start=1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]
