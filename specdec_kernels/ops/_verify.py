"""Checks shared by the verify ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT32, INT32, INT64, LOGIT_DTYPES, check_instance, check_tensor, shape_error
from ..laws import BiLD, FlatLaw, TargetLaw, check_law
from ..sampling import SamplingParams
from ..types import RowStats, TokenMap
from ._common import Expected, Shape, check_beside_probs, check_tensors
from .arguments import NEED_LOGITS

VALUES, VOCAB, VOCAB_DRAFT = (
    ("values",),
    ("vocab",),
    ("vocab_draft",),
)  # further dimensions; adding tuples costs half as much as unpacking them


def check_target_probs(
    op: str, acceptance: str, params: SamplingParams, processors: object, target_law: TargetLaw | None
) -> None:
    """Refuse what needs the target's logits where probabilities are given in their place."""
    cascade = target_law if target_law is not None and target_law.is_cascade else None
    check_beside_probs(op, "target_probs", params, {"processors": processors, "a cascade as target_law": cascade})
    if acceptance in NEED_LOGITS:
        raise ValueError(f"{op}: acceptance={acceptance!r} needs target_logits, got target_probs")


def check_indexed(op: str, draft_logits: object, draft_probs: object, draft_stats: object, least: int) -> Shape:
    """Names and shape of the draft's rows where a `draft_index` selects them; each request needs at least `least`."""
    name, given = ("draft_logits", draft_logits) if draft_logits is not None else ("draft_probs", draft_probs)
    if given is None:
        raise ValueError(f"{op}: draft_index needs draft_logits or draft_probs, got neither")
    if draft_stats is not None:
        raise ValueError(f"{op}: draft_stats must be None beside draft_index, got some")
    if not isinstance(given, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(given).__name__}")
    if given.dim() != 3 or given.shape[1] < least:
        raise shape_error(op, name, f"[requests, >= {least}, vocab_draft]", given)
    return ("requests", "rows"), (given.shape[0], given.shape[1])


def check_eos(op: str, eos_token_ids: Tensor, device: torch.device) -> None:
    """TypeError or ValueError unless ``[num_eos]`` int64."""
    check_tensor(op, "eos_token_ids", eos_token_ids, (torch.int64,), device)
    if eos_token_ids.dim() != 1:
        raise shape_error(op, "eos_token_ids", "[num_eos]", eos_token_ids)


def check_stats(op: str, argument: str, stats: RowStats, rows: Shape, expected: list[Expected]) -> RowStats:
    """`stats`; TypeError unless it is a RowStats. Its tensors are added to `expected`."""
    check_instance(op, argument, stats, RowStats, "a RowStats")
    names, shape = rows
    values, argmax, status = stats
    expected += (
        (f"{argument}.values", values, FLOAT32, names + VALUES, shape + (6,)),
        (f"{argument}.argmax", argmax, INT64, names, shape),
        (f"{argument}.status", status, INT32, names, shape),
    )
    return stats


def check_draft(
    op: str,
    target_logits: Tensor,
    rows: Shape,
    draft_logits: Tensor | None,
    draft_probs: Tensor | None,
    draft_stats: RowStats | None,
    draft_token_map: TokenMap | None,
    expected: list[Expected],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Validate a draft with these `rows`, together with the tensors in `expected`, to which the draft's are added.
    Returns values, argmax, status and target_to_draft as the op takes them.
    """
    names, shape = rows
    vocab = vocab_draft = target_logits.shape[-1]
    last = VOCAB
    values = argmax = status = target_to_draft = None
    if draft_token_map is not None:
        check_instance(op, "draft_token_map", draft_token_map, TokenMap, "a TokenMap")
        vocab_draft, target_to_draft = len(draft_token_map), draft_token_map.target_to_draft
        last = VOCAB_DRAFT
        check_tensor(op, "draft_token_map", target_to_draft, INT64, target_logits.device)
        if draft_token_map.max_id >= vocab:
            raise ValueError(f"{op}: draft_token_map must map to ids < vocab={vocab}, got {draft_token_map.max_id}")
        if draft_logits is None and draft_probs is None:
            raise ValueError(f"{op}: draft_token_map needs draft_logits or draft_probs, got neither")
    if draft_logits is not None and draft_probs is not None:
        raise ValueError(f"{op}: give draft_logits or draft_probs, got both")
    if draft_stats is not None:
        values, argmax, status = check_stats(op, "draft_stats", draft_stats, rows, expected)
        if draft_logits is None:
            raise ValueError(f"{op}: draft_stats needs the draft_logits that they describe, got none")
    if draft_logits is not None:
        expected.append(("draft_logits", draft_logits, LOGIT_DTYPES, names + last, shape + (vocab_draft,)))
    elif draft_probs is not None:
        expected.append(("draft_probs", draft_probs, FLOAT32, names + last, shape + (vocab_draft,)))
    check_tensors(op, target_logits, expected)
    return values, argmax, status, target_to_draft


def check_certain(
    op: str, acceptance: str, params: SamplingParams, draft_params: SamplingParams, law: FlatLaw, noise: Expected
) -> None:
    """Refuse a call that must draw but was given no random numbers."""
    if not params.is_greedy:
        raise ValueError(f"{op}: acceptance={acceptance!r} needs {noise[0]} unless params.temperature is 0, got None")
    if law.is_cascade and not draft_params.is_greedy:
        raise ValueError(
            f"{op}: this target_law needs uniform_samples unless params.temperature and draft_params.temperature "
            "are 0, got None"
        )


def check_draft_for_law(
    op: str, acceptance: str, law: object, draft_logits: Tensor | None, draft_token_map: TokenMap | None
) -> None:
    """Refuse a law that the acceptance does not take, or that needs more of the draft than is given."""
    checked = check_law(op, acceptance, law)
    if checked is None or not checked.is_cascade:
        return
    if draft_logits is None:
        raise ValueError(f"{op}: this target_law needs draft_logits, got none: {law!r}")
    if isinstance(checked, BiLD) and checked.distance == "argmax" and draft_token_map is not None:
        raise ValueError(f"{op}: BiLD with distance='argmax' takes no draft_token_map, got one")
