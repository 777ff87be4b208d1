"""How a decoding loop runs a model: feed rows at each sequence's own position, get their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops._common import LOGIT_DTYPES
from ..tree import DraftTree

PREFILL_ROWS = 512
"""Prompts are fed in pieces of this many rows, so that the mask stays small beside the cache."""

DECODERS = frozenset(
    "cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox gpt_oss granite helium llama "
    "ministral mistral mixtral olmo olmo2 olmo3 phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm "
    "starcoder2".split()
)
"""``config.model_type`` of the decoder-only models served: those whose ragged forward is tested against a full one."""
ENCODER_DECODERS = frozenset({"t5", "mt5"})
"""``config.model_type`` of the encoder-decoders served."""

_LEARNED_POSITIONS = frozenset({"gpt2"})
_ONE_WINDOW = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"})  # one window rules every layer
_FAR = 1 << 24  # a distance every relative-position bucketing puts into its last bucket


@dataclass(frozen=True)
class Prompt:
    """What a generation starts from.

    Attributes
    ----------
    tokens : Tensor
        ``[batch, longest]`` int64 decoder prompts, left-aligned (padding moved to the right and set to 0).
    lengths : Tensor
        ``[batch]`` int64, on the device, >= 1.
    host_tokens : list of ndarray
        The same prompts on the host, one int64 array a sequence, without padding.
    source_tokens, source_mask : Tensor or None
        ``[batch, source]`` ids and mask of the encoder's input; None for a decoder-only model.
    host_source : list of ndarray or None
        The encoder's input on the host, without padding.
    """

    tokens: Tensor
    lengths: Tensor
    host_tokens: list[np.ndarray]
    source_tokens: Tensor | None = None
    source_mask: Tensor | None = None
    host_source: list[np.ndarray] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest decoder prompt."""
        return self.tokens.shape[1]


class Runner(ABC):
    """A model as the loops see it. Subclass it to decode with something that is not a transformers model.

    Sequence `b`'s row at position `i` must attend to that sequence's rows ``0..i`` as last written, and to nothing
    else: rows are overwritten when rejected draft tokens are replaced.

    Attributes
    ----------
    name : str
        For messages.
    vocab_size : int
    device : torch.device
    max_length : int or None
        Longest sequence the model can hold; None: no limit.
    decoder_start : int or None
        None for a decoder-only model; else the id that starts the decoder of an encoder-decoder.
    capturable : bool
        True: `forward` may be captured in a CUDA graph. It then works on the device alone, on the values of its tensor
        arguments and on buffers that stay where they are until `finish`, and what it does on the host depends on the
        shapes, `bound` and `need_logits` alone: a replay does not call it.
    takes_trees : bool
        True: `forward_tree` and `keep_path` work.
    hidden_size : int or None
        Width of `hidden`; None: there is none.
    hidden : Tensor
        ``[batch, n, hidden_size]``: what the LM head was given in the last forward that made logits.
    """

    name: str
    vocab_size: int
    device: torch.device
    max_length: int | None = None
    decoder_start: int | None = None
    capturable: bool = False
    takes_trees: bool = False
    hidden_size: int | None = None
    hidden: Tensor

    @abstractmethod
    def start(self, prompt: Prompt, capacity: int) -> None:
        """Make room for ``prompt.lengths.numel()`` sequences of `capacity` rows each, nothing in them yet."""

    @abstractmethod
    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        """Feed `n` tokens of every sequence.

        Parameters
        ----------
        tokens : Tensor
            ``[batch, n]`` int64.
        starts : Tensor
            ``[batch]`` int64: token `i` of sequence `b` stands at position ``starts[b] + i``.
        bound : int
            Upper bound of ``max(starts) + n``.
        need_logits : bool
            False where only the cache is wanted.

        Returns
        -------
        Tensor or None
            ``[batch, n, vocab]`` logits; may be None if they are not needed.
        """

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int) -> Tensor:
        """Feed a tree of tokens: each attends to what stands before the root, to its ancestors and to itself.

        Parameters
        ----------
        tokens : Tensor
            ``[batch, num_nodes]`` int64; any id where a sequence lacks a node.
        starts : Tensor
            ``[batch]`` int64: the root's position, which is also its row; node i has row ``starts + i`` and position
            ``starts + tree.position_ids[i]``.
        tree : DraftTree
        bound : int
            Upper bound of ``max(starts) + num_nodes``.

        Returns
        -------
        Tensor
            ``[batch, num_nodes, vocab]`` logits.
        """
        raise NotImplementedError(f"{self.name} takes no trees")

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        """After `forward_tree`: bring the rows of the accepted nodes to where a text's rows stand.

        Parameters
        ----------
        accepted_nodes : Tensor
            ``[batch, max_depth]`` int64, −1 padded, without the root: the j-th of them moves to row ``starts + 1 + j``.
        starts : Tensor
            ``[batch]`` int64, as given to `forward_tree`.
        """
        raise NotImplementedError(f"{self.name} takes no trees")

    def prefill(self, prompt: Prompt) -> None:
        """Feed every prompt token but the last, which the first decoding step feeds."""
        for first in range(0, prompt.longest - 1, PREFILL_ROWS):
            rows = min(PREFILL_ROWS, prompt.longest - 1 - first)
            starts = torch.full_like(prompt.lengths, first)
            self.forward(prompt.tokens[:, first : first + rows], starts, first + rows, need_logits=False)

    def finish(self) -> None:  # noqa: B027 - nothing to release is a fine default
        """Release what `start` made."""


def as_runner(model: Any, caller: str) -> Runner:
    """`model` itself if it is a `Runner`, else a `TransformersRunner`; ValueError if it cannot be served."""
    return model if isinstance(model, Runner) else TransformersRunner(model, caller)


class TransformersRunner(Runner):
    """A transformers model on a `specdec_kernels.kv.RaggedCache`.

    Position ids and an additive 4-D mask are explicit, so neither the model nor its cache needs to know the lengths.

    T5's relative-position bias, which knows one position a column for the whole batch, is handled without touching the
    model: the cache reports a length so large that every distance falls into the last bucket, the model's own bias is
    then the same number for all keys of a head, and the mask adds, per sequence and head, the true bias minus that
    number.

    Parameters
    ----------
    model : PreTrainedModel
    caller : str
        Begins error messages.

    Raises
    ------
    ValueError
        A model that cannot be served, by name, with the reason.
    """

    def __init__(self, model: Any, caller: str = "generate") -> None:
        self.name = type(model).__name__
        reason = _why_not(model)
        if reason is not None:
            raise ValueError(f"{caller}: {self.name} cannot be served: {reason}")
        self.model = model
        config = model.config
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.device = model.device
        self.is_encoder_decoder = config.model_type in ENCODER_DECODERS
        self.takes_trees = not self.is_encoder_decoder
        self.hidden_size = model.get_output_embeddings().weight.shape[1]
        # Where positions are scaled to reach further, or know no end, no length is wrong.
        if config.model_type in _LEARNED_POSITIONS or _rope_types(config) == {"default"}:
            self.max_length = config.max_position_embeddings
        self._positions_end = config.model_type in _LEARNED_POSITIONS
        self.capturable = len({parameter.device for parameter in model.parameters()}) == 1
        if self.is_encoder_decoder:
            start = model.generation_config.decoder_start_token_id
            self.decoder_start = config.pad_token_id if start is None else start
        self._windows = _attention_windows(config)

    def start(self, prompt: Prompt, capacity: int) -> None:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        from ..kv import VIEW_STEP, RaggedCache

        config, batch = self.model.config, prompt.lengths.numel()
        capacity = -(-capacity // VIEW_STEP) * VIEW_STEP  # attention kernels like masks of aligned rows
        self._dtype = self.model.dtype
        # What enters the LM head: models differ in what they do to it before, and to the logits after.
        self._watch = self.model.get_output_embeddings().register_forward_pre_hook(self._note_hidden)
        if not self.is_encoder_decoder:
            self._ragged = RaggedCache(config.num_hidden_layers, batch, capacity)
            self._cache: Any = self._ragged
            self._backbone = self.model.base_model
            return
        self._ragged = RaggedCache(config.num_decoder_layers, batch, capacity, reported_length=_FAR)
        self._cache = EncoderDecoderCache(self._ragged, DynamicCache())
        source_mask = prompt.source_mask
        assert source_mask is not None
        encoder = self.model.get_encoder()
        self._encoder_outputs = encoder(input_ids=prompt.source_tokens, attention_mask=source_mask)
        # Made once and 4-D: from a 2-D one the model would build it again at every step, looking at its values.
        hidden = source_mask[:, None, None, :] == 0
        self._source_mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self.device)
        self._source_mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
        self._bias = self._bias_by_distance(capacity)

    def finish(self) -> None:
        if "_ragged" in self.__dict__:
            self._ragged.release()
        if "_watch" in self.__dict__:
            self._watch.remove()
        for name in ("_ragged", "_cache", "_encoder_outputs", "_source_mask", "_bias", "_watch", "hidden"):
            self.__dict__.pop(name, None)

    def _note_hidden(self, head: Any, inputs: tuple[Tensor]) -> None:
        self.hidden = inputs[0]

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        from ..kv import causal_mask

        positions = self._ragged.place(starts, tokens.shape[1], bound)
        visible = self._ragged.visible
        if self.is_encoder_decoder:
            return self.model(
                encoder_outputs=self._encoder_outputs,
                attention_mask=self._source_mask,
                decoder_input_ids=tokens,
                decoder_attention_mask=self._mask_with_bias(positions, visible),
                past_key_values=self._cache,
                use_cache=True,
            ).logits
        masks = {kind: causal_mask(positions, visible, self._dtype, window) for kind, window in self._windows.items()}
        output = self._decode(self.model if need_logits else self._backbone, tokens, positions, masks)
        return output.logits if need_logits else None

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: DraftTree, bound: int) -> Tensor:
        from ..kv import tree_mask

        self._ragged.place(starts, tree.num_nodes, bound)
        visible, positions = self._ragged.visible, starts[:, None] + tree.position_ids
        masks = {kind: tree_mask(tree, starts, visible, self._dtype, window) for kind, window in self._windows.items()}
        logits: Tensor = self._decode(self.model, tokens, positions, masks).logits
        return logits

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        self._ragged.keep_path(accepted_nodes, starts)

    def _decode(self, run: Any, tokens: Tensor, positions: Tensor, masks: dict[str, Tensor]) -> Any:
        """What the decoder-only model, or its backbone, makes of rows whose places in the cache have been said."""
        if self._positions_end:
            assert self.max_length is not None
            # Rows past a sequence's limit are never used, but their positions must still be in the table.
            positions = positions.clamp(max=self.max_length - 1)
        return run(
            input_ids=tokens,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )

    def _bias_by_distance(self, capacity: int) -> Tensor:
        """``[capacity, heads]``: T5's decoder bias at each distance, less the one of its last bucket."""
        attention: Any = self.model.decoder.block[0].layer[0].SelfAttention
        distances = torch.cat([torch.arange(capacity), torch.tensor([_FAR])]).to(self.device)
        buckets = attention._relative_position_bucket(
            -distances,
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias = attention.relative_attention_bias(buckets)
        return bias[:-1] - bias[-1]

    def _mask_with_bias(self, positions: Tensor, visible: int) -> Tensor:
        """``[batch, heads, n, visible]``: the causal mask with every sequence's own relative-position bias."""
        from ..kv import causal_mask

        distances = (positions[:, :, None] - torch.arange(visible, device=positions.device)).clamp_(min=0)
        return self._bias[distances].permute(0, 3, 1, 2) + causal_mask(positions, visible, self._dtype)


def _attention_windows(config: Any) -> dict[str, int | None]:
    """Sliding window of each kind of attention layer, by its name in ``config.layer_types``; None: sees everything."""
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not kinds:
        return {"all": window if config.model_type in _ONE_WINDOW else None}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _why_not(model: Any) -> str | None:
    """Why `model` cannot be served, or None if it can."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type is None or not callable(model):
        return "it is neither a transformers model nor a specdec_kernels.decoding.Runner"
    if model_type not in DECODERS | ENCODER_DECODERS:
        known = ", ".join(sorted(DECODERS | ENCODER_DECODERS))
        return f"model type {model_type!r} is not among those whose cache and positions are understood ({known})"
    if not callable(getattr(model, "get_output_embeddings", None)) or model.get_output_embeddings() is None:
        return "it has no language-model head"
    if model_type not in ENCODER_DECODERS and getattr(config, "add_cross_attention", False):
        return "a decoder with cross attention needs an encoder's states"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention is bidirectional"
    if unknown := set(_attention_windows(config)) - {"all", "full_attention", "sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(unknown))}"
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation not in ("eager", "sdpa"):
        return f"attention implementation {implementation!r} takes no additive mask; load it with 'sdpa' or 'eager'"
    if moving := _rope_types(config) & {"dynamic", "longrope"}:
        # Its frequencies depend on the longest sequence of the batch, so a sequence would depend on its neighbours.
        return f"rotary embedding of type {', '.join(sorted(moving))} changes with the length of the batch"
    if model.dtype not in LOGIT_DTYPES:
        return f"its dtype is {model.dtype}; float32, bfloat16 and float16 are verified"
    if model.training:
        return "it is in training mode; call model.eval()"
    return None


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(r.get("rope_type")) for r in [rope, *nested] if r.get("rope_type")}
