"""Random verify steps of every draft kind, their float64 expectation, and their packed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import oracle
from python_tests.ops.inputs import SCALARS, logits, per_row, seeded, uniforms
from specdec_kernels import laws as laws_of
from specdec_kernels.laws import TargetLaw, check_law
from specdec_kernels.ops import arguments
from specdec_kernels.testing import LAW_EXAMPLES, Float64, float64_gumbel, float64_law

KINDS = ("full", "one_hot", "reduced", "probs", "stats")
LAWS: tuple[TargetLaw, ...] = tuple(LAW_EXAMPLES)
ACCEPTANCES = tuple(arguments.ACCEPTANCES)
Arguments = dict[str, Any]
DRAFT_PARAMS = sk.SamplingParams(1.1, top_k=50, top_p=0.97)


def make(
    rng: torch.Generator, batch: int, num_draft: int, vocab: int, *, kind: str = "full", acceptance: str = "token",
    dtype: torch.dtype = torch.float32, params: sk.SamplingParams | None = None,
    draft_params: sk.SamplingParams | None = None, spread: float = 2.0,
    by: Any = None, law: TargetLaw | None = None,
) -> Arguments:  # fmt: skip
    """Arguments of verify_chain. The draft is a noisy copy of the target, and tokens are drawn from it, so that many
    are accepted. `by`: the backend of the draft's stats.
    """
    target = logits(rng, batch, num_draft + 1, vocab, dtype=dtype, spread=spread)
    made: Arguments = {"target_logits": target, "acceptance": acceptance, "params": params or sk.SamplingParams()}
    num_rows = num_draft
    if law is not None:
        made["target_law"] = law
        num_rows += law.cascade_bonus
    noisy = (target[:, :num_rows].float() + logits(rng, batch, num_rows, vocab, spread=0.7)).to(dtype)
    token_map = None
    if kind == "reduced":
        token_map = sk.TokenMap(torch.randperm(vocab, generator=rng)[: max(2, vocab * 2 // 3)])
        noisy = noisy[..., token_map.draft_to_target].contiguous()
        made["draft_token_map"] = token_map
    draft_params = draft_params or sk.SamplingParams()
    if num_draft:
        drawn = sk.sample(
            noisy[:, :num_draft],
            draft_params,
            uniform_samples=uniforms(rng, batch, num_draft),
            draft_token_map=token_map,
            backend="reference",
        )
        made["draft_tokens"] = drawn.token
    else:
        made["draft_tokens"] = torch.zeros(batch, 0, dtype=torch.int64)
    if kind == "probs":
        made["draft_probs"] = noisy.float().softmax(-1)
    elif kind != "one_hot":
        made["draft_logits"], made["draft_params"] = noisy, draft_params
        if kind == "stats":
            made["draft_stats"] = _stats(by, noisy, draft_params)
    if acceptance == "match":
        made["noise_keys"] = torch.randint(-(2**63), 2**63 - 1, (batch, num_draft + 1), generator=rng)
    elif acceptance != "greedy":
        made["uniform_samples"] = uniforms(rng, batch, num_draft + 1)
    return made


def _stats(backend: Any, rows: Tensor, params: sk.SamplingParams) -> sk.RowStats:
    if backend is None:
        return sk.row_stats(rows, params)
    found = backend.row_stats(*backend(rows, params))
    return sk.RowStats(found.values.cpu(), found.argmax.cpu(), found.status.cpu())


def small(acceptance: str, kind: str, law: TargetLaw | None = None, **more: Any) -> Arguments:
    """A call for `CALLS`: five sequences with parameters of their own."""
    given: dict[str, Any] = {"acceptance": acceptance, "kind": kind, "law": law}
    made = make(seeded(), 5, 3, 40, params=per_row(5), draft_params=SCALARS, **given)
    return {**made, "eos_token_ids": torch.tensor([3]), **more}


def fits(law: TargetLaw, acceptance: str, kind: str) -> bool:
    """Whether verify_chain takes `law` with an acceptance and a kind of draft."""
    try:
        check_law("", acceptance, law)
    except ValueError:
        return False
    if isinstance(law, laws_of.Lossy):
        return True
    return kind in ("full", "stats") or (kind == "reduced" and getattr(law, "distance", "") != "argmax")


def on(backend: Any, arguments: Arguments) -> Arguments:
    """The arguments on the backend's device."""
    out = {}
    for name, value in arguments.items():
        if isinstance(value, sk.RowStats):
            out[name] = sk.RowStats(backend(value.values), backend(value.argmax), backend(value.status))
        else:
            out[name] = backend(value)
    return out


def run(backend: Any, arguments: Arguments, **more: Any) -> sk.VerifyOutput:
    """`verify_chain` on the backend's device."""
    out: sk.VerifyOutput = backend.verify_chain(**on(backend, {**arguments, **more}))
    return out


def select(arguments: Arguments, rows: Any) -> Arguments:
    """The arguments of some sequences alone, in the order of `rows`."""
    out = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != "eos_token_ids":
            out[name] = value[rows]
        elif isinstance(value, sk.RowStats):
            out[name] = sk.RowStats(value.values[rows], value.argmax[rows], value.status[rows])
        elif isinstance(value, sk.SamplingParams):
            fields = {f: getattr(value, f) for f in ("temperature", "top_k", "top_p", "min_p")}
            out[name] = replace(value, **{f: v[rows] if isinstance(v, Tensor) else v for f, v in fields.items()})
        else:
            out[name] = value
    return out


def pad(arguments: Arguments, extra: int, garbage_token: int = -1) -> Arguments:
    """The same sequences with `extra` more draft slots, filled with NaN and garbage: nothing may change."""
    out = dict(arguments)
    batch, num_draft = arguments["draft_tokens"].shape
    for name in ("target_logits", "draft_logits", "draft_probs", "uniform_samples"):
        if name in out:
            rows = out[name]
            fill = rows.new_full((batch, extra, *rows.shape[2:]), torch.nan)
            out[name] = torch.cat([rows, fill], 1)
    for name, value in (("draft_tokens", garbage_token), ("noise_keys", 12345)):
        if name in out:
            out[name] = torch.cat([out[name], out[name].new_full((batch, extra), value)], 1)
    if "draft_stats" in out:
        s = out["draft_stats"]
        more = [torch.full_like(t[:, :1], 3).expand(-1, extra, *t.shape[2:]) for t in (s.values, s.argmax, s.status)]
        out["draft_stats"] = sk.RowStats(
            *(torch.cat([t, m], 1) for t, m in zip((s.values, s.argmax, s.status), more, strict=True))
        )
    if "num_draft_tokens" not in out:
        out["num_draft_tokens"] = torch.full((batch,), num_draft, dtype=torch.int32)
    return out


def with_target_probs(arguments: Arguments, params: sk.SamplingParams) -> Arguments:
    """The same step from the probabilities of the target's logits, which `params` cut."""
    probs = arguments["target_logits"].float().softmax(-1)
    return {**arguments, "target_logits": None, "target_probs": probs, "params": params}


def with_bonus(arguments: Arguments, bonus_tokens: Tensor) -> Arguments:
    """The same step with bonus tokens that are given, and no rows to draw them from."""
    rows = {k: arguments[k][:, :-1] for k in ("target_logits", "target_probs") if arguments.get(k) is not None}
    return {**arguments, **rows, "bonus_tokens": bonus_tokens}


def without_numbers(arguments: Arguments) -> Arguments:
    """The same step without its random numbers."""
    return {k: v for k, v in arguments.items() if k not in ("uniform_samples", "noise_keys")}


def packed(arguments: Arguments, counts: Tensor) -> Arguments:
    """Arguments of verify_packed for the first ``counts[b]`` draft tokens of each sequence."""
    out = {}
    used = torch.arange(arguments["draft_tokens"].shape[1]) < counts[:, None]
    scored = torch.arange(arguments["draft_tokens"].shape[1] + 1) <= counts[:, None]
    cascade_bonus = "target_law" in arguments and arguments["target_law"].cascade_bonus
    draft_rows = scored if cascade_bonus else used
    target_rows = used if "bonus_tokens" in arguments else scored
    for name, value in arguments.items():
        if name in ("uniform_samples", "noise_keys"):
            out[name] = value[scored]
        elif name in ("target_logits", "target_probs") and value is not None:
            out[name] = value[target_rows]
        elif name == "draft_tokens":
            out[name] = value[used]
        elif name in ("draft_logits", "draft_probs"):
            out[name] = value[draft_rows]
        elif name == "draft_stats":
            out[name] = sk.RowStats(value.values[draft_rows], value.argmax[draft_rows], value.status[draft_rows])
        else:
            out[name] = value
    out["cu_num_draft_tokens"] = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    out["max_num_draft_tokens"] = arguments["draft_tokens"].shape[1]
    return out


def laws(arguments: Arguments) -> tuple[Float64, Float64 | None]:
    """P ``[batch, num_draft + 1, vocab]`` and Q ``[batch, num_draft, vocab]`` (None: one-hot), over target ids."""
    params = arguments["params"]
    if arguments["acceptance"] == "greedy":
        params = sk.SamplingParams(0.0)
    probs = arguments.get("target_probs")
    P = float64_law(arguments["target_logits"] if probs is None else probs.double().log(), params)
    if "draft_probs" in arguments:
        Q = arguments["draft_probs"].double().numpy()
    elif "draft_logits" in arguments:
        Q = float64_law(arguments["draft_logits"], arguments["draft_params"])
    else:
        return P, None
    token_map = arguments.get("draft_token_map")
    if token_map is not None:
        wide = np.zeros((*Q.shape[:-1], P.shape[-1]))
        wide[..., token_map.draft_to_target.numpy()] = Q
        Q = wide
    return P, Q


def check(arguments: Arguments, out: sk.VerifyOutput) -> int:
    """Every sequence's outcome is the oracle's, but for borderline ones, which are counted; always well formed."""
    P, Q = laws(arguments)
    draft, vocab = arguments["draft_tokens"].long().numpy(), P.shape[-1]
    batch, num_draft = draft.shape
    eos = tuple(arguments["eos_token_ids"].tolist()) if "eos_token_ids" in arguments else ()
    tokens, accepted, counts = (t.cpu().numpy() for t in (out.tokens, out.num_accepted, out.num_tokens))
    assert tokens.shape == (batch, num_draft + 1) and tokens.dtype == np.int64
    assert accepted.dtype == counts.dtype == np.int32 == out.status.cpu().numpy().dtype
    borderline = 0
    for b in range(batch):
        length = num_draft
        if "num_draft_tokens" in arguments:
            length = int(arguments["num_draft_tokens"][b])
        if length < 0:
            assert (tokens[b] == -1).all() and accepted[b] == counts[b] == 0
            continue
        x = draft[b, :length]
        bad = np.flatnonzero((x < 0) | (x >= vocab))
        x = x[: bad[0]] if len(bad) else x
        if arguments["acceptance"] in ("match", "greedy"):
            noise = np.zeros_like(P[b])
            if "noise_keys" in arguments:
                noise = float64_gumbel(arguments["noise_keys"][b], vocab)
            expected, kept, close = oracle.matching(P[b], x, noise, eos)
        else:
            u = arguments["uniform_samples"][b].double().numpy()
            acceptance = arguments["acceptance"]
            if "draft_params" in arguments and _row(arguments["draft_params"].temperature, b) == 0:
                acceptance = "token"
            expected, kept, close = oracle.chain(P[b], None if Q is None else Q[b], x, u, acceptance, eos)
        assert counts[b] in (accepted[b], accepted[b] + 1) and (tokens[b, counts[b] :] == -1).all()
        assert ((tokens[b, : counts[b]] >= 0) & (tokens[b, : counts[b]] < vocab)).all()
        if close:
            borderline += 1
        else:
            assert tokens[b, : counts[b]].tolist() == expected and accepted[b] == kept, f"sequence {b}"
    return borderline


def _row(value: float | Tensor, index: int) -> float:
    return float(value[index]) if isinstance(value, Tensor) else value


def mixed(choices: list[dict[str, Any]], batch: int, min_p_first: bool, rng: torch.Generator) -> sk.SamplingParams:
    """One of the choices for each sequence, at random."""
    index = torch.randint(0, len(choices), (batch,), generator=rng)
    column = {k: torch.tensor([c[k] for c in choices])[index] for k in choices[0]}
    return sk.SamplingParams(**column, min_p_first=min_p_first)


def spoil(x: Tensor, rng: torch.Generator) -> Tensor:
    """NaN and +inf here and there, and whole rows of −inf and NaN."""
    where, rows = torch.rand(x.shape, generator=rng), torch.rand((*x.shape[:-1], 1), generator=rng)
    few = 0.5 / x.shape[-1]
    x = x.masked_fill(where < few, torch.nan).masked_fill(where > 1 - 0.1 * few, torch.inf)
    return x.masked_fill(rows < 0.03, -torch.inf).masked_fill(rows > 0.97, torch.nan)
