"""The same question to the package's own verifiers, of each backend: ``specdec check``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..testing import exact_law, total_variation
from .cases import Case, chains, trees

TOLERANCE = 1e-5
"""Total variation up to which a distribution counts as right: float32 makes some 1e-7."""


def rules() -> dict[tuple[str, str], tuple[Case, ...]]:
    """Of each op and lossless rule whose uniforms are inputs, the cases that it serves."""
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
        The largest total variation between what comes out and the target's distribution.
    case : str
        Where that was.
    """

    backend: str
    op: str
    rule: str
    cases: int
    distance: float
    case: str

    @property
    def exact(self) -> bool:
        return self.distance < TOLERANCE


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
            found = []
            for case in cases:
                try:
                    law = exact_law(verify, case.problem, rule, device)
                    found.append((min(total_variation(law, expected) for expected in case.expected), case.name))
                except AssertionError as error:  # what is no distribution at all
                    found.append((1.0, f"{case.name}: {error}"))
            yield Checked(backend, op, rule, len(cases), *max(found))
