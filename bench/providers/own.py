"""This package's backends, through the public functions; random numbers are drawn within the call, as in a loop."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import specdec_kernels as sk
from specdec_kernels.backends import FUNCTIONS, automatic
from specdec_kernels.config import settings

from ..gpu import strategy
from ..inputs import NUM_TOP, Case, ChainInputs, PackedInputs, RowInputs, ShardInputs, TreeInputs
from ..registry import REGISTRY
from ..timing import Call


def asked_for(case: Case, backend: str) -> str | None:
    """`backend`, or None if that selects the same one: what users call, without the lookup of a name."""
    same = settings().backend is None and automatic(FUNCTIONS[case.op], torch.device(case.device)) == backend
    return None if same else backend


def with_strategy(name: str, overlap: bool = True) -> Mapping[str, Callable[[Case], Call | None]]:
    """`verify_chain` of the CUDA kernels, with their work laid out in one of the ways of csrc/cuda/strategy.h."""

    def verify_chain(case: Case) -> Call | None:
        automatic_call = builders("cuda")["verify_chain"](case)
        assert automatic_call is not None

        def call(step: ChainInputs) -> object:
            with strategy.forced(name, overlap):
                return automatic_call(step)

        return call

    return {"verify_chain": verify_chain}


def direct(op: str, name: str) -> Callable[[Case], Call | None]:
    """The builder of an op that draws nothing: its required arguments are fields of its inputs, and the case may give
    some of the others.
    """
    parameters = inspect.signature(getattr(sk, op)).parameters.values()
    given = [f"step.{p.name}" for p in parameters if p.default is p.empty]
    said = [p.name for p in parameters if p.default is not p.empty and hasattr(Case, p.name)]
    # The call as a user writes it: looking up its arguments would add half a microsecond to what is measured.
    code = f"lambda step: op({', '.join([*given, *(f'{field}={field}' for field in said)])}, backend=backend)"

    def builder(case: Case) -> Call | None:
        fixed = {"op": getattr(sk, op), "backend": asked_for(case, name)}
        call: Call = eval(code, fixed | {field: getattr(case, field) for field in said})
        return call

    return builder


def coins_of(case: Case, uniforms: bool) -> Callable[[Any], dict[str, Any]]:
    """From a verify step to its random numbers, as the op takes them."""
    if not uniforms or case.drawn_before:
        return lambda step: {"uniform_samples": step.uniform_samples}
    steps = itertools.count()

    def coins(step: ChainInputs | PackedInputs | TreeInputs) -> dict[str, Any]:
        on_device = getattr(step, "steps", None)  # of a captured chain
        return {"seeds": step.seeds, "step": next(steps) if on_device is None else on_device}

    return coins


def verify_chain(case: Case, name: str, draft_stats: bool, uniforms: bool) -> Call | None:
    seeded = case.greedy or case.acceptance == "match"  # no uniforms
    if (not draft_stats and case.one_hot) or (seeded and not (draft_stats and uniforms)):
        return None
    backend = asked_for(case, name)
    if case.acceptance == "match":
        return matched_chain(case, backend)
    if case.greedy:
        return greedy_chain(backend)
    coins = coins_of(case, uniforms)
    draft_params = None if case.one_hot else case.params

    def call(step: ChainInputs) -> tuple[object, ...]:
        out = sk.verify_chain(
            None if case.of_probs else step.target_logits, step.draft_tokens, step.draft_logits,
            target_probs=step.target_probs, params=None if case.of_probs else case.params,
            draft_params=draft_params, acceptance=case.acceptance, target_law=case.target_law, backend=backend,
            draft_stats=step.draft_stats if draft_stats else None, processors=step.processors, **coins(step),
        )  # fmt: skip
        return out.tokens, out.num_accepted

    return call


def matched_chain(case: Case, backend: str | None) -> Call:
    positions = torch.arange(case.num_draft + 1, device=case.device).expand(case.batch, -1)

    def call(step: ChainInputs) -> tuple[object, ...]:
        out = sk.verify_chain(
            step.target_logits, step.draft_tokens, params=case.params, acceptance="match", seeds=step.seeds,
            positions=positions, backend=backend,
        )  # fmt: skip
        return out.tokens, out.num_accepted

    return call


def greedy_chain(backend: str | None) -> Call:
    def call(step: ChainInputs) -> tuple[object, ...]:
        out = sk.verify_chain(step.target_logits, step.draft_tokens, acceptance="greedy", backend=backend)
        return out.tokens, out.num_accepted

    return call


def verify_packed(case: Case, name: str, draft_stats: bool, uniforms: bool) -> Call | None:
    backend, coins = asked_for(case, name), coins_of(case, uniforms)

    def call(step: PackedInputs) -> tuple[object, ...]:
        out = sk.verify_packed(
            step.target_logits, step.draft_tokens, step.draft_logits, cu_num_draft_tokens=step.cu_num_draft_tokens,
            max_num_draft_tokens=case.num_draft, params=case.params, draft_params=case.params,
            draft_stats=step.draft_stats if draft_stats else None, backend=backend, **coins(step),
        )  # fmt: skip
        return out.tokens, out.num_accepted

    return call


def verify_tree(case: Case, name: str, draft_stats: bool, uniforms: bool) -> Call | None:
    drafted = case.acceptance in ("recursive", "traversal")
    if (not draft_stats and not drafted) or (not uniforms and case.greedy):
        return None
    backend = asked_for(case, name)
    coins = (lambda step: {}) if case.greedy else coins_of(case, uniforms)

    def call(step: TreeInputs) -> tuple[object, ...]:
        out = sk.verify_tree(
            step.target_logits, step.tree, step.node_tokens, step.draft_logits if drafted else None,
            acceptance=case.acceptance, params=case.params, draft_params=case.params if drafted else None,
            draft_stats=step.draft_stats if drafted and draft_stats else None, backend=backend, **coins(step),
        )  # fmt: skip
        return out.tokens, out.num_accepted

    return call


def mask_logits_(case: Case, name: str) -> Call:
    backend = asked_for(case, name)

    def call(rows: RowInputs) -> tuple[object, ...]:
        masked = rows.logits.clone()  # rows that are already masked would be masked faster
        return sk.mask_logits_(masked, case.params, backend=backend), masked

    return call


def sample(case: Case, name: str) -> Call:
    backend = asked_for(case, name)
    steps = itertools.count()

    def call(rows: RowInputs) -> object:
        coins = rows.uniform_samples
        if not case.drawn_before:
            coins = sk.uniform_samples(rows.seeds, next(steps), 1, purpose="draft", backend=backend)
        index = rows.row_index
        return sk.sample(rows.logits, case.params, row_index=index, uniform_samples=coins, backend=backend)

    return call


def shard_draw(case: Case, name: str) -> Call:
    backend = asked_for(case, name)

    def call(shard: ShardInputs) -> tuple[object, ...]:
        given: dict[str, Any] = {
            "draft_logits": shard.draft_logits, "draft_stats": shard.draft_stats, "backend": backend,
        }  # fmt: skip
        rows = (shard.logits, shard.stats, shard.weights, case.params)
        masses = sk.shard_draw(*rows, **given).masses
        drawn = sk.shard_draw(*rows, masses=masses, uniform_samples=shard.uniform_samples, **given)
        return masses, drawn.token

    return call


def token_logprobs(case: Case, name: str) -> Call:
    backend = asked_for(case, name)
    return lambda step: sk.token_logprobs(
        step.logits, step.tokens, case.params, processors=step.processors, num_top=NUM_TOP, backend=backend
    )


def uniform_samples(case: Case, name: str) -> Call:
    backend = asked_for(case, name)
    steps, num = itertools.count(), case.num_draft + 1
    return lambda step: sk.uniform_samples(step.seeds, next(steps), num, backend=backend)


VERIFY: Mapping[str, Callable[..., Call | None]] = {
    "verify_chain": verify_chain,
    "verify_packed": verify_packed,
    "verify_tree": verify_tree,
}
REST: Mapping[str, Callable[..., Call]] = {
    "mask_logits_": mask_logits_,
    "sample": sample,
    "shard_draw": shard_draw,
    "token_logprobs": token_logprobs,
    "uniform_samples": uniform_samples,
}
"""Of ops that `direct` does not know how to call."""


def builders(name: str, draft_stats: bool = True, uniforms: bool = True) -> Mapping[str, Callable[[Case], Call | None]]:
    """One builder per op for backend `name`. Without `draft_stats`, or without drawing `uniforms`: only the verify ops,
    in the cases that would have used them."""
    how = {"name": name, "draft_stats": draft_stats, "uniforms": uniforms}
    verify = {op: functools.partial(builder, **how) for op, builder in VERIFY.items()}
    if not (draft_stats and uniforms):
        return verify
    rest = {op: functools.partial(builder, name=name) for op, builder in REST.items()}
    return {**{op: direct(op, name) for op in REGISTRY}, **verify, **rest}
