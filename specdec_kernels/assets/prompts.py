"""Named prompt sets: real tasks, in a fixed order, ready for the model (the chat template is already applied).

They differ in how much of the answer can be copied from the prompt, which is what prompt lookup lives on: "code-edit"
and "quote" repeat most of it, "summarise" some, "humaneval" repeats itself, "chat" and "gsm8k" hardly anything.
"""

from __future__ import annotations

import fnmatch
import heapq
import inspect
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import check_one_of
from .fetch import AssetError
from .texts import gsm8k, human_eval, mt_bench

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PROMPT_SETS", "encode", "load_prompts"]

_MAX_CHARACTERS = 900  # about 250 tokens: a context that a small CPU prefills in about a second

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    shutil.copyfileobj,
    heapq.merge,
    textwrap.dedent,
    fnmatch.filter,
    statistics.median,
    shutil.move,
    statistics.harmonic_mean,
    textwrap.indent,
    heapq.nsmallest,
    shutil.copytree,
    statistics.fmean,
    shutil.which,
)
_MODULES = (fnmatch, heapq, shutil, statistics, textwrap)
"""Modules whose functions are asked about; `corpus` leaves them out, so that no drafter has read them."""
_LEAST_FUNCTION, _LEAST_TOPIC, _MOST = 300, 400, 80  # characters of a text, and texts that are made here

_TOPICS = ("if", "while", "assert", "import", "lambda", "del", "global", "for", "with", "class", "try", "raise")


def _functions() -> list[str]:
    """Sources of functions of the standard library."""
    more = (function for module in _MODULES for function in _functions_of(module, module.__name__))
    cut = dict.fromkeys(textwrap.dedent(inspect.getsource(f))[:_MAX_CHARACTERS] for f in (*_FUNCTIONS, *more))
    return [text for text in cut if len(text) >= _LEAST_FUNCTION][:_MOST]


def _functions_of(owner: object, module: str) -> Iterator[Callable[..., Any]]:
    """The functions and methods of this module that `owner`, the module or one of its classes, holds."""
    for member in vars(owner).values():
        if getattr(member, "__module__", None) != module:
            continue
        if inspect.isclass(member):
            yield from _functions_of(member, module)
        elif inspect.isfunction(member := getattr(member, "__func__", member)):
            yield member


def _code_edit() -> list[str]:
    ask = "Rewrite this Python function, adding type hints. Keep everything else unchanged.\n```python\n{}\n```"
    return [ask.format(source) for source in _functions()]


def _topics() -> list[str]:
    """What Python's help says of its topics: the beginning of each, and then what follows that, from a word on."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in (*_TOPICS, *sorted(topics.keys() - set(_TOPICS)))]
    parts = [*texts, *(text[_MAX_CHARACTERS:].partition(" ")[2] for text in texts)]
    cut = dict.fromkeys(part[:_MAX_CHARACTERS] for part in parts)  # some topics share their text
    return [text for text in cut if len(text) >= _LEAST_TOPIC][:_MOST]


def _quote() -> list[str]:
    return ["Repeat the following text exactly:\n\n" + text for text in _topics()]


def _summarise() -> list[str]:
    return ["Summarize the following text.\n\n" + text for text in _topics()]


def _humaneval() -> list[str]:
    return [problem["prompt"] for problem in human_eval()]


def _chat() -> list[str]:
    questions = mt_bench()
    # One question of every category in turn, so that the first few already cover them all.
    categories = list(dict.fromkeys(question["category"] for question in questions))
    by_category = [[q["turns"][0] for q in questions if q["category"] == category] for category in categories]
    return [turn for group in zip(*by_category, strict=True) for turn in group]


def _gsm8k() -> list[str]:
    return [problem["prompt"] for problem in gsm8k()]


# name -> (texts, whether they are a user's turn in a chat)
_BUILDERS: dict[str, tuple[Callable[[], list[str]], bool]] = {
    "code-edit": (_code_edit, True),
    "quote": (_quote, True),
    "humaneval": (_humaneval, False),
    "summarise": (_summarise, True),
    "chat": (_chat, True),
    "gsm8k": (_gsm8k, True),
}
PROMPT_SETS: tuple[str, ...] = tuple(_BUILDERS)
"""Names of the sets."""


def load_prompts(name: str, tokenizer: PreTrainedTokenizerBase, count: int | None = None) -> list[str]:
    """The first `count` prompts (None: all) of the set `name`, as strings to `encode`.

    Raises
    ------
    ValueError
        No such set, or it has fewer than `count` prompts.
    AssetError
        Its text cannot be fetched.
    """
    check_one_of("load_prompts", "name", name, PROMPT_SETS)
    texts, (_, is_chat) = _texts(name), _BUILDERS[name]
    if count is not None:
        if not 1 <= count <= len(texts):
            raise ValueError(f"load_prompts: count must be in 1 .. {len(texts)} for {name!r}, got {count}")
        texts = texts[:count]
    if not is_chat:
        return texts
    return [chat_of(tokenizer, text) for text in texts]


def num_prompts(name: str) -> int:
    """How many prompts a set has.

    Raises
    ------
    ValueError, AssetError
        As `load_prompts`.
    """
    check_one_of("num_prompts", "name", name, PROMPT_SETS)
    return len(_texts(name))


def _texts(name: str) -> list[str]:
    try:
        return _BUILDERS[name][0]()
    except (ImportError, OSError, KeyError) as error:  # a Python that came without its sources or its pydoc topics
        raise AssetError(f"prompt set {name!r} cannot be made from this Python's standard library: {error}") from error


def chat_of(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """A user's turn where the tokenizer knows chats, else the text as it is."""
    if not getattr(tokenizer, "chat_template", None):
        return prompt
    turn = [{"role": "user", "content": prompt}]
    text: str = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return text


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A prompt's tokens, with those that the tokenizer puts around a text, unless the text already begins with the same
    one.
    """
    whole: list[int] = tokenizer.encode(text)
    bare: list[int] = tokenizer.encode(text, add_special_tokens=False)
    begun = bare != whole and whole[:1] == bare[:1] and whole[1 : len(bare) + 1] == bare
    return bare if begun else whole


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a batch of prompts, padded on the left: as the tokenizer begins a text, unless a prompt has
    the special tokens of a chat already.

    Returns
    -------
    input_ids, attention_mask : Tensor
        ``[batch, longest]`` int64 each; the mask is 0 on the padding.
    """
    rows = [ids_of(tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, rows))
    input_ids = torch.full((len(rows), longest), tokenizer.pad_token_id or 0, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    return input_ids, attention_mask
