"""What the flat arguments of the verify ops are called."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...laws import FlatLaw
from ...sampling import FlatParams


class VerifyArguments(NamedTuple):
    """What chains and trees share. Kept stats have all three tensors or none."""

    target_logits: Tensor
    draft_logits: Tensor | None
    draft_probs: Tensor | None
    draft_values: Tensor | None
    draft_argmax: Tensor | None
    draft_status: Tensor | None
    target_to_draft: Tensor | None
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    eos_token_ids: Tensor | None
    law: FlatLaw
    params: FlatParams
    draft_params: FlatParams


class VerifyChainArguments(NamedTuple):
    """Of `verify_chain`: padded drafts, or with `cu_num_draft_tokens` ragged ones laid end to end.

    `num_draft` is the width of the result less one.
    """

    shared: VerifyArguments
    draft_tokens: Tensor
    num_draft_tokens: Tensor | None
    cu_num_draft_tokens: Tensor | None
    num_draft: int
    acceptance: int
    return_acceptance: bool


class VerifyTreeArguments(NamedTuple):
    """Of `verify_tree`."""

    shared: VerifyArguments
    node_tokens: Tensor
    parents: Tensor
    first_child: Tensor
    next_sibling: Tensor
    tree_status: Tensor
    max_depth: int
    acceptance: int
    epsilon: float
    delta: float


def chain_arguments(
    target_logits: Tensor, draft_tokens: Tensor, cu: Tensor | None, num_draft: int, *rest: object
) -> VerifyChainArguments:
    """Of the flat arguments of `verify_chain` and `verify_packed`."""
    draft, (uniforms, keys, token_map, counts, eos, acceptance, return_acceptance) = rest[:5], rest[5:12]
    shared = VerifyArguments(target_logits, *draft, token_map, uniforms, keys, eos, *_named(rest[12:]))  # type: ignore[arg-type,call-arg]
    return VerifyChainArguments(shared, draft_tokens, counts, cu, num_draft, acceptance, return_acceptance)  # type: ignore[arg-type]


def tree_arguments(target_logits: Tensor, *rest: object) -> VerifyTreeArguments:
    """Of the flat arguments of `verify_tree`."""
    tree, draft, (uniforms, keys, token_map, eos) = rest[:6], rest[6:11], rest[11:15]
    shared = VerifyArguments(target_logits, *draft, token_map, uniforms, keys, eos, *_named(rest[18:]))  # type: ignore[arg-type,call-arg]
    return VerifyTreeArguments(shared, *tree, *rest[15:18])  # type: ignore[arg-type]


def _named(flat: tuple[object, ...]) -> tuple[FlatLaw, FlatParams, FlatParams]:
    return FlatLaw(*flat[:5]), FlatParams(*flat[5:14]), FlatParams(*flat[14:])  # type: ignore[arg-type]
