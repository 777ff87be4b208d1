"""The same question to the package's own verifiers, on each backend: ``specdec check``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..sampling import SamplingParams
from ..testing import LATTICE, ChainProblem, Verify, exact_law, total_variation
from .cases import Case, chains, trees

TOLERANCE = 1e-5
"""Total variation up to which a distribution counts as right: float32 rounding makes some 1e-7."""


def rules() -> dict[tuple[str, str], tuple[Case, ...]]:
    """For each op and lossless rule whose uniforms are inputs, the cases that it serves."""
    return {
        ("verify_chain", "token"): chains(), ("verify_chain", "block"): chains(),
        ("verify_tree", "sample"): trees(False), ("verify_tree", "recursive"): trees(True),
        ("verify_tree", "traversal"): trees(True),
    }  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """One rule on one backend.

    Attributes
    ----------
    backend, op, rule : str
    cases : int
        How many verify steps were looked at.
    distance : float
        The largest total variation between what comes out and the target's distribution; NaN where the backend raised.
    case : str
        The case where that was, or the one with the most output that the target cannot give.
    impossible : float
        The largest total probability, in one case, of output that the target cannot give.
    failed : bool
        The backend raised in a case; `case` says what.
    """

    backend: str
    op: str
    rule: str
    cases: int
    distance: float
    case: str
    impossible: float = 0.0
    failed: bool = False

    @property
    def exact(self) -> bool:
        return self.distance < TOLERANCE and not self.impossible and not self.failed


def check(
    verifiers: Mapping[str, Callable[..., Any]], backends: Mapping[str, list[str]], device: str
) -> Iterator[Checked]:
    """Each backend's exact joint distribution in all cases, assembled through its uniforms as `audit` does.

    Parameters
    ----------
    verifiers : mapping
        ``"verify_chain"`` and ``"verify_tree"``, which take ``backend``.
    backends : mapping
        Of each of these ops, the backends to ask.
    device : str
        Where the tensors are.
    """
    for (op, rule), cases in rules().items():
        for backend in backends[op]:
            verify = functools.partial(verifiers[op], backend=backend)
            found, failure = [], None
            for case in cases:
                try:
                    law = exact_law(_of(case, verify), case.problem, rule, device)
                    each = [(total_variation(law, e), float((law * (e == 0)).sum())) for e in case.expected]
                    found.append((*min(each), case.name))
                except AssertionError as error:  # what is no distribution at all
                    found.append((1.0, 0.0, f"{case.name}: {error}"))
                except Exception as error:  # as where a backend finds at its first call that it cannot compile
                    failure = f"{case.name!r}: {type(error).__name__}: {error}"
                    break
            if failure is not None:
                yield Checked(backend, op, rule, len(cases), math.nan, failure, failed=True)
                continue
            distance, impossible, name = max(found, key=lambda each: (each[1], each[0]))
            yield Checked(backend, op, rule, len(cases), max(distance, *(off for off, *_ in found)), name, impossible)


def _of(case: Case, verify: Verify) -> Verify:
    """`verify`, with every second row of its batches taken from the case's `beside`."""
    problem, other = case.problem, case.beside
    if other is None:
        return verify
    assert isinstance(problem, ChainProblem)
    lengths, width = (other.length, problem.length), problem.num_tokens
    paths, weights = other.paths()
    rng = np.random.default_rng(0)

    def beside(
        target: Tensor, tokens: Tensor, draft_logits: Tensor, *, acceptance: str, uniform_samples: Tensor,
        params: SamplingParams, draft_params: SamplingParams, **of_length: Tensor,
    ) -> Any:  # fmt: skip
        batch, device = len(tokens), target.device
        chosen = paths[rng.choice(len(paths), batch, p=weights / weights.sum())]
        uniforms = rng.integers(LATTICE, size=(batch, other.num_uniforms))
        rows, named = other.call(lambda *rows, **named: (rows, named), chosen, uniforms, acceptance, device)
        out = verify(
            _alternate(rows[0], target), _alternate(rows[1], tokens), _alternate(named["draft_logits"], draft_logits),
            acceptance=acceptance, uniform_samples=_alternate(named["uniform_samples"], uniform_samples),
            params=_each(other.params, params, batch, device),
            draft_params=_each(other.draft_params, draft_params, batch, device),
            num_draft_tokens=torch.tensor(lengths, dtype=torch.int32, device=device).repeat(batch),
        )  # fmt: skip
        tokens = out.tokens[1::2]
        assert bool((tokens[:, width:] == -1).all()), "more tokens than a step can give"
        return out._replace(tokens=tokens[:, :width], num_tokens=out.num_tokens[1::2])

    return beside


def _alternate(first: Tensor, second: Tensor) -> Tensor:
    """The rows of both by turns; what follows a shorter sequence's own must not be read."""
    width = max(first.shape[1], second.shape[1])
    made = []
    for rows in (first, second):
        filler = torch.nan if rows.is_floating_point() else 2**31 - 1
        behind = [0, 0] * (rows.dim() - 2) + [0, width - rows.shape[1]]
        made.append(torch.nn.functional.pad(rows, behind, value=filler))
    return torch.stack(made, 1).flatten(0, 1)


def _each(first: SamplingParams, second: SamplingParams, batch: int, device: torch.device) -> SamplingParams:
    """Two sequences' parameters by turns."""

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(first, name), getattr(second, name)], device=device).repeat(batch)

    return SamplingParams(column("temperature"), column("top_k"), column("top_p"), column("min_p"))
