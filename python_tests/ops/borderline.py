"""Random verify steps, and which of their sequences the contract excepts from giving the reference's tokens."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import chains
from python_tests.ops.chains import mixed
from python_tests.ops.inputs import strided
from python_tests.support import Backend
from specdec_kernels.backends.reference.law import make_law, make_params
from specdec_kernels.backends.reference.sample import perturbed
from specdec_kernels.flat import LOSSLESS, FlatParams
from specdec_kernels.ops.arguments import ACCEPTANCES, RowStatsArguments, VerifyArguments, VerifyChainArguments
from specdec_kernels.sampling import DEFAULT_PARAMS

ERROR = 1e-6  # float32 error of a running mass, a threshold or a probability, as a share of the whole
LAW_ERROR = 1e-5  # of what a target law's α is held against: entropies, raw probabilities, cross-entropies
PERTURBED = 1e-5  # two perturbed scores closer than this may swap
CELLS = 300_000  # logits a batch of cases
reference = {
    op: getattr(importlib.import_module(f"specdec_kernels.backends.reference.{op}"), op)
    for op in ("verify_chain", "row_stats")
}
counted: dict[str, Counter[str]] = {}


def build(e: dict[str, Any], batch: int | None = None) -> chains.Arguments:
    rng = torch.Generator().manual_seed(e["seed"])
    if batch is None:
        batch = max(32, min(4096, CELLS // (e["vocab"] * (e["num_draft"] + 1))))
    made = chains.make(
        rng, batch, e["num_draft"], e["vocab"], kind=e["kind"], acceptance=e["acceptance"], dtype=e["dtype"],
        params=mixed(e["params"], batch, e["min_p_first"], rng), spread=e["spread"],
        draft_params=mixed(e["draft_params"], batch, not e["min_p_first"], rng),
        law=e["law"] if e["law"] is not None and chains.fits(e["law"], e["acceptance"], e["kind"]) else None,
    )  # fmt: skip
    for name in ("target_logits", "draft_logits"):
        if name in made and (name == "target_logits" or e["kind"] != "stats"):  # kept stats must describe their rows
            if e["rounded"]:
                made[name] = made[name].round()
            if e["holes"]:
                made[name] = made[name].masked_fill(torch.rand(made[name].shape, generator=rng) < 0.1, -torch.inf)
    if e["ragged"]:
        made["num_draft_tokens"] = torch.randint(-1, e["num_draft"] + 1, (batch,), generator=rng)
        made["eos_token_ids"] = torch.randint(0, e["vocab"], (1,), generator=rng)
    return made


def moved(params: sk.SamplingParams, by: float) -> FlatParams:
    """The flat parameters of an op in float64, bounds moved by the relative error `by`: upwards keeps more ids."""
    temperature, top_k, top_p, min_p = (
        v if isinstance(v, Tensor) else None for v in (params.temperature, params.top_k, params.top_p, params.min_p)
    )
    assert isinstance(top_p, Tensor) and isinstance(min_p, Tensor) and isinstance(temperature, Tensor)
    inside = (top_p > 0) & (top_p < 1)
    wide = torch.where(inside, (top_p.double() * (1 + by)).clamp(1e-12, 1 - 1e-12), top_p.double())
    return FlatParams(
        1.0,
        0,
        1.0,
        0.0,
        params.min_p_first,
        temperature.double(),
        top_k,
        wide,
        (min_p.double() * (1 - by)).clamp(0, 1),
    )


def shared_in_float64(arguments: dict[str, Any], by: float, law_by: float) -> VerifyArguments:
    """What chains and trees are verified with, in float64: uniforms and bounds moved by `by`, a law's α by `law_by`."""
    given = arguments.get
    target, draft, probs = (
        None if given(name) is None else arguments[name].double()
        for name in ("target_logits", "draft_logits", "draft_probs")
    )
    assert target is not None
    uniforms, token_map = given("uniform_samples"), given("draft_token_map")
    if uniforms is not None:
        inside = (uniforms >= 0) & (uniforms < 1)
        uniforms = torch.where(inside, (uniforms.double() * (1 + 2 * by) + by).clamp(0, 1 - 1e-15), uniforms)
    law = arguments["target_law"].flat() if "target_law" in arguments else LOSSLESS
    if law.number:
        law = law._replace(alpha=law.alpha + law_by)
    draft_params = moved(arguments["draft_params"], by) if "draft_params" in arguments else DEFAULT_PARAMS._flat
    return VerifyArguments(
        target_logits=target, draft_logits=draft, draft_probs=probs, draft_values=None, draft_argmax=None,
        draft_status=None, target_to_draft=None if token_map is None else token_map.target_to_draft,
        uniform_samples=uniforms, noise_keys=given("noise_keys"), seeds=None, steps=None, positions=None, step=0,
        eos_token_ids=given("eos_token_ids"), law=law, params=moved(arguments["params"], by), draft_params=draft_params,
    )  # fmt: skip


def in_float64(arguments: chains.Arguments, by: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and the cut-offs of target and draft rows, of the float64 reference with everything moved by `by`."""
    shared = shared_in_float64(arguments, by, by / ERROR * LAW_ERROR)
    rule, draft = ACCEPTANCES[arguments["acceptance"]], shared.draft_logits
    tokens = arguments["draft_tokens"]
    counts = arguments.get("num_draft_tokens")
    bonus = arguments.get("bonus_tokens")
    out = reference["verify_chain"](
        VerifyChainArguments(shared, tokens, counts, None, tokens.shape[1], rule, False, bonus_tokens=bonus)
    )
    cuts = [
        reference["row_stats"](RowStatsArguments(rows, given))[0][..., 1]
        for rows, given in ((shared.target_logits, shared.params), (draft, shared.draft_params)) if rows is not None
    ]  # fmt: skip
    return out[0], cuts[0], cuts[1] if draft is not None else cuts[0][:, :0]


def close_scores(arguments: chains.Arguments) -> Tensor:
    """``[batch]``: some row's two best perturbed scores (match rule) lie within float32 error."""
    values = moved(arguments["params"], 0.0)
    x = arguments["target_logits"].double()
    law = make_law(x, make_params(len(x), x, values))
    best = perturbed(law, arguments["noise_keys"][:, : x.shape[1]], None).topk(2, -1).values
    return ((best[..., 0] - best[..., 1]) < PERTURBED * best[..., 0].abs().clamp_min(1.0)).any(-1)


def borderline(arguments: chains.Arguments) -> Tensor:
    """``[batch]`` bool: which cases the contract excepts."""
    low, high = in_float64(arguments, -ERROR), in_float64(arguments, ERROR)
    out = (low[0] != high[0]).any(-1) | (low[1] != high[1]).any(-1) | (low[2] != high[2]).any(-1)
    if arguments["acceptance"] == "match":
        out |= close_scores(arguments)
    return out


def compare(
    backend: Backend, e: dict[str, Any], arguments: chains.Arguments, expected: sk.VerifyOutput, excepted: Tensor
) -> None:
    given = chains.on(backend, arguments)
    if e["turned"]:
        for name in ("target_logits", "draft_logits", "draft_probs"):
            if name in given and given[name].numel():
                given[name] = strided(given[name])
    out = backend.verify_chain(**given)
    tokens = out.tokens.cpu()
    different = (tokens != expected.tokens).any(-1) | (out.num_accepted.cpu() != expected.num_accepted)
    assert ((tokens >= -1) & (tokens < e["vocab"])).all()
    assert torch.equal(tokens >= 0, torch.arange(tokens.shape[1]) < out.num_tokens.cpu()[:, None])
    same_walk = ~different
    assert torch.equal(out.status.cpu()[same_walk], expected.status[same_walk])
    worst = (different & ~excepted).nonzero().flatten().tolist()
    assert not worst, f"{backend}: sequences {worst[:5]} differ and are not borderline: {e}"
    counts = counted.setdefault(str(backend), Counter())
    counts.update(cases=len(tokens), borderline=int(excepted.sum()), different=int(different.sum()))
