"""Verification with a vocabulary-parallel LM head: each rank computes its columns of the logits; none gathers them.

    torchrun --standalone --nproc-per-node 2 examples/sharded_vocabulary.py

On GPUs: "nccl", `torch.cuda.set_device(rank)`, and every tensor, `seeds` too, on the GPU.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

import specdec_kernels as sk

BATCH, NUM_DRAFT, WIDTH, VOCAB = 4, 5, 64, 32_000
SAMPLING = sk.SamplingParams(temperature=0.8, top_k=50, top_p=0.95)


def columns_of(rank: int, world: int) -> slice:
    """The ids of a rank: any borders will do."""
    return slice(VOCAB * rank // world, VOCAB * (rank + 1) // world)


class Rank:
    """A rank's part of a made-up model: the hidden states, which all ranks share, and its rows of the LM heads."""

    def __init__(self, rank: int, world: int) -> None:
        everywhere, mine = torch.Generator().manual_seed(1), columns_of(rank, world)
        self.states = everywhere
        self.head = torch.randn(VOCAB, WIDTH, generator=everywhere)[mine]
        self.draft_head = self.head + 0.1 * torch.randn(VOCAB, WIDTH, generator=everywhere)[mine]

    def logits(self) -> tuple[Tensor, Tensor]:
        """This rank's columns of the next step's target and draft logits."""
        hidden = torch.randn(BATCH, NUM_DRAFT + 1, WIDTH, generator=self.states)
        return hidden @ self.head.T, hidden[:, :NUM_DRAFT] @ self.draft_head.T


def draft_tokens(draft_logits: Tensor, seeds: Tensor, step: int) -> Tensor:
    """Draft tokens are drawn where the draft's logits are whole; here by rank 0, from a copy of all."""
    return sk.sample(draft_logits, SAMPLING, uniform_samples=sk.uniform_samples(seeds, step, NUM_DRAFT, "draft")).token


def main(steps: int = 3) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, seeds = Rank(rank, world), torch.arange(BATCH)
    whole = [Rank(r, world) for r in range(world)] if rank == 0 else []  # stands in for a draft model of its own
    for step in range(steps):
        target, draft = model.logits()
        tokens = torch.zeros(BATCH, NUM_DRAFT, dtype=torch.int64)
        if rank == 0:
            tokens = draft_tokens(torch.cat([other.logits()[1] for other in whole], -1), seeds, step)
        dist.broadcast(tokens, 0)
        out = sk.distributed.verify_chain(
            target, tokens, draft, seeds=seeds, step=step, params=SAMPLING, draft_params=SAMPLING
        )
        if rank == world - 1:
            print(out.tokens.tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(__doc__)
    main()
