"""Every op passes torch.library.opcheck and compiles whole, as the dispatcher reaches it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests import emulated
from python_tests.ops import chains, trees
from python_tests.ops.inputs import logits, same_bits
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.laws import TargetLaw

SCALARS = sk.SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.01)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else []), emulated.NAME])
def route(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend that the dispatcher takes on each device, and the emulated CUDA kernels in their own namespace."""
    if request.param != emulated.NAME:
        yield Backend("", request.param)
    elif reason := emulated.unavailable():
        pytest.skip(reason)
    else:
        with emulated.running():
            yield Backend(emulated.NAME, "cpu", strategy="auto")


def on(backend: Backend, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that the backend serves."""
    return {**chains.on(backend, arguments), "backend": backend.name or None}


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def per_row(batch: int) -> sk.SamplingParams:
    return sk.SamplingParams(torch.linspace(0, 1.5, batch), torch.arange(batch), torch.linspace(0.5, 1, batch), 0.01)


def chain(
    acceptance: str, kind: str, batch: int = 5, vocab: int = 40, law: TargetLaw | None = None, **more: Any
) -> chains.Arguments:
    made = chains.make(
        rng(), batch, 3, vocab, acceptance=acceptance, kind=kind, params=per_row(batch), draft_params=SCALARS, law=law
    )
    return {**made, "eos_token_ids": torch.tensor([3]), **more}


def flattened(arguments: chains.Arguments) -> chains.Arguments:
    return chains.packed(arguments, torch.arange(len(arguments["draft_tokens"])) % 4)


def tree(acceptance: str, kind: str = "full", **more: Any) -> trees.Arguments:
    return {
        **trees.make(3, 5, 7, 40, acceptance=acceptance, kind=kind, params=per_row(5), draft_params=SCALARS, **more),
        "eos_token_ids": torch.tensor([3]),
    }


PATHS = {"accepted_nodes": torch.tensor([[2, 3, 5], [1, 4, -1]]), "context_lengths": torch.tensor([4, 0])}
CALLS: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "row_stats": lambda: (sk.row_stats, {"logits": logits(rng(), 4, 3, 50), "params": per_row(4)}),
    "row_stats-1d": lambda: (sk.row_stats, {"logits": logits(rng(), 50, dtype=torch.bfloat16)}),
    "warp_probs": lambda: (sk.warp_probs, {"logits": logits(rng(), 4, 50), "params": SCALARS}),
    "uniform_samples": lambda: (sk.uniform_samples, {"seeds": torch.arange(5), "step": 3, "num": 7}),
    "uniform_samples-steps": lambda: (
        sk.uniform_samples, {"seeds": torch.arange(5), "step": torch.arange(5), "num": 7, "purpose": "draft"},
    ),
    "noise_keys": lambda: (sk.noise_keys, {"seeds": torch.arange(5), "positions": torch.arange(15).view(5, 3)}),
    "sample": lambda: (
        sk.sample,
        {"logits": logits(rng(), 4, 50), "params": per_row(4), "uniform_samples": torch.rand(4, generator=rng())},
    ),
    "sample-keys": lambda: (
        sk.sample, {"logits": logits(rng(), 4, 2, 50), "noise_keys": torch.arange(8).view(4, 2), "num_samples": 5},
    ),
    "verify_chain-token": lambda: (sk.verify_chain, chain("token", "full")),
    "verify_chain-block": lambda: (sk.verify_chain, chain("block", "reduced", return_acceptance=True)),
    "verify_chain-match": lambda: (sk.verify_chain, chain("match", "one_hot")),
    "verify_chain-greedy": lambda: (sk.verify_chain, chain("greedy", "one_hot", num_draft_tokens=torch.arange(5) - 1)),
    "verify_chain-lossy": lambda: (sk.verify_chain, chain("block", "probs", law=laws.Lossy(0.3, beta="exact"))),
    "verify_chain-opt": lambda: (sk.verify_chain, chain("token", "reduced", law=laws.Opt(0.4, bonus="cascade"))),
    "verify_packed-token": lambda: (sk.verify_packed, flattened(chain("token", "probs"))),
    "verify_packed-block": lambda: (sk.verify_packed, flattened(chain("block", "stats", return_acceptance=True))),
    "verify_packed-cascade": lambda: (
        sk.verify_packed, flattened(chain("block", "stats", law=laws.TokenV1(0.3, bonus="cascade"))),
    ),
    "verify_tree-sample": lambda: (sk.verify_tree, tree("sample", "none", per_sequence=False)),
    "verify_tree-greedy": lambda: (sk.verify_tree, tree("greedy", "none")),
    "verify_tree-match": lambda: (sk.verify_tree, tree("match", "none")),
    "verify_tree-typical": lambda: (sk.verify_tree, tree("typical", "none")),
    "verify_tree-recursive": lambda: (sk.verify_tree, tree("recursive", "reduced")),
    "verify_tree-traversal": lambda: (sk.verify_tree, tree("traversal", "stats", per_sequence=False)),
    "verify_tree-traversal-probs": lambda: (sk.verify_tree, tree("traversal", "probs")),
    "verify_tree-opt": lambda: (sk.verify_tree, tree("sample", law=laws.Opt(0.4, bonus="cascade"))),
    "gather_kv_": lambda: (sk.gather_kv_, {"cache": [(torch.rand(2, 3, 12, 8), torch.rand(2, 3, 12, 6))], **PATHS}),
    "gather_kv_-bloom": lambda: (
        sk.gather_kv_,
        {"cache": [torch.rand(6, 8, 12), torch.rand(6, 12, 8)], "layout": ("(bh)ds", "(bh)sd"), **PATHS},
    ),
    "gather_kv_-paged": lambda: (
        sk.gather_kv_,
        {"cache": [torch.rand(7, 2, 4, 3, 8)], "layout": "n2shd", **PATHS,
         "block_table": torch.tensor([[3, 0, 5], [1, 6, 2]], dtype=torch.int32)},
    ),
}  # fmt: skip


def reaching(name: str, route: Backend, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[Any, ...]]:
    """The op that a call comes to and the arguments that reach it, caught on their way."""
    call, arguments = CALLS[name]()
    caught: list[tuple[Any, ...]] = []
    op = name.split("-")[0]
    module = importlib.import_module(f"specdec_kernels.ops.{op}")
    real = module.dispatch

    def dispatch(*a: Any) -> Any:
        run = real(*a)
        return lambda *args: (caught.append(args), run(*args))[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(module, "dispatch", dispatch)
    call(**on(route, arguments))
    assert len(caught) == 1
    return emulated.overload(op) if route.name else getattr(torch.ops.specdec, op).default, caught[0]


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str, route: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of opcheck's default tests."""
    assert set(torch.library.opcheck(*reaching(name, route, monkeypatch)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", ["verify_chain-opt", "verify_tree-opt"])
def test_direct_calls_never_read_rows_that_are_not_there(
    name: str, route: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cascade looks at the draft's logits; validation, which would say so in better words, is not in the op."""
    op, given = reaching(name, route, monkeypatch)
    names = [argument.name for argument in op._schema.arguments]
    without = [
        None if name in ("draft_logits", "target_to_draft") else v for name, v in zip(names, given, strict=False)
    ]
    with pytest.raises(RuntimeError, match="this law needs draft_logits"):
        op(*without)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_whole(name: str, route: Backend) -> None:
    """fullgraph=True; the same bits as eager; with scalars changed in between."""
    torch._dynamo.reset()
    call, arguments = CALLS[name]()
    arguments = on(route, arguments)

    def function(**given: Any) -> list[torch.Tensor]:
        return tensors_of(call(**given))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    same_bits(compiled(**arguments), function(**arguments))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_with_inductor(dynamic: bool) -> None:
    """A whole step: draft, verify, and arithmetic on what comes out, at several batch sizes."""
    torch._dynamo.reset()
    params = sk.SamplingParams(0.9, top_p=0.9)

    def step(target: torch.Tensor, draft: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        drawn = sk.sample(draft, params, uniform_samples=sk.uniform_samples(seeds, steps, 3, purpose="draft"))
        out = sk.verify_chain(
            target, drawn.token, draft, uniform_samples=sk.uniform_samples(seeds, steps, 4), params=params,
            draft_params=params, draft_stats=drawn.stats, acceptance="block",
        )  # fmt: skip
        return out.tokens * 2 + out.num_tokens[:, None]

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for batch in (4, 7) if dynamic else (4,):
        given = (logits(rng(), batch, 4, 60), logits(rng(), batch, 3, 60), torch.arange(batch), torch.arange(batch))
        same_bits(compiled(*given), step(*given))


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, sk.Draw):
        return [value.token, value.log_prob, value.stats.values]
    if isinstance(value, sk.VerifyOutput):
        nodes = [] if value.accepted_nodes is None else [value.accepted_nodes]
        return [value.tokens, value.num_accepted, value.num_tokens, value.status, *nodes]
    if isinstance(value, sk.RowStats):
        return [value.values, value.argmax, value.status]
    if isinstance(value, sk.GatherOutput):
        return [*value]
    return [value]
