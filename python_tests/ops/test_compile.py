"""Every op passes torch.library.opcheck and compiles whole, as the dispatcher reaches it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests import emulated
from python_tests.ops import chains
from python_tests.ops.calls import CALLS
from python_tests.ops.inputs import logits, outcome, same_bits, seeded
from python_tests.support import Backend, environment


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


def reaching(name: str, route: Backend, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, tuple[Any, ...]]:
    """The op that a call comes to and the arguments that reach it, caught on their way."""
    call, arguments = CALLS[name]()
    caught: list[tuple[Any, ...]] = []
    op = name.split("-")[0].replace("packed", "chain")  # both are one op underneath
    module = importlib.import_module(f"specdec_kernels.ops.{op}")
    real = module.dispatch

    def dispatch(*a: Any) -> Any:
        run = real(*a)
        return lambda *args: (caught.append(args), run(*args))[1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(module, "dispatch", dispatch)
    call(**on(route, arguments))
    assert len(caught) == 1
    return emulated.overload(op) if route.name else getattr(torch.ops.specdec, op).default, caught[0]


@pytest.mark.short(cases=24, emulated=4)
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


@pytest.mark.short(cases=12, emulated=3)
@pytest.mark.parametrize("name", CALLS)
def test_compiles_whole(name: str, route: Backend) -> None:
    """fullgraph=True; the same bits as eager."""
    torch._dynamo.reset()
    call, arguments = CALLS[name]()
    arguments = on(route, arguments)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    same_bits(outcome(compiled, **arguments), outcome(call, **arguments))


def test_compiled_ops_do_not_check() -> None:
    """SPECDEC_CHECK=1 would make them wait for the device, and breaks no graph."""
    torch._dynamo.reset()
    x = torch.tensor([[0.0, torch.nan]])
    expected = sk.row_stats(x)
    with environment(SPECDEC_CHECK="1"):
        same_bits(torch.compile(sk.row_stats, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.long
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
        given = (
            logits(seeded(), batch, 4, 60),
            logits(seeded(), batch, 3, 60),
            torch.arange(batch),
            torch.arange(batch),
        )
        same_bits(compiled(*given), step(*given))
