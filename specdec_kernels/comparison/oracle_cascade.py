"""A cascade that asks both models at every token.

Source: Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), algorithm 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..decoding.claims import claimed
from ..decoding.generate import generate
from ..decoding.output import GenerationOutput
from ..decoding.request import Request
from ..drafters import ModelDrafter
from ..laws import TargetLaw
from ..sampling import SamplingParams
from .two_models import TwoModels


def oracle_cascade(
    model: Any,
    input_ids: Tensor,
    *,
    draft_model: Any,
    target_law: TargetLaw,
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    draft_sampling: SamplingParams | None = None,
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Iterable[int] | None = None,
) -> GenerationOutput:
    """Draw every token from the distribution π that `target_law` makes from both models' (algorithm 3): for analysis,
    since it saves nothing.

    This is `generate` without draft tokens and with a cascaded bonus: each token is a bonus one, none is drafted.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        The target; see `generate`.
    input_ids, attention_mask, seeds, max_new_tokens, eos_token_id
        See `generate`.
    draft_model : PreTrainedModel or Runner
        With the target's vocabulary.
    target_law : one of `sk.laws`
        Any but `Lossy`; its `bonus` has no effect here.
    sampling, draft_sampling : SamplingParams
        Of target and draft; None: the draft's as the target's.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError, ValueError
        As `generate` with a `ModelDrafter`, or a target law that is not a cascade's.
    """
    if not isinstance(target_law, TargetLaw) or not target_law.is_cascade:
        got = type(target_law).__name__
        raise TypeError(f"oracle_cascade: target_law must be one of sk.laws but Lossy, got {got}")
    if isinstance(eos_token_id, Iterator):  # it is read twice
        eos_token_id = list(eos_token_id)
    # So that errors name this function, not those that it calls.
    request = Request(input_ids, attention_mask, sampling, seeds, max_new_tokens, eos_token_id)
    models = TwoModels.begin("oracle_cascade", model, draft_model, request, draft_sampling, 0)
    with claimed("oracle_cascade", model=models.target, draft_model=models.draft):
        pass
    return generate(
        models.target, input_ids, drafter=ModelDrafter(models.draft, draft_sampling), attention_mask=attention_mask,
        sampling=sampling, seeds=seeds, max_new_tokens=max_new_tokens, num_speculative_tokens=0,
        target_law=replace(target_law, bonus="cascade"), eos_token_id=eos_token_id,  # type: ignore[call-arg]
    )  # fmt: skip
