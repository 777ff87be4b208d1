"""A verify step in the form that signatures get it: rows of one batch, everything in the form that any of them asks
for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sampling import SamplingParams
from ..testing import ChainProblem, Float64, Int64, TreeProblem, float64_law

Problem = ChainProblem | TreeProblem
PARAMS = ("temperature", "top_k", "top_p")


@dataclass
class Step:
    """One verify step of `batch` sequences; of trees, a row for each node.

    Attributes
    ----------
    target_logits, draft_logits : Tensor
        ``[batch, num_draft + 1, vocab]`` and ``[batch, num_draft, vocab]`` float32, as the models gave them; no
        `draft_logits` where drafts are one-hot. Of trees both are ``[batch, num_nodes, vocab]``.
    target_probs, draft_probs : Tensor
        The same rows' distributions after the sampling parameters, float64. `draft_probs` are there for one-hot drafts
        too.
    draft_tokens : Tensor
        ``[batch, num_draft]`` int64, −1 after a shorter draft; of trees ``[batch, num_nodes]``, the root's first.
    lengths : ndarray
        ``[batch]``, draft tokens of each sequence.
    params, draft_params : dict of str to Tensor
        "temperature", "top_k" and "top_p", ``[batch]`` each.
    parents : list of int or None
        Of the nodes of a tree, −1 for the root.
    uniforms : Tensor
        ``[batch, n]`` float32 in [0, 1), as many as the signature gives its verifier.
    seeds, positions : Tensor
        ``[batch]`` int64: a sequence's seed, and the position of its first draft token.
    generators : dict of int to torch.Generator
        Of seeded sequences, by their place in the batch.
    """

    target_logits: Tensor
    target_probs: Tensor
    draft_tokens: Tensor
    lengths: Int64
    params: dict[str, Tensor]
    draft_logits: Tensor | None = None
    draft_probs: Tensor | None = None
    draft_params: dict[str, Tensor] | None = None
    parents: list[int] | None = None
    uniforms: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None
    generators: dict[int, torch.Generator] | None = None

    @property
    def batch(self) -> int:
        return len(self.draft_tokens)

    @property
    def one_hot(self) -> bool:
        return self.draft_logits is None

    def take(self, index: Int64) -> Step:
        """The rows at these places."""
        taken = self._of([self], lambda tensors: tensors[0][index])
        if (given := self.generators) is not None:
            taken.generators = {i: given[at] for i, at in enumerate(index.tolist()) if at in given}
        return taken

    def beside(self, other: Step) -> Step:
        """A batch in which rows of `other`, one more than these, and these alternate: `other`'s are first and last."""
        rows = np.arange(2 * self.batch + 1)
        index = rows // 2 + rows % 2 * other.batch
        return self._of([other, self], lambda tensors: _cat(tensors)[index])

    @staticmethod
    def _of(steps: list[Step], join: Callable[[list[Any]], Any]) -> Step:
        made: dict[str, Any] = {}
        for field in fields(Step):
            values = [getattr(step, field.name) for step in steps]
            if isinstance(values[0], dict) and field.name != "generators":
                made[field.name] = {name: join([value[name] for value in values]) for name in values[0]}
            elif isinstance(values[0], (Tensor, np.ndarray)):
                made[field.name] = join(values)
            else:
                made[field.name] = values[-1]
        return Step(**made)


def _cat(values: list[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    width = max(value.shape[1] for value in values) if values[0].dim() > 1 else 0
    if values[0].dim() == 3:
        values = [torch.nn.functional.pad(v, (0, 0, 0, width - v.shape[1])) for v in values]
    elif values[0].dim() == 2:
        values = [torch.nn.functional.pad(v, (0, width - v.shape[1]), value=-1) for v in values]
    return torch.cat(values)


def step_of(problem: Problem) -> Step:
    """A row for each path of draft tokens that can occur, in the order of ``problem.paths()``."""
    paths, _ = problem.paths()
    given: dict[str, Any] = {}

    def capture(target: Tensor, *rows: Any, **named: Any) -> None:
        given.update(named, target_logits=target, tokens=rows[-1], parents=rows[0] if len(rows) > 1 else None)

    problem.call(capture, paths, np.zeros((len(paths), 1), np.int64), "token")
    tree = isinstance(problem, TreeProblem)
    length = len(problem.parents) - 1 if isinstance(problem, TreeProblem) else problem.length
    target = given["target_logits"].float()
    target[:, length + 1 :] = 0.0  # rows after a shorter draft: NaN in the problem
    tokens = given["tokens"]
    if not tree:
        tokens[:, length:] = -1
    draft, probs = given.get("draft_logits", given.get("draft_probs")), None
    if draft is not None:
        draft = draft.float()
        draft[:, length + tree :] = 0.0
        as_probs = isinstance(problem, ChainProblem) and problem.as_probs
        probs = draft.double() if as_probs else laws(draft, problem.draft_params)
        draft = draft.log() if as_probs else draft
    elif not tree:
        probs = torch.nn.functional.one_hot(tokens.clamp_min(0), problem.vocab).double()
    return Step(
        target, laws(target, problem.params), tokens, np.full(len(paths), length), per_row(problem.params, len(paths)),
        draft, probs, per_row(problem.draft_params, len(paths)),
        parents=problem.parents if isinstance(problem, TreeProblem) else None,
    )  # fmt: skip


def step_behind(before: Int64, logits: Sequence[Tensor], probs: Sequence[Tensor]) -> Step:
    """A chain's step whose rows follow the tokens `before` ``[batch, num_draft + 1]``; the first is not a draft token.

    `logits` and `probs`: of target and draft ``[vocab, vocab]``, by the token before.
    """
    params = per_row(SamplingParams(), len(before))
    return Step(
        logits[0][before], probs[0][before], torch.from_numpy(before[:, 1:]),
        np.full(len(before), before.shape[1] - 1), params, logits[1][before[:, :-1]], probs[1][before[:, :-1]], params,
    )  # fmt: skip


def laws(logits: Tensor, params: SamplingParams) -> Tensor:
    """Each row's distribution, float64."""
    return torch.from_numpy(float64_law(logits, params))


def per_row(params: SamplingParams, batch: int) -> dict[str, Tensor]:
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32}
    return {name: torch.full((batch,), getattr(params, name), dtype=dtypes[name]) for name in PARAMS}


def draw(probs: Float64, rng: np.random.Generator) -> Int64:
    """An id of each row ``[n, vocab]``."""
    ends = probs.cumsum(-1)
    ids: Int64 = (ends / ends[:, -1:] <= rng.random(len(probs))[:, None]).sum(-1)
    return ids
