"""Every op in the registry's cases and in every way in which its kernels differ, at small sizes, against the reference:
for the sanitizer.

``python -m bench.gpu.exercise --backend cuda --device cuda``. Rows of odd length and odd alignment, one to many
sequences, each strategy of the CUDA kernels; then rows of many tiles, which several blocks share. A token may differ
from the reference's if a border lies within rounding: for each name one in a hundred may, plus one, as none is examined
here. All strategies must give the same result.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from bench.gpu import strategy
from bench.providers import own
from bench.registry import REGISTRY
from specdec_kernels.options import POSITIVE, device

SHAPES = ((1, 5, 4099), (4, 3, 33025), (3, 2, 2049), (40, 2, 700), (150, 1, 257), (4, 3, 33024), (64, 2, 20480))
"""Sequences, draft tokens and vocabulary. The second one's rows are as long as real ones: a run may end after two."""
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
LAWS = {
    "plain": sk.SamplingParams(),
    "cut": sk.SamplingParams(0.8, 20, 0.9),
    "min-p": sk.SamplingParams(1.3, 0, 1.0, 0.02),
}
TARGET_LAWS = (sk.laws.Lossy(0.3, beta="exact"), sk.laws.Opt(0.3), sk.laws.TokenV1(0.1), sk.laws.BiLD(2.0))
MOST_DIFFERENT = 0.01


def calls(shape: tuple[int, int, int], dtype: torch.dtype, device: str, backend: str) -> Iterator[tuple[str, Tensor]]:
    """Every op's integer outputs, on inputs that depend on shape and dtype alone."""
    batch, k, vocab = shape
    rng = torch.Generator().manual_seed(sum(shape))
    target = (3 * torch.randn(batch, k + 1, vocab, generator=rng)).to(dtype).to(device)
    draft = (target[:, :k].float().cpu() + torch.randn(batch, k, vocab, generator=rng)).to(dtype).to(device)
    coins = torch.rand(batch, k + 1, generator=rng).to(device)
    seeds = torch.randint(0, 2**62, (batch,), generator=rng).to(device)
    lengths = torch.randint(-1, k + 1, (batch,), generator=rng)
    keys = sk.noise_keys(seeds, torch.arange(k + 1, device=device).expand(batch, -1), backend=backend)
    yield "uniform_samples", sk.uniform_samples(seeds, torch.zeros_like(seeds), k + 1, backend=backend)
    for name, params in LAWS.items():
        drawn = sk.sample(draft, params, uniform_samples=coins[:, :k], backend=backend)
        yield f"sample {name}", drawn.token
        yield f"sample {name} by keys", sk.sample(draft, params, noise_keys=keys[:, :k], backend=backend).token
        # Not the tokens drawn above: a backend that draws another token would verify another case.
        tokens = draft.float().argmax(-1).where(coins[:, :k] < 0.7, (coins[:, :k] * vocab).long())
        chain: dict[str, Any] = {"params": params, "draft_params": params, "backend": backend}
        yield f"token {name}", sk.verify_chain(target, tokens, draft, uniform_samples=coins, **chain).tokens
        yield f"token {name} by seeds", sk.verify_chain(target, tokens, draft, seeds=seeds, step=3, **chain).tokens
        kept = sk.verify_chain(target, tokens, draft, uniform_samples=coins, draft_stats=drawn.stats, **chain)
        yield f"token {name} draft_stats", kept.tokens
        ragged = lengths.to(device)
        some = sk.verify_chain(
            target, tokens, draft, uniform_samples=coins, num_draft_tokens=ragged, return_acceptance=True, **chain
        )
        yield f"token {name} ragged", some.tokens
        block = sk.verify_chain(target, tokens, draft, uniform_samples=coins, acceptance="block", **chain)
        yield f"block {name}", block.tokens
        one_hot: dict[str, Any] = {"params": params, "backend": backend}
        yield f"one-hot {name}", sk.verify_chain(target, tokens, uniform_samples=coins, **one_hot).tokens
        yield f"match {name}", sk.verify_chain(target, tokens, noise_keys=keys, acceptance="match", **one_hot).tokens
        cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * k
        yield f"packed {name}", sk.verify_packed(
            target.flatten(0, 1), tokens.flatten(), draft.flatten(0, 1), cu_num_draft_tokens=cu,
            max_num_draft_tokens=k, uniform_samples=coins.flatten(), **chain,
        ).tokens  # fmt: skip
    for target_law in TARGET_LAWS:
        for acceptance in ("token", "block"):
            out = sk.verify_chain(
                target, tokens, draft, uniform_samples=coins, acceptance=acceptance, target_law=target_law, **chain
            )
            yield f"{acceptance} {target_law}", out.tokens
    greedy = target.float().argmax(-1)[:, :k]
    yield "greedy", sk.verify_chain(target, greedy, acceptance="greedy", backend=backend).tokens
    yield from trees(target, draft, coins, keys, backend)
    several = sk.sample(draft, noise_keys=keys[:, :k], num_samples=4, backend=backend)
    yield "sample without replacement", several.token
    yield from gathers(batch, dtype, device, backend, rng)
    yield from registered(min(batch, 3), vocab, dtype, device, backend)


def registered(batch: int, vocab: int, dtype: torch.dtype, device: str, backend: str) -> Iterator[tuple[str, Tensor]]:
    """Every op as it is measured, on the same inputs for each backend, including what it writes in place."""
    for op, builder in own.builders(backend).items():
        for case in {case.name: case for case in REGISTRY[op].cases([vocab], [batch])}.values():
            case = replace(case, dtype=dtype, drawn_before=True, device=device)
            rng = torch.Generator().manual_seed(vocab)
            made = REGISTRY[op].make(case, rng)
            for layer in getattr(made, "cache", ()):
                for tensor in layer:
                    tensor.normal_(generator=rng)  # among zeros, as they are timed, no row would be seen to move
            inputs = moved(made, device)
            call = builder(case)
            assert call is not None
            output = call(inputs)
            for place, found in enumerate(integers(output)):
                yield f"{op} {case.name} {place}", found
            for number, layer in enumerate(getattr(inputs, "cache", ())):
                yield f"{op} {case.name} cache {number}", torch.stack(layer)
            if op == "mask_logits_":
                yield f"{op} {case.name} masked", output[1] == -math.inf
            if op == "count_tokens_":
                yield f"{op} {case.name} lists", torch.stack([inputs.token_counts.ids, inputs.token_counts.counts])


def moved(value: Any, device: str) -> Any:
    """Inputs moved to a device."""
    if isinstance(value, (list, tuple)):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, sk.DraftTree):
        return value.to(device)
    if isinstance(value, sk.TokenCounts):
        made = value.clone()
        made.__dict__.update({name: moved(one, device) for name, one in vars(made).items()})
        return made
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value.to(device) if isinstance(value, Tensor) else value


def integers(output: Any) -> Iterator[Tensor]:
    """The integer tensors in an op's output."""
    if isinstance(output, Tensor):
        yield from () if output.is_floating_point() else (output,)
    elif isinstance(output, tuple) or is_dataclass(output):
        for value in output if isinstance(output, tuple) else vars(output).values():
            yield from integers(value)


def gathers(
    batch: int, dtype: torch.dtype, device: str, backend: str, rng: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """`gather_kv_` in caches of several layouts, with rows of 16 bytes and others; a third of the paths is bad."""
    nodes = torch.randint(1, 4, (batch, 7), generator=rng).cumsum(1)
    nodes[::3, 4] = 99
    contexts = torch.randint(-1, 30, (batch,), generator=rng)
    blocks = torch.randperm(5 * batch, generator=rng).view(batch, 5)
    for layout, shape in (
        ("bhsd", (batch, 2, 40, 32)), ("bhsd", (batch, 2, 40, 33)), ("bhds", (batch, 2, 33, 40)),
        ("nshd", (5 * batch, 8, 2, 33)), ("nhsd", (5 * batch, 2, 8, 32)),
    ):  # fmt: skip
        cache = [torch.randn(shape, generator=rng).to(dtype).to(device) for _ in range(4)]
        table = blocks.to(device) if "n" in layout else None
        out = sk.gather_kv_(
            cache, nodes.to(device), contexts.to(device), layout, block_table=table, backend=backend
        )  # fmt: skip
        yield f"gather_kv_ {layout} {shape[-1]}: lengths", out.lengths
        yield f"gather_kv_ {layout} {shape[-1]}: rows", torch.stack(cache)


def trees(target: Tensor, draft: Tensor, coins: Tensor, keys: Tensor, backend: str) -> Iterator[tuple[str, Tensor]]:
    """`verify_tree` by every rule: the same rows as nodes, with two children per node."""
    nodes = target.shape[1]
    tree = sk.DraftTree.from_parents([-1, *((node - 1) // 2 for node in range(1, nodes))]).to(target.device)
    draft = torch.cat([draft, target[:, -1:]], 1)
    likeliest = draft.float().cpu().topk(2, -1).indices.to(draft.device)  # a GPU may pick others among equal ones
    tokens = likeliest[:, tree.parents.clamp_min(0), torch.arange(nodes) % 2].contiguous()
    for name, params in LAWS.items():
        given: dict[str, Any] = {"params": params, "draft_params": params, "backend": backend}
        for acceptance in ("sample", "match", "typical", "recursive", "traversal"):
            noise: dict[str, Any] = {"noise_keys": keys} if acceptance == "match" else {"uniform_samples": coins}
            out = sk.verify_tree(target, tree, tokens, draft, acceptance=acceptance, **noise, **given)
            yield f"tree {acceptance} {name}", out.tokens
    for law in TARGET_LAWS[1:]:
        out = sk.verify_tree(target, tree, tokens, draft, target_law=law, uniform_samples=coins, **given)
        yield f"tree {law}", out.tokens
    yield "tree greedy", sk.verify_tree(target, tree, tokens, acceptance="greedy", backend=backend).tokens


def main(arguments: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.exercise", description=__doc__)
    parse.add_argument("--backend", default="cuda")
    parse.add_argument("--device", type=device, default="cuda")
    parse.add_argument("--most-shapes", type=POSITIVE, default=len(SHAPES))
    options = parse.parse_args(arguments)
    total, different = Counter[str](), Counter[str]()
    unlike = 0
    for number, shape in enumerate(SHAPES[: options.most_shapes]):
        dtype = DTYPES[number % len(DTYPES)]
        expected = dict(calls(shape, dtype, "cpu", "reference"))
        first: dict[str, Tensor] = {}
        for way in strategy.STRATEGIES if options.backend == "cuda" else (strategy.AUTO,):
            with strategy.forced(way) if options.backend == "cuda" else contextlib.nullcontext():
                for name, got in calls(shape, dtype, options.device, options.backend):
                    got = got.cpu()
                    if name not in first:
                        first[name], what = got, "the reference"
                        total[name] += got.shape[0]
                        different[name] += (unequal := differing(got, expected[name]))
                    else:
                        what = "the first strategy"
                        unlike += (unequal := differing(got, first[name]))
                    if unequal:
                        print(
                            f"{unequal} of {got.shape[0]} differ from {what}: {name}, {shape}, {dtype}, strategy {way}"
                        )
        print(f"{total.total()} results with {shape}, {dtype}", flush=True)
    wrong = [name for name, found in different.items() if found > MOST_DIFFERENT * total[name] + 1]
    print(f"{total.total()} results, {different.total()} differ from the reference, {unlike} between strategies")
    print(
        *(f"WRONG: {name}, {different[name]} of {total[name]}" for name in wrong), sep="\n", end="\n" if wrong else ""
    )
    return int(bool(wrong) or unlike > 0)


def differing(got: Tensor, wanted: Tensor) -> int:
    """The number of sequences in which anything differs."""
    return int((got != wanted).reshape(got.shape[0], -1).any(-1).sum())


if __name__ == "__main__":
    sys.exit(main())
