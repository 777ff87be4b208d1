"""Compiles every Triton kernel for a GPU that is not there, as the ops launch it, and prints what each takes of one.

    python -m python_tests.triton.compile_kernels 90 80 100
    python -m python_tests.triton.compile_kernels 90 --kernel law.scan --cubins FOLDER

for compute capabilities: all forms of the kernels for the first of them, or of one, and their machine code.

The ops run on CPU tensors with Triton's driver replaced by one that only names the target: every launch goes through
Triton's own specialisation of its arguments and is compiled instead of launched. Prints one JSON object a kernel. Runs
in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import time
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import specdec_kernels as sk
from python_tests.ops import chains, trees
from python_tests.ops.inputs import OPS, op_tests
from python_tests.ops.processing import of_any_kind
from specdec_kernels import laws
from specdec_kernels.backends.triton.bundles import Rows

torch.set_num_threads(1)
CUT = sk.SamplingParams(0.8, top_k=50, top_p=0.9, min_p=0.01)
MIN_P_FIRST = sk.SamplingParams(0.8, top_k=50, top_p=0.9, min_p=0.01, min_p_first=True)
BATCH, ROWS = 3, 4
EACH = sk.SamplingParams(torch.ones(BATCH), torch.ones(BATCH, dtype=torch.int64), torch.ones(BATCH), torch.ones(BATCH))
EOS = torch.zeros(2, dtype=torch.int64)
CALLED = {
    "row_stats", "warp_probs", "uniform_samples", "noise_keys", "sample", "verify_chain", "verify_packed",
    "verify_tree", "gather_kv_", "token_logprobs",
}  # fmt: skip
"""Ops with calls of their own below, in every form of their kernels; of others those for test_compile.py are made."""


def calls(vocab: int, everything: bool) -> None:
    """Calls that between them launch every kernel; `everything`: in every form that differs in more than a size."""
    for op in set(OPS) - CALLED:
        for make in op_tests(op).CALLS.values():
            getattr(sk, op)(**make(), backend="triton")
    seeds, keys = torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH, ROWS, dtype=torch.int64)
    for step in (0, seeds) if everything else (seeds,):
        sk.uniform_samples(seeds, step, ROWS, backend="triton")
        sk.noise_keys(seeds, keys, step=step, backend="triton")
    gather(torch.bfloat16, "bhsd", 64)
    if everything:
        for dtype in (torch.float8_e4m3fn, torch.float32):
            gather(dtype, ("bhds", "bhsd"), 4)
            gather(dtype, "nshd", 4, block_table=torch.tensor([[2, 4, 5], [1, 3, -1]], dtype=torch.int32))
    x = torch.zeros(BATCH, ROWS, vocab, dtype=torch.bfloat16)
    sk.sample(x, EACH, noise_keys=keys, num_samples=4, backend="triton")
    given = of_any_kind(torch.Generator(), BATCH, (BATCH, ROWS), vocab)
    sk.sample(x, EACH, processors=given, noise_keys=keys, num_samples=4, backend="triton")
    walk_tree(vocab, "recursive", "full", processors=given)
    sk.token_logprobs(x, keys, EACH, rows=keys, num_tokens=seeds, num_top=5, backend="triton")
    sk.token_logprobs(x, keys, EACH, processors=given, rows=keys, num_top=5, backend="triton")
    for law in (None, laws.TokenV1(0.1)):
        verify(vocab, "block", "full", packed=True, law=law)
        walk_tree(vocab, "sample", "full", law=law)
    for acceptance in ("typical", "recursive"):
        walk_tree(vocab, acceptance, "full")
    verify(vocab, "token", "one_hot", packed=True, seeds={"seeds": seeds, "step": seeds})
    if not everything:
        return
    for params in (None, CUT, sk.SamplingParams(0.0)):
        sk.row_stats(x, params, backend="triton")
    sk.warp_probs(x, MIN_P_FIRST, backend="triton")
    for dtype in (torch.float32, torch.float16):
        sk.mask_logits_(x.to(dtype), CUT, backend="triton")
    for token_map in (None, sk.TokenMap(torch.arange(vocab))):
        sk.sample(x, uniform_samples=keys.float(), draft_token_map=token_map, backend="triton")
        sk.sample(x, noise_keys=keys, num_samples=4, draft_token_map=token_map, backend="triton")
    sk.sample(x, noise_keys=keys, backend="triton")
    sk.sample(x, sk.SamplingParams(0.0), uniform_samples=keys.float(), backend="triton")
    for params in (None, sk.SamplingParams(0.0)):
        sk.row_stats(x, params, processors=given, backend="triton")
    sk.warp_probs(x, CUT, processors=given, backend="triton")
    sk.sample(x, CUT, processors=given, uniform_samples=keys.float(), backend="triton")
    for acceptance, kind in product(("token", "block", "match"), ("full", "one_hot")):
        verify(vocab, acceptance, kind, processors=given)
    verify(vocab, "block", "full", law=laws.Opt(0.3), processors=given)
    for acceptance in ("sample", "typical"):
        walk_tree(vocab, acceptance, "full" if acceptance == "typical" else "none", processors=given)
    for acceptance, kind in product(("token", "block"), ("full", "probs", "stats", "reduced")):
        verify(vocab, acceptance, kind, packed=kind != "stats")
    for acceptance in ("token", "match", "greedy"):
        verify(vocab, acceptance, "one_hot")
    verify(vocab, "token", "one_hot", seeds={"seeds": seeds, "step": 3})
    verify(vocab, "match", "one_hot", seeds={"seeds": seeds, "step": 3, "positions": keys})
    for acceptance in ("sample", "greedy", "match"):
        walk_tree(vocab, acceptance, "none")
    for acceptance, kind in product(("recursive", "traversal"), ("full", "probs", "stats", "reduced")):
        walk_tree(vocab, acceptance, kind)
    for law in (laws.Opt(0.3, bonus="cascade"), laws.TokenV1(0.1)):
        walk_tree(vocab, "sample", "reduced", law=law)
        verify(vocab, "token", "stats", packed=True, law=law)
        verify(vocab, "block", "reduced", law=law)
    for law in (laws.TokenV3(0.7), laws.BiLD(1.0), laws.Lossy(0.3, beta="exact")):
        verify(vocab, "block", "full", law=law)
    verify(vocab, "token", "one_hot", law=laws.Lossy(0.3))
    for dtype in (torch.float32, torch.float16):
        sk.row_stats(x.to(dtype), CUT, backend="triton")
        sk.token_logprobs(x.to(dtype), keys, CUT, backend="triton")
        verify(vocab, "token", "full", dtype=dtype)
        for acceptance in ("sample", "typical", "recursive", "traversal"):
            walk_tree(vocab, acceptance, "full", dtype=dtype)
    verify(vocab, "block", "reduced", dtype=torch.float32)
    adapters(vocab)


def adapters(vocab: int) -> None:
    """Calls that take the target's probabilities instead of its logits, or the draft's rows by an index."""
    params = sk.SamplingParams(top_k=50, top_p=0.9, min_p=0.01)
    x = torch.zeros(BATCH, ROWS, vocab)
    sk.sample(None, params, probs=x, uniform_samples=x[..., 0], backend="triton")
    index, keys = torch.arange(BATCH, dtype=torch.int32), torch.zeros(BATCH, ROWS, dtype=torch.int64)
    sk.sample(x, params, row_index=index, uniform_samples=x[..., 0], backend="triton")
    sk.sample(x, params, row_index=index.long(), noise_keys=keys, num_samples=4, backend="triton")
    made = chains.make(torch.Generator(), BATCH, ROWS - 1, vocab, kind="probs", acceptance="block")
    indexed = {**made, "draft_index": index}
    sk.verify_chain(**indexed, eos_token_ids=EOS, return_acceptance=True, backend="triton")
    for acceptance in ("token", "block", "match"):
        given = chains.with_bonus(chains.make(torch.Generator(), BATCH, 2, vocab, acceptance=acceptance), index)
        sk.verify_chain(**given, backend="triton")
    made = chains.with_target_probs(made, params)
    sk.verify_chain(**made, eos_token_ids=EOS, return_acceptance=True, backend="triton")
    sk.verify_chain(**made | {"target_law": laws.Lossy(0.3, beta="exact")}, backend="triton")
    sk.verify_tree(**trees.make(1, BATCH, ROWS, vocab, acceptance="sample", kind="none"), backend="triton")  # no ends
    for acceptance in ("sample", "recursive"):
        tree = trees.make(1, BATCH, ROWS, vocab, acceptance=acceptance, kind="probs")
        sk.verify_tree(**chains.with_target_probs(tree, params), eos_token_ids=EOS, backend="triton")


def gather(dtype: torch.dtype, layout: str | tuple[str, str], layers: int, **table: torch.Tensor) -> None:
    """Move the paths of two sequences in a cache of 2 heads, 64 rows and 128 elements."""
    sizes = {"b": 2, "n": 9, "h": 2, "s": 64, "d": 128}
    pair = (layout, layout) if isinstance(layout, str) else layout
    cache = [tuple(torch.zeros([sizes[k] for k in one], dtype=dtype) for one in pair) for _ in range(layers)]
    nodes = torch.tensor([[2, 4, 5], [1, 3, -1]])
    sk.gather_kv_(cache, nodes, nodes[:, 0].int(), layout=layout, **table, backend="triton")


def verify(
    vocab: int,
    acceptance: str,
    kind: str,
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seeds: dict[str, Any] | None = None,
    processors: sk.Processors | None = None,
    **law: Any,
) -> None:
    """A verify step of chains; with `seeds` it makes its own random numbers."""
    rng, counts = torch.Generator(), torch.full((BATCH,), ROWS - 1, dtype=torch.int32)
    made = chains.make(rng, BATCH, ROWS - 1, vocab, acceptance=acceptance, kind=kind, dtype=dtype, **law)
    if seeds is not None:
        made = {**chains.without_numbers(made), **seeds}
    more: dict[str, Any] = {
        "num_draft_tokens": counts,
        "eos_token_ids": EOS,
        "return_acceptance": True,
        "processors": processors,
    }
    if packed:
        sk.verify_packed(**chains.packed(made, counts), **more, backend="triton")
    else:
        sk.verify_chain(**made, **more, backend="triton")


def walk_tree(
    vocab: int,
    acceptance: str,
    kind: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    processors: sk.Processors | None = None,
    **law: Any,
) -> None:
    """A verify step of trees."""
    made = trees.make(1, BATCH, ROWS, vocab, acceptance=acceptance, kind=kind, dtype=dtype, **law)
    sk.verify_tree(**made, eos_token_ids=EOS, processors=processors, backend="triton")


class Compiled:
    """Compiles what is launched, once each."""

    def __init__(self, capability: int, only: str = ".*", cubins: Path | None = None) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.only, self.cubins = only, cubins
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
            name = f"{Path(kernel.fn.__code__.co_filename).stem}.{kernel.fn.__name__}"
            if not re.fullmatch(self.only, name):
                return
            began, report = time.perf_counter(), io.StringIO()
            with redirect_stdout(report):
                compiled = self.launch(kernel, *args, grid=grid, warmup=True, **constants)
            if compiled.hash in self.found:
                return
            self.variants[name] = self.variants.get(name, 0) + 1
            took = {"kernel": name, "capability": compiled.metadata.target.arch, "variant": self.variants[name]}
            took |= resources(compiled.metadata, report.getvalue())
            if self.cubins is not None:
                processed = any(isinstance(arg, Rows) and arg.overlay.flags is not None for arg in args)
                form = f"{self.target.arch}.{self.variants[name]}{'.processed' * processed}"
                (self.cubins / f"{name}.{form}.cubin").write_bytes(compiled.asm["cubin"])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", type=int, nargs="+")
    parser.add_argument("--kernel", default=".*", help="those that match this, as module[.]function")
    parser.add_argument("--cubins", type=Path, help="a folder for the machine code")
    args = parser.parse_args()
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is set"
    for capability in reversed(args.capabilities):
        served = mock.patch("specdec_kernels.backends.triton.why_not", return_value=None)
        with served, Compiled(capability, args.kernel, args.cubins) as compiled:
            calls(128256, everything=capability == args.capabilities[0])
        if not compiled.found:
            parser.error(f"no kernel is called {args.kernel}")
        for row in compiled.found.values():
            print(json.dumps(row))


if __name__ == "__main__":
    main()
