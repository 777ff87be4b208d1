"""A body of text: the Python standard library's source, and the counts of its n-grams in a model's tokens."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..drafters import NgramTable
from .fetch import AssetError, Say, cached, print_to_stderr, unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ngram_table"]

# What the prompt sets are made of: a drafter that had counted it would know the answers.
_HELD_OUT = {"fnmatch.py", "heapq.py", "shutil.py", "statistics.py", "textwrap.py", "topics.py"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def ngram_table(tokenizer: PreTrainedTokenizerBase, say: Say = print_to_stderr) -> NgramTable:
    """The counts, made once for a Python version and a tokenizer (about twenty seconds) and kept in the cache.

    Raises
    ------
    AssetError
        This Python came without the source of its standard library, or the cache cannot be written or read.
    """

    def build(path: Path) -> None:
        say("counting n-grams of the Python standard library (20 seconds, once) ...")
        texts = [file.read_text(encoding="utf-8", errors="ignore") for file in sources()]
        if not texts:
            raise AssetError("this Python came without the source of its standard library")
        end = [tokenizer.eos_token_id]
        documents = [ids + end for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
        NgramTable.from_tokens(np.concatenate([np.array(ids, dtype=np.int64) for ids in documents])).save(path)

    words = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:8]
    name = f"stdlib-ngrams-python{sys.version_info.major}.{sys.version_info.minor}-{words}.npz"
    path = cached(name, build, say=say)
    try:
        return NgramTable.load(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def sources() -> list[Path]:
    """The standard library's files, except those that are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if path.name not in _HELD_OUT and not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
