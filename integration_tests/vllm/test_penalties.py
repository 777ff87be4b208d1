"""The penalties of `sk.Processors` against those of vLLM's sampler, by its own functions."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties

import specdec_kernels as sk


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", range(4))
def test_penalties_are_vllms(seed: int, backend: str) -> None:
    """Of prompts and outputs of other lengths, with other penalties side by side."""
    rng = torch.Generator().manual_seed(seed)
    batch, vocab, longest = 4, 300, 40
    x = torch.randn(batch, vocab, generator=rng) * 4
    lengths = torch.randint(1, longest, (batch,), generator=rng)
    mask = torch.arange(longest) < lengths[:, None]
    prompt = torch.randint(0, vocab, (batch, longest), generator=rng)
    output = [torch.randint(0, vocab // 4, (17 * b,), generator=rng).tolist() for b in range(batch)]
    repetition = 0.5 + torch.rand(batch, generator=rng) * 1.5
    frequency, presence = torch.randn(2, batch, generator=rng)
    counts = sk.TokenCounts(prompt, longest * 2, mask)
    counts.add_(torch.tensor([row + [-1] * (17 * batch - len(row)) for row in output]))
    given = sk.Processors(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, token_counts=counts
    )
    ours = sk.warp_probs(x, processors=given, backend=backend)
    its = apply_all_penalties(
        x.clone(), prompt.masked_fill(~mask, vocab), presence, frequency, repetition, output
    ).softmax(-1)
    torch.testing.assert_close(ours, its, rtol=1e-5, atol=1e-9)
    assert not torch.allclose(ours, x.softmax(-1), atol=1e-3)
