"""How a verifier is called and answers, by the peers' signatures."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tree import DraftTree
from .step import PARAMS, Problem, Step

Verifier = Callable[..., Any]
_OF_DRAFTERS = (
    "draft_logits", "draft_probs", *PARAMS, *(f"draft_{name}" for name in PARAMS), "seeds", "positions",
)  # fmt: skip
_OF_VERIFIERS = (
    *_OF_DRAFTERS, "target_logits", "target_probs", "draft_tokens", "num_draft_tokens", "parents", "uniform_samples",
)  # fmt: skip


class Signature(ABC):
    """What all signatures share; each one says what differs.

    Attributes
    ----------
    name : str
    verify : callable
        The verifier.
    draft : callable or None
        The drafter that goes with it: how the next draft token is drawn.
    batched : bool
        Whether a call takes more than one sequence.
    trees : bool
        Whether the drafts are trees.
    keyed : bool
        Whether random numbers are made from given seeds and positions.
    drafts_with : tuple of str
        What a drafter is called with, in this order; empty: it names what it wants, as a plain one does.

    Raises
    ------
    TypeError
        A drafter that cannot be called that way.
    ValueError
        A drafter of trees: nothing would call it.
    """

    name = ""
    batched, trees, keyed, ragged = True, False, False, False
    drafts_with: tuple[str, ...] = ()

    def __init__(self, verify: Verifier, draft: Verifier | None = None) -> None:
        self.verify, self.draft = verify, draft
        if draft is None:
            return
        if self.trees:
            wanted = "None with a verifier of trees, as drafters are called over several steps of chains alone"
            raise ValueError(f"audit: draft must be {wanted}, got one")
        if self.drafts_with:
            _check_count(draft, self.drafts_with, f"a {self.name} drafter")
        else:
            _check_names(draft, _OF_DRAFTERS, f"a {self.name} drafter")

    def uniforms(self, width: int) -> int:
        """How many uniforms a sequence is given if it has `width` rows."""
        return 0

    @abstractmethod
    def refuses(self, problem: Problem) -> str | None:
        """Why this verifier cannot be asked a problem."""

    @abstractmethod
    def emit(self, step: Step) -> Tensor:
        """``[batch, width]`` the tokens that it emits, −1 after the last."""

    def draw(self, step: Step) -> Tensor:
        """``[batch]`` tokens that `draft` draws of ``draft_probs[:, 0]``, at ``positions``."""
        assert self.draft is not None
        return _call(self.draft, _named(step, drafting=True)).reshape(-1)


def _named(step: Step, drafting: bool = False) -> dict[str, Any]:
    """The arguments that a plain callable may name."""
    row: Any = (lambda t: t[:, 0]) if drafting else (lambda t: t)
    named: dict[str, Any] = {
        "draft_logits": None if step.draft_logits is None else row(step.draft_logits.float()),
        "draft_probs": None if step.draft_probs is None else row(step.draft_probs.float()),
        "seeds": step.seeds, "positions": step.positions,
    }  # fmt: skip
    if drafting:
        assert step.draft_params is not None
        return named | step.draft_params | {f"draft_{name}": step.draft_params[name] for name in PARAMS}
    named |= {
        "target_logits": step.target_logits, "target_probs": step.target_probs.float(),
        "draft_tokens": step.draft_tokens, "num_draft_tokens": torch.from_numpy(step.lengths.astype(np.int32)),
        "parents": step.parents, "uniform_samples": step.uniforms,
    }  # fmt: skip
    return named | step.params | {f"draft_{n}": t for n, t in (step.draft_params or {}).items()}


def _signature(function: Verifier) -> inspect.Signature | None:
    """None for compiled code that has none for Python."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _parameters(function: Verifier, what: str) -> Mapping[str, inspect.Parameter]:
    """Those of a function that is called by their names."""
    if (known := _signature(function)) is None:
        raise TypeError(f"audit: {what} must have a Python signature: wrap it in a def, got {function!r:.80}")
    return known.parameters


def _check_count(function: Verifier, names: tuple[str, ...], what: str) -> None:
    if (known := _signature(function)) is None:
        return  # the call will tell
    try:
        known.bind(*names)
    except TypeError as error:
        raise TypeError(f"audit: {what} must take {', '.join(names)}, by their order: {error}") from None


def _check_names(function: Verifier, known: tuple[str, ...], what: str) -> None:
    parameters = _parameters(function, what).values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in parameters:
        star = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        needed = parameter.default is parameter.empty and not star
        if needed and (parameter not in named or parameter.name not in known):
            raise TypeError(f"audit: {what} must name arguments among {', '.join(known)}, got {parameter.name}")
    if not any(parameter.name in known for parameter in named):
        raise TypeError(f"audit: {what} must name arguments among {', '.join(known)}, got none of them")


def _call(function: Verifier, given: dict[str, Any]) -> Tensor:
    """The tokens that the function answers to those arguments that it names."""
    return _tokens(function(**{name: given[name] for name in inspect.signature(function).parameters if name in given}))


def _tokens(answer: Any) -> Tensor:
    """An answer's tokens, int64: all of it, or the first of a tuple, or of a list of tensors that are no rows."""
    first = answer[0] if isinstance(answer, (tuple, list)) and answer else None
    several = isinstance(answer, tuple) or (isinstance(first, Tensor) and first.dim() > 1)
    tokens = first if several and first is not None else answer
    if isinstance(tokens, (list, np.ndarray)):
        tokens = torch.as_tensor(tokens)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}")
    return tokens.long()


class Plain(Signature):
    """``verify(...) -> tokens [batch, num_draft + 1]``, a tensor, −1 after the last; or a tuple or list that begins so.

    It names the arguments that it wants, out of: ``target_logits`` or ``target_probs [batch, num_draft + 1, vocab]``,
    ``draft_tokens [batch, num_draft]`` int64, ``draft_logits`` or ``draft_probs [batch, num_draft, vocab]`` (None for
    one-hot drafts, where the parameter's default is None), ``temperature``, ``top_k``, ``top_p`` and the draft's own
    ``draft_temperature``, ``draft_top_k``, ``draft_top_p [batch]``, ``num_draft_tokens [batch]`` int32. Logits are as
    the models gave them; probabilities have the parameters in them; both float32. Randomness comes from
    ``uniform_samples [batch, num_draft + 1]`` float32 in [0, 1), from ``seeds`` and ``positions [batch]`` int64 (the
    position of the first draft token), or, where none of these is named, from torch. Behind the `num_draft_tokens` of a
    sequence tokens are −1 and rows zeros. One that names ``parents`` (a list, −1 for the root) verifies trees: rows and
    tokens are those of the nodes, the root's first, and the draft's tokens were drawn from ``draft_probs`` without
    replacement, siblings in the order of their nodes.

    A drafter is ``draft(...) -> tokens [batch]`` and names ``draft_logits`` or ``draft_probs [batch, vocab]``,
    ``temperature``, ``top_k``, ``top_p``, ``seeds`` and ``positions``. Trees take none.
    """

    name = "plain"

    def __init__(self, verify: Verifier, draft: Verifier | None = None) -> None:
        _check_names(verify, _OF_VERIFIERS, "a plain verifier")
        self.names = _parameters(verify, "a plain verifier")
        self.trees = "parents" in self.names
        super().__init__(verify, draft)
        self.keyed = "seeds" in self.names
        self.ragged = "num_draft_tokens" in self.names

    def uniforms(self, width: int) -> int:
        return width if "uniform_samples" in self.names else 0

    def refuses(self, problem: Problem) -> str | None:
        for prefix, params, rows in (("", problem.params, "target"), ("draft_", problem.draft_params, "draft")):
            if f"{rows}_logits" not in self.names or f"{rows}_probs" in self.names:
                continue
            for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                same = prefix and name in self.names and getattr(params, name) == getattr(problem.params, name)
                if f"{prefix}{name}" not in self.names and not same and getattr(params, name) != off:
                    return f"it takes {rows}_logits and no {prefix}{name}"
        return None

    def emit(self, step: Step) -> Tensor:
        given = _named(step)
        if step.one_hot:
            for name in ("draft_logits", "draft_probs"):
                if name in self.names and self.names[name].default is None:
                    given[name] = None
                elif step.draft_probs is not None and name == "draft_logits":
                    given[name] = step.draft_probs.log().float()
        return _call(self.verify, given)


class Transformers(Signature):
    """``verify(candidate_input_ids [1, length], candidate_logits [1, num_draft, vocab], candidate_length, new_logits
    [1, num_draft + 1, vocab]) -> (valid_tokens [1, n + 1], n)``, as ``generation.utils._speculative_sampling``.

    The logits are float32 scores with the sampling parameters in them. Randomness is torch's. One sequence a call. A
    `verify` that needs ``is_done_candidate``, as up to transformers 5.19, is given False.

    A drafter is called as a plain one: by the names of its arguments, and with a batch.
    """

    name = "transformers"
    batched, ragged = False, True

    def refuses(self, problem: Problem) -> str | None:
        return None

    def emit(self, step: Step) -> Tensor:
        assert step.draft_probs is not None
        out = torch.full((step.batch, step.target_probs.shape[1]), -1)
        known = _signature(self.verify)
        done = known.parameters.get("is_done_candidate") if known is not None else None
        more = {"is_done_candidate": False} if done is not None and done.default is done.empty else {}
        for b in range(step.batch):
            length = int(step.lengths[b])
            ids = torch.cat([torch.zeros(1, 2, dtype=torch.int64), step.draft_tokens[b : b + 1, :length]], 1)
            draft = step.draft_probs[b : b + 1, :length].log().float()
            target = step.target_probs[b : b + 1, : length + 1].log().float()
            tokens, _ = self.verify(ids, draft, length, target, **more)
            out[b, : tokens.shape[1]] = tokens[0]
        return out


class VllmV1(Signature):
    """``verify(draft_token_ids [total] int32, num_draft_tokens list, max_spec_len, cu_num_draft_tokens [batch] int32,
    draft_probs [total, vocab] or None, target_logits [total, vocab], bonus_token_ids [batch, 1], sampling_metadata) ->
    tokens [batch, max_spec_len + 1]``, −1 after the last: the V1 runner's ``rejection_sample``.

    Target logits have the sampling parameters in them; a `verify` that takes ``target_probs`` in their place gets
    probabilities. ``sampling_metadata`` has ``all_greedy``, ``all_random``, ``temperature [batch]`` and ``generators``.
    Randomness is torch's; the bonus token is drawn by the audit, with one uniform.

    A drafter is ``draft(logits [batch, vocab], sampling_metadata) -> (tokens [batch], probs)``.
    """

    name = "vllm-v1"
    ragged = True
    drafts_with = ("logits", "sampling_metadata")

    def __init__(self, verify: Verifier, draft: Verifier | None = None) -> None:
        super().__init__(verify, draft)
        known = _signature(verify)  # one without is taken for the release's own, which takes logits
        self.takes_probs = known is not None and "target_probs" in known.parameters

    def uniforms(self, width: int) -> int:
        return 1

    def refuses(self, problem: Problem) -> str | None:
        return None

    def emit(self, step: Step) -> Tensor:
        assert step.uniforms is not None
        lengths = torch.from_numpy(step.lengths)
        drafted = torch.arange(step.draft_tokens.shape[1]) < lengths[:, None]
        last = step.target_probs[torch.arange(step.batch), lengths].numpy()
        ends = last.cumsum(-1)
        bonus = (ends / ends[:, -1:] <= step.uniforms[:, :1].double().numpy()).sum(-1)
        target = step.target_probs[:, :-1][drafted].float()
        draft = None if step.one_hot or step.draft_probs is None else step.draft_probs[drafted].float()
        tokens = self.verify(
            step.draft_tokens[drafted].int(), step.lengths.tolist(), int(lengths.max()),
            lengths.cumsum(0).int(), draft, target if self.takes_probs else target.log(),
            torch.from_numpy(bonus)[:, None].int(), metadata(step),
        )  # fmt: skip
        return _tokens(tokens)

    def draw(self, step: Step) -> Tensor:
        assert self.draft is not None and step.draft_logits is not None and step.draft_params is not None
        drafting = Step(step.draft_logits, step.target_probs, step.draft_tokens, step.lengths, step.draft_params,
                        generators=step.generators)  # fmt: skip
        return _tokens(self.draft(step.draft_logits[:, 0].clone(), metadata(drafting)))


def metadata(step: Step) -> SimpleNamespace:
    """vLLM's ``SamplingMetadata``: what a rejection sampler reads of it."""
    greedy = step.params["temperature"] == 0
    return SimpleNamespace(
        all_greedy=bool(greedy.all()), all_random=not bool(greedy.any()), temperature=step.params["temperature"],
        top_k=None, top_p=None, generators=step.generators or {}, max_num_logprobs=None, no_penalties=True,
    )  # fmt: skip


class VllmV2(Signature):
    """``verify(target_logits [total, vocab], draft_logits [batch, num_draft, vocab] or None, draft_sampled [total],
    cu_num_logits [batch + 1] int32, pos [total], idx_mapping [batch], expanded_idx_mapping [total],
    expanded_local_pos [total], temperature [batch], seed [batch], num_speculative_steps) -> (tokens
    [batch, num_draft + 1], num_sampled [batch])``: the V2 runner's ``rejection_sample``.

    ``total`` rows: of each sequence its last token's and its drafts'. Target logits have the sampling parameters in
    them; the draft's are divided by the temperature by the verifier. Randomness is made of `seed` and `pos`; kernels in
    Triton's interpreter (TRITON_INTERPRET=1) are given theirs.

    A drafter is ``draft(logits [batch, vocab], expanded_idx_mapping, temperature, seed, pos, apply_temperature,
    is_drafting) -> tokens [batch]``, as ``gumbel_sample``; `pos` is the position before the token.
    """

    name = "vllm-v2"
    keyed, ragged = True, True
    drafts_with = (
        "logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting",
    )  # fmt: skip

    def refuses(self, problem: Problem) -> str | None:
        greedy = (problem.params.temperature == 0, problem.draft_params.temperature == 0)
        if greedy[0] != greedy[1] and problem.draft is not None:
            return "target and draft have one temperature"
        return None

    def emit(self, step: Step) -> Tensor:
        assert step.seeds is not None and step.positions is not None
        lengths = torch.from_numpy(step.lengths)
        width = step.target_probs.shape[1]
        drafted = torch.arange(width) <= lengths[:, None]
        request = torch.arange(step.batch)[:, None].expand(-1, width)[drafted]
        place = torch.arange(width).expand(step.batch, -1)[drafted]
        temperature = step.params["temperature"]
        draft = None
        if not step.one_hot and step.draft_probs is not None:
            # what gives the draft's distribution once it is divided by the temperature
            scale = torch.where(temperature == 0, 1.0, temperature).double()[:, None, None]
            draft = (step.draft_probs.log() * scale).float().contiguous()
        sampled = torch.nn.functional.pad(step.draft_tokens.clamp_min(0), (1, 0))[drafted]
        cu = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)).int()
        tokens, count = self.verify(
            step.target_probs.log().float()[drafted].contiguous(), draft, sampled, cu,
            step.positions[request] + place - 1, torch.arange(step.batch, dtype=torch.int32), request.int(),
            place.int(), temperature, step.seeds, int(lengths.max()),
        )  # fmt: skip
        tokens = _tokens(tokens)
        return tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= count[:, None], -1)

    def draw(self, step: Step) -> Tensor:
        assert self.draft is not None and step.draft_logits is not None and step.draft_params is not None
        assert step.positions is not None and step.seeds is not None
        tokens = self.draft(
            step.draft_logits[:, 0].clone(), torch.arange(step.batch, dtype=torch.int32),
            step.draft_params["temperature"], step.seeds, step.positions - 1, True, True,
        )  # fmt: skip
        return _tokens(tokens)


class FlashInfer(Signature):
    """``verify(draft_probs [batch, num_draft, vocab] float32, draft_token_ids [batch, num_draft] int32, target_probs
    [batch, num_draft + 1, vocab] float32) -> (tokens [batch, num_draft + 1], accepted, emitted)``, −1 after the last:
    ``chain_speculative_sampling``. Randomness is torch's, or inside the kernel.

    A drafter is called as a plain one, by the names of its arguments.
    """

    name = "flashinfer"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def emit(self, step: Step) -> Tensor:
        assert step.draft_probs is not None
        return _tokens(self.verify(step.draft_probs.float(), step.draft_tokens.int(), step.target_probs.float()))


class SglangTree(Signature):
    """``verify(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
    retrive_next_sibling, uniform_samples [batch, num_nodes], uniform_samples_for_final_sampling [batch], target_probs
    [batch, num_nodes, vocab], draft_probs, threshold_single, threshold_acc, deterministic)``, which writes the first
    three: ``tree_speculative_sampling_target_only``. A tree's tokens are given, not drawn; ``draft_probs`` are zeros.
    It takes no drafter.
    """

    name = "sglang"
    trees = True

    def uniforms(self, width: int) -> int:
        return width + 1

    def refuses(self, problem: Problem) -> str | None:
        return None

    def emit(self, step: Step) -> Tensor:
        assert step.parents is not None
        tree = DraftTree.from_parents(step.parents)
        links = [link.expand(step.batch, -1).contiguous() for link in (tree.first_child, tree.next_sibling)]
        return self._emit(step, step.draft_tokens, links, tree.max_depth + 1, torch.zeros_like(step.target_probs))

    def _emit(self, step: Step, candidates: Tensor, links: list[Tensor], width: int, draft_probs: Tensor) -> Tensor:
        assert step.uniforms is not None
        batch, nodes = candidates.shape
        predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
        accepted = torch.full((batch, width), -1, dtype=torch.int32)
        count = torch.zeros(batch, dtype=torch.int32)
        self.verify(
            predicts, accepted, count, candidates, torch.arange(batch * nodes).view(batch, nodes), *links,
            step.uniforms[:, 1:].contiguous(), step.uniforms[:, 0].contiguous(), step.target_probs.float(),
            draft_probs.float(), 1.0, 1.0, True,
        )  # fmt: skip
        on = torch.arange(width) <= count[:, None]
        tokens = predicts[accepted.long().clamp_min(0)]
        return tokens.masked_fill(~on, -1).long()


class SglangChain(SglangTree):
    """The same arguments for chains, with the draft's probabilities: ``chain_speculative_sampling_triton``.

    ``uniform_samples[:, i]`` is the coin of ``candidates[:, i + 1]``; ``draft_probs [batch, num_nodes - 1, vocab]``.

    A drafter is called as a plain one, by the names of its arguments.
    """

    name = "sglang-chain"
    trees = False

    def emit(self, step: Step) -> Tensor:
        assert step.draft_probs is not None
        batch, nodes = step.batch, step.target_probs.shape[1]
        following = torch.arange(1, nodes + 1).masked_fill(torch.arange(1, nodes + 1) == nodes, -1)
        links = [following.expand(batch, -1).contiguous(), torch.full((batch, nodes), -1)]
        candidates = torch.nn.functional.pad(step.draft_tokens, (1, 0))
        return self._emit(step, candidates, links, nodes, step.draft_probs)


SIGNATURES: dict[str, type[Signature]] = {
    kind.name: kind for kind in (Plain, Transformers, VllmV1, VllmV2, SglangTree, SglangChain, FlashInfer)
}
"""How a verifier may be called, by the names that `audit` takes; ``specdec audit --help`` explains them."""
