"""transformers' assisted generation by this package, for as long as a ``with`` lasts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.generation.utils import GenerationMixin

from ...checks import check_one_of
from ...decoding.arguments import check_draft_length
from ...decoding.costs import CostTable
from ...ops.arguments import ACCEPTANCES
from .assisted import generate
from .versions import check_version

Options = dict[str, Any]

_mine: ContextVar[Options | None] = ContextVar("assisted_generation", default=None)
_lock = threading.Lock()
_entered: list[Options] = []  # by all threads, the last one last
_stock: list[Callable[..., Any]] = []  # transformers' own method while it is replaced, else empty


@contextmanager
def assisted_generation(
    *, num_speculative_tokens: int | str | CostTable | None = None, acceptance: str = "token"
) -> Iterator[None]:
    """In its block, ``model.generate(assistant_model=… | prompt_lookup_num_tokens=…)`` runs here, at any batch size.

    Calls stay as they are; `generate` of this module describes what they get. Every other call of ``model.generate`` is
    transformers' own. So is one without a lookup that drafts by ``assistant_early_exit``, ``use_mtp``, a
    ``speculation_type`` or one of Gemma 4's assistants.

    ``with`` blocks may be nested, the innermost one's options count. It may be entered from any number of threads: a
    thread or asyncio task has the options of the block that it is in. transformers' class is changed while any thread
    is within, so threads that have entered nothing, such as one that generates for a streamer, have those of the block
    entered last.

    Parameters
    ----------
    num_speculative_tokens : int, "auto" or CostTable, optional
        Draft tokens a step, instead of what the call says.
    acceptance : {"token", "block", "match", "greedy"}
        The rule, see `specdec_kernels.verify_chain`.

    Raises
    ------
    ImportError
        An unknown version of transformers, with the range of known ones.
    TypeError, ValueError
        A wrong `num_speculative_tokens` or `acceptance`.
    """
    check_version("assisted_generation")
    if num_speculative_tokens is not None:
        check_draft_length("assisted_generation", num_speculative_tokens)
    check_one_of("assisted_generation", "acceptance", acceptance, ACCEPTANCES)
    options: Options = {"num_speculative_tokens": num_speculative_tokens, "acceptance": acceptance}
    before = _mine.get()
    try:  # an interrupt may come anywhere
        with _lock:
            if not _stock:
                _stock.append(GenerationMixin._assisted_decoding)
                GenerationMixin._assisted_decoding = _in_its_place(_stock[0])
            _entered.append(options)
        _mine.set(options)
        yield
    finally:
        with _lock:
            _entered[:] = [other for other in _entered if other is not options]
            if not _entered and _stock:
                GenerationMixin._assisted_decoding = _stock.pop()
        if _mine.get() is options:  # not where another block was entered since, or this thread is in another one
            _mine.set(before)


def _in_its_place(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)  # transformers looks at its parameters
    def _assisted_decoding(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            mine, entered = _mine.get(), list(_entered)
            # a block may have been left by another thread than the one that entered it
            options = next((own for own in entered if own is mine), entered[-1] if entered else None)
        # no options: the last block was left after this method was looked up
        if options is None or _drafts_by_itself(kwargs["generation_config"], kwargs.get("assistant_model")):
            return stock(model, *args, **kwargs)
        return generate(model, *args, **{**kwargs, **options})

    return _assisted_decoding


def _drafts_by_itself(config: Any, assistant: Any) -> bool:
    """Whether transformers would draft neither by a lookup nor by a model that `generate` serves."""
    if config.prompt_lookup_num_tokens is not None:
        return False
    if type(assistant).__name__.startswith(("Gemma4Assistant", "Gemma4UnifiedAssistant")):
        return True  # transformers, too, knows them by name: they read the target's keys and values
    return config.assistant_early_exit is not None or bool(config.use_mtp or config.speculation_type)
