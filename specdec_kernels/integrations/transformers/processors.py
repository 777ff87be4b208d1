"""transformers' logits processors: which of them the ops apply themselves, and the others, row by row."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from ...decoding.runner import Prompt, Runner
from ...sampling import GREEDY, SamplingParams
from ...tree import DraftTree

_WARPERS = {
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}
"""What `SamplingParams` does too, in its order."""
_WITH_A_PAST = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    hf.SynthIDTextWatermarkLogitsProcessor: "watermarking_config of SynthID",
}
"""Processors that remember what they were called with, which may have been rejected; and the option that makes them."""
_IMPOSSIBLE = torch.finfo(torch.float32).min  # what `remove_invalid_values` makes of −inf

Processor = Callable[[Tensor, Tensor], Tensor]


def split_processors(
    processors: Sequence[Processor], do_sample: bool
) -> tuple[list[Processor], list[Processor], SamplingParams]:
    """Fold the longest tail that is temperature, top-k, top-p and min-p, in this order, into sampling parameters.

    Parameters
    ----------
    processors : sequence of LogitsProcessor
        As `GenerationMixin.generate` has prepared them.
    do_sample : bool
        False: greedy.

    Returns
    -------
    kept, folded : list of LogitsProcessor
        What must still be applied; and the tail, which is needed for scores alone.
    sampling : SamplingParams
        What the tail does.

    Raises
    ------
    ValueError
        A processor that cannot be rolled back, by the name of its option.
    """
    for processor in processors:
        for kind, option in _WITH_A_PAST.items():
            if isinstance(processor, kind):
                raise ValueError(f"generate: {option} is not served: {kind.__name__} remembers rejected drafts")
    kept, order, fields = list(processors), list(_WARPERS), {}
    while kept:
        last = type(kept[-1])
        if do_sample and last in order and _is_plain(kept[-1]):
            name = _WARPERS[last]
            fields[name] = getattr(kept[-1], name)
            order = order[: order.index(last)]
        elif last is not hf.LogitNormalization:  # which shifts a row, and so changes no distribution
            break
        kept.pop()
    likeliest_only = not do_sample or fields.get("top_p") == 0  # which is "off" in SamplingParams
    return kept, list(processors[len(kept) :]), GREEDY if likeliest_only else SamplingParams(**fields)


def _is_plain(warper: Any) -> bool:
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -math.inf) == -math.inf


def of_row(processor: Processor, row: int, batch: int) -> Processor:
    """`processor` for one sequence of `batch` alone: some hold data for each sequence."""
    one: Any = copy.copy(processor)

    def cut(held: Any) -> Any:
        index = row * len(held) // batch  # one for each prompt where several sequences continue it
        return held[index : index + 1]

    if isinstance(one, hf.RepetitionPenaltyLogitsProcessor) and isinstance(one.prompt_ignore_length, Tensor):
        one.prompt_ignore_length = cut(one.prompt_ignore_length)
    elif isinstance(one, hf.EncoderRepetitionPenaltyLogitsProcessor):
        one.encoder_input_ids = cut(one.encoder_input_ids)
    elif isinstance(one, hf.EncoderNoRepeatNGramLogitsProcessor):
        one.generated_ngrams, one.batch_size = cut(one.generated_ngrams), 1
    elif isinstance(one, hf.PrefixConstrainedLogitsProcessor):
        allowed = one._prefix_allowed_tokens_fn
        one._prefix_allowed_tokens_fn, one._num_beams = lambda _, text: allowed(row, text), 1
    else:
        return processor
    return one


class ProcessedRunner(Runner):
    """A runner whose logits have been through processors, each row with the text before it, draft tokens included.

    A row after an impossible draft token, after an end, or where a sequence has no token or draft token is left as it
    is: no rule looks at it, and a processor never sees a text that it has excluded, or one that cannot go on.

    Parameters
    ----------
    inner : Runner
        What gives the logits.
    processors : sequence of LogitsProcessor
        Functions of a text ``[1, length]`` and a row ``[1, vocab]``.
    prompts : Tensor
        ``[batch, prompt]`` int64 on the device, as ``model.generate`` was given them, padding included: processors see
        them like that.
    ends : collection of int
        Ids that nothing follows, except in a prompt.
    drafts : int, optional
        If given, this is the draft of a target with so many ids, and its rows get that width. What `forward` is given
        is then text, or was drawn from its own rows, and so is never impossible (a recovered token may be one that the
        draft bars).

    Attributes
    ----------
    ended : list of bool
        Sequences whose rows need no processing any more; the caller sets it.
    raw, rows : Tensor
        ``[batch, n, vocab]``, the last forward's logits before and after processing; of a tree, once a path of it is
        kept, those of the path.
    """

    def __init__(
        self, inner: Runner, processors: Sequence[Processor], prompts: Tensor, ends: Collection[int],
        drafts: int | None = None,
    ) -> None:  # fmt: skip
        self._inner, self._prompts, self._ends, self._drafts = inner, prompts, frozenset(ends), drafts is not None
        self._real: Tensor | None = None  # of the next forward
        self.name, self.device, self.max_length = inner.name, inner.device, inner.max_length
        self.vocab_size = drafts or inner.vocab_size
        known = inner.num_embeddings  # processors see all ids, the model those that it has
        self._num_known = known if drafts is not None and known is not None and known < drafts else None
        self.decoder_start, self.end_ids, self.padding_id = inner.decoder_start, inner.end_ids, inner.padding_id
        self.takes_trees, self.hidden_size = inner.takes_trees, inner.hidden_size
        batch = prompts.shape[0]
        self._processors = [hf.LogitsProcessorList(of_row(p, b, batch) for p in processors) for b in range(batch)]
        self._names = tuple(type(p).__name__ for p in processors)
        self.ended = [False] * batch

    def start(self, prompt: Prompt, capacity: int) -> None:
        self._inner.start(prompt if self._num_known is None else prompt.clamped(self._num_known), capacity)
        self._text = torch.nn.functional.pad(self._prompts, (0, capacity))
        self._pads = self._prompts.shape[1] - prompt.lengths

    def finish(self) -> None:
        self._inner.finish()

    def costs_as(self) -> tuple[object, Hashable]:
        model, condition = self._inner.costs_as()
        return model, (condition, self._names)

    def expect(self, real: Callable[[], Tensor]) -> None:
        self._real = real()

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        known = tokens if self._num_known is None else tokens.clamp(max=self._num_known - 1)
        raw = self._inner.forward(known, starts, bound, need_logits)
        first = starts + self._pads  # of the new tokens, in the text as the processors see it
        tokens = self._note(tokens, first)
        if raw is None:
            return None
        if raw.shape[2] != self.vocab_size:
            raw = torch.nn.functional.pad(raw, (0, self.vocab_size - raw.shape[2]), value=-torch.inf)  # or cut
        self.raw = self.rows = raw
        if need_logits:
            self._process(
                tokens, first, torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand(tokens.shape)
            )
        return self.rows

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int) -> tuple[Tensor, Tensor | None]:
        raw, hidden = self._inner.forward_tree(tokens, starts, tree, bound)
        first = starts + self._pads
        tokens = torch.cat([self._note(tokens[:, :1], first), tokens[:, 1:]], dim=1)
        self._tree = tokens, first
        self.raw = self.rows = raw
        self._process(tokens, first, tree.parents.expand(tokens.shape))
        return self.rows, hidden

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        self._inner.keep_path(accepted_nodes, starts)
        tokens, first = self._tree
        path = torch.nn.functional.pad(accepted_nodes.clamp(min=0), (1, 0))
        self._note(tokens.gather(1, path), first)  # what is written past the path is written again
        index = path[..., None].expand(-1, -1, self.raw.shape[2])
        processed = self.rows is not self.raw
        self.raw = self.raw.gather(1, index)
        self.rows = self.rows.gather(1, index) if processed else self.raw

    def _note(self, tokens: Tensor, first: Tensor) -> Tensor:
        """Write down the tokens, except those of prompts, whose padding may be anywhere; returns what stands there."""
        places = first[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        new = torch.where(places < self._prompts.shape[1], self._text.gather(1, places), tokens)
        self._text.scatter_(1, places, new)
        return new

    def _process(self, tokens: Tensor, first: Tensor, parents: Tensor) -> None:
        """Process the rows of `tokens`, of which the first stands at `first` and every other after its parent."""
        real, self._real = self._real, None
        if not self._names:
            return
        self.rows = self.raw.to(torch.float32, copy=True)
        goes_on = [not ended for ended in self.ended]
        if real is not None:
            parents = torch.where(real, parents, -1)
            goes_on = [more and its for more, its in zip(goes_on, real[:, 0].tolist(), strict=True)]
        for b, (at, above) in enumerate(zip(first.tolist(), parents.tolist(), strict=True)):
            if goes_on[b] and self._ends.isdisjoint(self._text[b, self._prompts.shape[1] : at].tolist()):
                self._process_one(b, tokens[b], self._text[b, :at], above)

    def _process_one(self, b: int, tokens: Tensor, before: Tensor, parents: list[int]) -> None:
        texts: list[Tensor | None] = []  # up to each token; None after one that is impossible
        known: dict[tuple[int, ...], int] = {}  # by text: nodes that a sequence lacks all have the same id
        for i, (parent, token) in enumerate(zip(parents, tokens.tolist(), strict=True)):
            text = before if i == 0 else texts[parent] if parent >= 0 else None
            if i > 0 and text is not None and not self._drafts and not _may_follow(self.rows[b, parent], token):
                text = None
            if text is not None and token in self._ends and len(text) >= self._prompts.shape[1]:
                text = None
            if text is not None:
                text = torch.cat([text, tokens[i : i + 1]])
                same = known.setdefault(tuple(text[len(before) :].tolist()), i)
                made = self.rows[b, same]
                if same == i:
                    made = self._processors[b](text[None], self.rows[b : b + 1, i])[0]
                self.rows[b, i] = made
            texts.append(text)


def _may_follow(row: Tensor, token: int) -> bool:
    """Whether a token of a processed row can be emitted. If all are barred, those of the highest logit can be; if none
    is above −inf, id 0.
    """
    logit = float(row[token])
    if logit > _IMPOSSIBLE:
        return True
    most = float(row.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).max())
    return token == 0 if most == -math.inf else logit == most
