"""Compiles every Triton kernel for a GPU that is not there, as the ops launch it, and prints what each takes of one.

    python compile_kernels.py 90 80 100      # compute capabilities: all forms of the kernels for the first of them

The ops run on CPU tensors with Triton's driver replaced by one that only names the target: every launch goes through
Triton's own specialisation of its arguments and is compiled instead of launched. Prints one JSON object a kernel. Runs
in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import specdec_kernels as sk
from specdec_kernels import laws
from specdec_kernels.backends.triton import (
    gather_kv_,
    noise_keys,
    row_stats,
    sample,
    uniform_samples,
    verify_chain,
    verify_packed,
    verify_tree,
    warp_probs,
)  # fmt: skip
from specdec_kernels.ops.verify_chain import shared_arguments
from specdec_kernels.ops.verify_tree import ACCEPTANCES

torch.set_num_threads(1)
PLAIN = sk.SamplingParams()
CUT = sk.SamplingParams(0.8, top_k=50, top_p=0.9, min_p=0.01)
MIN_P_FIRST = sk.SamplingParams(0.8, top_k=50, top_p=0.9, min_p=0.01, min_p_first=True)
GREEDY = sk.SamplingParams(0.0)


def each(batch: int) -> sk.SamplingParams:
    """A value of every parameter for each sequence."""
    ones = torch.ones(batch)
    return sk.SamplingParams(ones, torch.ones(batch, dtype=torch.int64), ones, ones)


def calls(vocab: int, everything: bool) -> None:
    """Calls that between them launch every kernel; `everything`: in every form that differs in more than a size."""
    batch, n = 3, 4
    seeds, keys = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, n, dtype=torch.int64)
    for steps in (None, seeds) if everything else (seeds,):
        uniform_samples.uniform_samples(seeds, steps, 0, n, 1)
        noise_keys.noise_keys(seeds, keys, steps, 0, 1)
    gather(torch.bfloat16, ("bhsd", "bhsd"), 64, False)
    if everything:
        for dtype in (torch.float8_e4m3fn, torch.float32):
            gather(dtype, ("bhds", "bhsd"), 4, False)
            gather(dtype, ("nshd", "nshd"), 4, True)
    x, ids = torch.zeros(batch, n, vocab, dtype=torch.bfloat16), torch.arange(vocab)
    sample.sample(x, None, keys, 4, None, *each(batch)._flat)
    for law in (None, laws.TokenV1(0.1)):
        verify(x, "block", "logits", True, law)
        walk_tree(x, "sample", "logits", law)
    for acceptance in ("typical", "recursive"):
        walk_tree(x, acceptance, "logits")
    if not everything:
        return
    for params in (PLAIN, CUT, GREEDY):
        row_stats.row_stats(x, True, *params._flat)
    warp_probs.warp_probs(x, *MIN_P_FIRST._flat)
    for mapping in (None, ids):
        sample.sample(x, keys.float(), None, 1, mapping, *PLAIN._flat)
        sample.sample(x, None, keys, 4, mapping, *PLAIN._flat)
    sample.sample(x, None, keys, 1, None, *PLAIN._flat)
    for acceptance, kind in product(("token", "block"), ("logits", "probs", "stats", "mapped")):
        verify(x, acceptance, kind, kind != "stats")
    for acceptance in ("token", "match", "greedy"):
        verify(x, acceptance, "one_hot", False)
    for acceptance in ("sample", "greedy", "match", "traversal"):
        walk_tree(x, acceptance, "logits")
    for acceptance, kind in product(("recursive", "traversal"), ("probs", "stats", "mapped")):
        walk_tree(x, acceptance, kind)
    for law in (laws.Opt(0.3, bonus="cascade"), laws.TokenV1(0.1)):
        walk_tree(x, "sample", "mapped", law)
        verify(x, "token", "stats", True, law)
        verify(x, "block", "mapped", False, law)
    for law in (laws.TokenV3(0.7), laws.BiLD(1.0), laws.Lossy(0.3, beta="exact")):
        verify(x, "block", "logits", False, law)
    verify(x, "token", "one_hot", False, laws.Lossy(0.3))
    for dtype in (torch.float32, torch.float16):
        x = x.to(dtype)
        row_stats.row_stats(x, False, *CUT._flat)
        verify(x, "token", "logits", False)
        for acceptance in ("sample", "typical", "recursive", "traversal"):
            walk_tree(x, acceptance, "logits")
    verify(x.float(), "block", "mapped", False)


def gather(dtype: torch.dtype, layouts: tuple[str, str], layers: int, paged: bool) -> None:
    """Move the paths of two sequences in a cache of 2 heads, 64 rows and 128 elements."""
    sizes = {"b": 2, "n": 9, "h": 2, "s": 64, "d": 128}
    tensors = [torch.zeros([sizes[k] for k in layout], dtype=dtype) for _ in range(layers) for layout in layouts]
    kinds = [[max(0, " hsd".find(k)) for k in layout] for layout in layouts]
    nodes = torch.tensor([[2, 4, 5], [1, 3, -1]])
    gather_kv_.gather_kv_(tensors, *kinds, nodes, nodes[:, 0].int(), nodes.int() if paged else None)


def verify(x: torch.Tensor, acceptance: str, kind: str, packed: bool, law: laws.TargetLaw | None = None) -> None:
    """A verify step on target logits `x` ``[batch, num_draft + 1, vocab]``."""
    batch, rows, vocab = x.shape
    shape: tuple[int, ...] = (batch, rows - 1)
    given: dict[str, Any] = {"return_acceptance": True, "draft_token_map": None, "draft_stats": None}
    if packed:
        shape = (batch * (rows - 1),)
    uniforms = torch.zeros((batch * rows,) if packed else (batch, rows))
    draft_shape = shape if law is None or not law.cascade_bonus else uniforms.shape
    draft = x.new_zeros(*draft_shape, vocab)
    if kind == "mapped":
        given["draft_token_map"] = sk.TokenMap(torch.arange(vocab))
    if kind == "stats":
        flags = torch.zeros(draft_shape, dtype=torch.int32)
        given["draft_stats"] = sk.RowStats(torch.zeros(*draft_shape, 6), flags.long(), flags)
    target = x.flatten(0, 1) if packed else x
    names = ("rows",) * len(shape)
    shared = shared_arguments(
        "compile", target, batch, vocab, shape, names, tuple(uniforms.shape), names,
        draft_logits=None if kind in ("probs", "one_hot") else draft,
        draft_probs=draft.float() if kind == "probs" else None,
        uniform_samples=uniforms if acceptance in ("token", "block") else None,
        noise_keys=uniforms.long() if acceptance == "match" else None, params=PLAIN, draft_params=PLAIN,
        acceptance=acceptance, target_law=law, num_draft_tokens=torch.zeros(batch, dtype=torch.int32),
        eos_token_ids=torch.zeros(2, dtype=torch.int64), **given,
    )  # fmt: skip
    tokens = torch.zeros(shape, dtype=torch.int64)
    if packed:
        cu = torch.arange(batch + 1, dtype=torch.int32) * (rows - 1)
        verify_packed.verify_packed(target, tokens, cu, rows - 1, *shared)
    else:
        verify_chain.verify_chain(target, tokens, *shared)


def walk_tree(x: torch.Tensor, acceptance: str, kind: str, law: laws.TargetLaw | None = None) -> None:
    """A verify step of trees on target logits `x` ``[batch, num_nodes, vocab]``."""
    batch, num_nodes, vocab = x.shape
    tree = sk.DraftTree.from_parents([[-1, *(node // 2 for node in range(num_nodes - 1))]] * batch)
    coins, flags = torch.zeros(batch, num_nodes), torch.zeros(batch, num_nodes, dtype=torch.int32)
    stats = (torch.zeros(batch, num_nodes, 6), flags.long(), flags) if kind == "stats" else (None,) * 3
    verify_tree.verify_tree(
        x, flags.long(), tree.parents, tree.first_child, tree.next_sibling, tree.status, tree.max_depth,
        None if kind == "probs" else x, x.float() if kind == "probs" else None, *stats,
        None if acceptance in ("greedy", "match") else coins, coins.long() if acceptance == "match" else None,
        torch.arange(vocab) if kind == "mapped" else None, torch.zeros(2, dtype=torch.int64), ACCEPTANCES[acceptance],
        0.09, 0.3, *(laws.LOSSLESS if law is None else law.flat()), *PLAIN._flat, *PLAIN._flat,
    )  # fmt: skip


class Compiled:
    """Compiles what is launched, once each."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.found: dict[str, dict[str, Any]] = {}
        self.variants: dict[str, int] = {}

    def __enter__(self) -> Compiled:
        self.launch = JITFunction.run
        JITFunction.run = self.compile  # type: ignore[method-assign]
        driver = SimpleNamespace(
            get_current_target=lambda: self.target,
            get_current_device=lambda: self.target.arch,  # what a kernel remembers of a device is not another one's
            get_current_stream=lambda device: 0,
        )
        triton.runtime.driver.set_active(driver)
        triton.knobs.nvidia.dump_ptxas_log = True
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self.launch  # type: ignore[method-assign]

    @property
    def compile(self) -> Any:
        def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
            began, report = time.perf_counter(), io.StringIO()
            with redirect_stdout(report):
                compiled = self.launch(kernel, *args, grid=grid, warmup=True, **constants)
            if compiled.hash in self.found:
                return
            name = f"{Path(kernel.fn.__code__.co_filename).stem}.{kernel.fn.__name__}"
            self.variants[name] = self.variants.get(name, 0) + 1
            took = {"kernel": name, "capability": compiled.metadata.target.arch, "variant": self.variants[name]}
            took |= resources(compiled.metadata, report.getvalue())
            self.found[compiled.hash] = {**took, "seconds": time.perf_counter() - began}

        return run


def resources(metadata: Any, report: str) -> dict[str, int]:
    """Registers, shared memory and spills of a compiled kernel, as ptxas said them when Triton called it."""

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        assert match, f"ptxas reports otherwise: {report}"
        return int(match[1])

    return {
        "warps": metadata.num_warps,
        "registers": number(r"Used (\d+) registers"),
        "shared": metadata.shared,
        "stack": number(r"(\d+) bytes stack frame"),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
    }


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is set"
    for everything, capability in enumerate(reversed(sys.argv[1:])):
        with Compiled(int(capability)) as compiled:
            calls(128256, everything == len(sys.argv) - 2)
        for row in compiled.found.values():
            print(json.dumps(row))
