"""Logits moved a little, towards where a decision flips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import chains
from specdec_kernels.backends.reference import intervals

VOCAB = 40
ERROR = 3e-6  # of float32 arithmetic, in the margins' unit
EPS = (1e-6, 1e-4, 1e-2)
FAR = 0.1
CUTS: list[dict[str, Any]] = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in (
        (1.0, 0, 1.0, 0.0), (0.8, 5, 1.0, 0.0), (0.7, 0, 0.8, 0.0), (1.3, 0, 1.0, 0.1), (0.6, 9, 0.9, 0.05),
        (0.0, 0, 1.0, 0.0),
    )
]  # fmt: skip
SLOW = {"reference": 3, "cuda-emulated": 3, "triton": 11}
"""Backends that try one of so many ways to move logits, others at each distance."""


def directions(tokens: Tensor) -> Iterator[Tensor]:
    """Signs ``[batch, rows, vocab]`` that move the borders of each token's draw, its coin, and the second best id."""
    ids, at = torch.arange(VOCAB), tokens[..., None]
    for there in (ids < at, ids <= at, ids == at):
        sign = torch.where(there, 1.0, -1.0)
        yield from (sign, -sign)


def nudged(arguments: dict[str, Any], eps: float, sign: Tensor, draft_sign: float) -> dict[str, Any]:
    """Every logit moved by eps, in units of the temperature; probabilities as their logarithms."""

    def moved(rows: Tensor, params: sk.SamplingParams | None, sign: Tensor) -> Tensor:
        if params is None:
            return (rows.double().log() + eps * sign).softmax(-1).float()
        by = params.temperature
        assert isinstance(by, Tensor)
        return rows + eps * torch.where(by == 0, 1.0, by)[:, None, None] * sign

    out, greedy = dict(arguments), arguments["acceptance"] == "greedy"
    if out["target_logits"] is None:
        out["target_probs"] = moved(out["target_probs"], None, sign)
    else:
        raw = sk.SamplingParams(torch.ones(len(sign)))
        out["target_logits"] = moved(out["target_logits"], raw if greedy else out["params"], sign)
    token_map = out.get("draft_token_map")
    if "draft_probs" in out:
        out["draft_probs"] = moved(out["draft_probs"], None, draft_sign * sign[:, : out["draft_probs"].shape[1]])
    elif "draft_logits" in out:
        of_draft = draft_sign * sign[:, : out["draft_logits"].shape[1]]
        of_draft = of_draft if token_map is None else of_draft[..., token_map.draft_to_target]
        out["draft_logits"] = moved(out["draft_logits"], out["draft_params"], of_draft)
    return out


def of_laws(arguments: dict[str, Any]) -> Iterator[Tensor]:
    """Signs that move what a target law looks at: the largest probability, and the entropy."""
    x = arguments["target_logits"]
    for there in (torch.arange(VOCAB) == x.argmax(-1, keepdim=True), x > x.median(-1, keepdim=True).values):
        sign = torch.where(there, 1.0, -1.0)
        yield from (sign, -sign)


def worst(
    exact: sk.Margins, given: Callable[..., sk.VerifyOutput], steps: Iterator[dict[str, Any]], size: int,
    select: Callable[..., dict[str, Any]] = chains.select,
) -> tuple[float, Tensor]:  # fmt: skip
    """The largest margin of a first difference, and which of the first `size` sequences ever differed."""
    exact = sk.Margins(exact.tokens[:size], exact.margins[:size])
    largest, flipped = 0.0, torch.zeros(size, dtype=torch.bool)
    for step in steps:
        tokens = given(**select(step, slice(0, size))).tokens.cpu()
        largest = max(largest, float(exact.of_difference(tokens).max()))
        flipped |= (tokens != exact.tokens).any(-1)
    return largest, flipped


def in_the_middle(ends: intervals.Ends) -> intervals.Ends:
    return ends if ends[0].dtype == torch.bool else ((ends[0] * ends[1]).sqrt(),) * 2
