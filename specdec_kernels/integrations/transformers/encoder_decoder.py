"""Encoder-decoders (T5) as runners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ...decoding.runner import Prompt
from ...types import TokenMap
from .cache import RaggedCache, causal_mask
from .decoder import TransformersRunner, rounded

_FAR = 1 << 24  # a distance every relative-position bucketing puts into its last bucket


@dataclass(frozen=True)
class _Source:
    """What a generation keeps between forwards.

    Attributes
    ----------
    ragged : RaggedCache
        Of the decoder's own rows.
    cache : EncoderDecoderCache
        Those, and the keys and values of the encoder's output.
    encoded : ModelOutput
        The encoder's output.
    mask : Tensor
        ``[batch, 1, 1, source]``, additive.
    bias : Tensor
        ``[capacity, heads]``, see `_bias_by_distance`.
    """

    ragged: RaggedCache
    cache: EncoderDecoderCache
    encoded: Any
    mask: Tensor
    bias: Tensor


class EncoderDecoderRunner(TransformersRunner):
    """T5 with its decoder on a `RaggedCache`; parameters as of `TransformersRunner`.

    T5's relative-position bias, which knows one position a column for the whole batch, is handled without touching the
    model: the cache reports a length so large that every distance falls into the last bucket, the model's own bias is
    then the same number for all keys of a head, and the mask adds, per sequence and head, the true bias minus that
    number.

    Attributes
    ----------
    encoded : ModelOutput or None
        The encoder's output, if it is known; None: `start` runs the encoder.
    """

    def __init__(self, model: Any, token_map: TokenMap | None = None) -> None:
        super().__init__(model, token_map)
        start = model.generation_config.decoder_start_token_id
        self.decoder_start = model.config.pad_token_id if start is None else start
        self.encoded: Any = None
        self._source: _Source | None = None  # between `start` and `finish`

    def start(self, prompt: Prompt, capacity: int) -> None:
        capacity, batch, source_mask = rounded(capacity), prompt.lengths.numel(), prompt.source_mask
        assert source_mask is not None
        ragged = RaggedCache(self.model.config.num_decoder_layers, batch, capacity, reported_length=_FAR)
        encoded = self.encoded
        if encoded is None:
            encoded = self.model.get_encoder()(input_ids=prompt.source_tokens, attention_mask=source_mask)
        # Made once and 4-D: from a 2-D one the model would build it again at every step, looking at its values.
        hidden = source_mask[:, None, None, :] == 0
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(hidden, torch.finfo(self.dtype).min)
        cache = EncoderDecoderCache(ragged, DynamicCache())
        self._source = _Source(ragged, cache, encoded, mask, self._bias_by_distance(capacity))

    def finish(self) -> None:
        if self._source is not None:
            self._source.ragged.release()
        self._source = None

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        source = self._source
        assert source is not None
        place = source.ragged.place(starts, tokens.shape[1], bound)
        logits: Tensor = self._call(
            self.model,
            tokens.shape[1],
            source.cache,
            encoder_outputs=source.encoded,
            attention_mask=source.mask,
            decoder_input_ids=tokens,
            decoder_attention_mask=self._mask_with_bias(source.bias, place.positions, place.visible),
        ).logits
        return logits

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

    def _mask_with_bias(self, bias: Tensor, positions: Tensor, visible: int) -> Tensor:
        """``[batch, heads, n, visible]``: the causal mask with every sequence's own relative-position bias."""
        distances = (positions[:, :, None] - torch.arange(visible, device=positions.device)).clamp_(min=0)
        return bias[distances].permute(0, 3, 1, 2) + causal_mask(positions, visible, self.dtype)
