"""Decoder-only transformers models as runners."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from ...decoding.runner import Prompt, Runner
from ...tree import DraftTree
from ...types import TokenMap
from .cache import VIEW_STEP, RaggedCache, causal_mask, tree_mask
from .models import attention_windows, end_ids, max_length, padding_id, positions_end, prompt_padding
from .packing import is_packed
from .states import States
from .versions import CACHE

_OWN_HOOKS = ("transformers.", "specdec_kernels.")  # modules whose hooks on a model are no user's


class TransformersRunner(Runner):
    """What every transformers model has in common.

    Parameters
    ----------
    model : PreTrainedModel
        One that passes `check_served`, as `as_runner` ensures.
    token_map : TokenMap, optional
        The logits are of these target ids alone, in its order.
    """

    def __init__(self, model: Any, token_map: TokenMap | None = None) -> None:
        self._whole = model
        self.model = model = model if token_map is None else narrowed(model, token_map)
        self.name = type(model).__name__
        self.vocab_size, hidden_size = model.get_output_embeddings().weight.shape
        # Compiled code may have been traced without the hook that hears them, and is used again with it.
        self.hidden_size = None if is_compiled(model) else hidden_size
        self.num_embeddings = len(model.get_input_embeddings().weight)
        self.device, self.dtype = model.device, model.dtype
        self.max_length = max_length(model.config)
        self.capturable = not has_hooks(model)  # a replay would not call them
        self.end_ids, self.padding_id = end_ids(model), padding_id(model)
        self.prompt_padding = prompt_padding(model)
        self.listener: States | None = None
        """Receives what every forward gives besides logits."""

    def _call(self, model: Any, num_rows: int, cache: Any, **inputs: Any) -> Any:
        """Run the model, or for prompts its backbone, on a cache."""
        inputs |= {CACHE: cache, "use_cache": True}
        if self.listener is None:
            return model(**inputs)
        output = model(**inputs, **self.listener.asked)
        self.listener.hear(output, num_rows, in_prompt=model is not self.model)
        return output

    def costs_as(self) -> tuple[object, Hashable]:
        return self._whole, (is_packed(self._whole), self.vocab_size)


def has_hooks(model: Any) -> bool:
    """Whether a user's hooks are on it, on a part of it or on all modules; those of transformers do nothing where
    nobody listens, and those of `DecoderRunner.forward_tree`, maybe of another thread, do nothing for others.
    """
    of_all = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
    each = ((module._forward_hooks, module._forward_pre_hooks) for module in model.modules())
    # In copies: other threads may be adding and removing theirs.
    hooks = chain.from_iterable(tuple(found.values()) for found in (*of_all, *chain.from_iterable(each)))
    return any(not str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS) for hook in hooks)


def is_compiled(model: Any) -> bool:
    """Whether `torch.compile` has wrapped a module around its LM head: that, its calls or its method."""
    head = model.get_output_embeddings()
    compiled = (
        part
        for part in model.modules()
        if "_orig_mod" in part._modules
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
    )
    return any(inner is head for part in compiled for inner in part.modules())


@torch.no_grad()
def narrowed(model: Any, token_map: TokenMap) -> Any:
    """The same model with shared weights, except for an LM head with the rows of these target ids alone."""
    whole = model.get_output_embeddings()
    given = token_map.draft_to_target.to(whole.weight.device)
    first = torch.equal(given, torch.arange(len(given), device=given.device))
    ids = slice(len(given)) if first else given  # a slice is no copy
    head = nn.Linear(whole.in_features, len(token_map), bias=whole.bias is not None, device="meta")
    head.weight = nn.Parameter(whole.weight[ids], requires_grad=False)
    if whole.bias is not None:
        head.bias = nn.Parameter(whole.bias[ids], requires_grad=False)
    narrow = copy.copy(model)
    narrow._modules = dict(model._modules)
    narrow.set_output_embeddings(head)
    return narrow


def rounded(capacity: int) -> int:
    """A capacity that attention kernels like: their masks should have aligned rows."""
    return -(-capacity // VIEW_STEP) * VIEW_STEP


class DecoderRunner(TransformersRunner):
    """A decoder-only model on a `RaggedCache`; parameters as of `TransformersRunner`.

    Position ids and an additive 4-D mask are explicit, so neither the model nor its cache needs to know the lengths.
    """

    takes_trees = True

    def __init__(self, model: Any, token_map: TokenMap | None = None) -> None:
        super().__init__(model, token_map)
        self.gives_rows = self.hidden_size is not None
        # Rows past a sequence's limit are never used, but their positions must still lie within a table that ends.
        self._last_position = model.config.max_position_embeddings - 1 if positions_end(model.config) else None
        self._windows = attention_windows(model.config)
        self.cache: RaggedCache | None = None
        """Between `start` and `finish`."""

    def start(self, prompt: Prompt, capacity: int) -> None:
        self.cache = RaggedCache(self.model.config.num_hidden_layers, prompt.lengths.numel(), rounded(capacity))

    def finish(self) -> None:
        if self.cache is not None:
            self.cache.release()
        self.cache = None

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        run = self.model if need_logits else self.model.base_model
        output = self._forward(run, tokens, starts, bound)
        return output.logits if need_logits else None

    def forward_rows(self, tokens: Tensor, starts: Tensor, bound: int, rows: Tensor) -> Tensor:
        def needed(hidden: Tensor) -> Tensor:
            return hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[2]))

        with self._before_head(needed):
            logits: Tensor = self._forward(self.model, tokens, starts, bound).logits
        return logits

    def _forward(self, run: Any, tokens: Tensor, starts: Tensor, bound: int) -> Any:
        """The output of the model, or its backbone, for rows of texts."""
        assert self.cache is not None
        place = self.cache.place(starts, tokens.shape[1], bound)
        masks = {
            kind: causal_mask(place.positions, place.visible, self.dtype, window)
            for kind, window in self._windows.items()
        }
        return self._run(run, tokens, place.positions, masks)

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int) -> tuple[Tensor, Tensor | None]:
        assert self.cache is not None
        place = self.cache.place(starts, tree.num_nodes, bound)
        masks = {
            kind: tree_mask(tree, starts, place.visible, self.dtype, window) for kind, window in self._windows.items()
        }
        if self.hidden_size is None:
            return self._run(self.model, tokens, starts[:, None] + tree.position_ids, masks).logits, None
        hidden: list[Tensor] = []
        with self._before_head(hidden.append):
            output = self._run(self.model, tokens, starts[:, None] + tree.position_ids, masks)
        return output.logits, hidden[-1]

    @contextmanager
    def _before_head(self, see: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """Show `see` what enters the LM head, which instead takes what it returns: models differ in what they do to it
        before, and to the logits after. Other threads may be running the same model.
        """
        head, thread = self.model.get_output_embeddings(), threading.get_ident()
        watch = head.register_forward_pre_hook(
            lambda head, inputs: see(inputs[0]) if threading.get_ident() == thread else None
        )
        try:
            yield
        finally:
            watch.remove()

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        assert self.cache is not None
        self.cache.keep_path(accepted_nodes, starts)

    def _run(self, run: Any, tokens: Tensor, positions: Tensor, masks: dict[str, Tensor]) -> Any:
        """The output of the model, or its backbone, for rows whose places in the cache have been set."""
        if self._last_position is not None:
            positions = positions.clamp(max=self._last_position)
        return self._call(
            run,
            tokens.shape[1],
            self.cache,
            input_ids=tokens,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions,
        )
