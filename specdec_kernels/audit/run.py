"""The audit itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..checks import check_callable, check_flag, check_int, check_number, check_one_of, check_sequence
from ..testing import target_joint
from .cases import Case, chains, trees
from .causes import best
from .extract import Extractor
from .loops import Loop, loops
from .report import Report, Row
from .signatures import SIGNATURES, Signature

SAMPLES = 60_000


def audit(
    verifier: Callable[..., Any],
    signature: str = "plain",
    *,
    draft: Callable[..., Any] | None = None,
    cases: Sequence[str] | None = None,
    steps: bool = True,
    samples: int = SAMPLES,
    tolerance: float = 1e-5,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Extract the joint distribution that a verifier emits in a table of hard cases, and compare it with the target's.

    The verifier's random numbers are given to it: the uniforms that its signature takes, and what torch's ``rand``,
    ``uniform_``, ``exponential_``, ``multinomial`` and ``bernoulli`` answer, whatever generator they name. Every
    threshold in them is found by bisection, so that the distribution is known without sampling. Kernels that make
    numbers from given seeds are given them in Triton's interpreter. Where that is impossible (other numbers made from
    seeds, or inside a compiled kernel), the verifier is sampled and a G-test decides. A loop of drafting and verifying
    over several steps is exact for such interpreted kernels, otherwise sampled.

    Parameters
    ----------
    verifier : callable
        With the arguments of its signature.
    signature : str
        One of `SIGNATURES`; each one's docstring says what it is called with.
    draft : callable, optional
        The drafter that goes with it, called only in the loop of chains; None: the audit draws the drafts.
    cases : sequence of str, optional
        Which cases to run: those whose name contains one of these. None: all.
    steps : bool
        Whether to run the loop (of chains only).
    samples : int
        How many, where something is sampled. For a verifier that takes one sequence a call, at most 5000 a case and
        2000 over several steps; for one with seeds of its own, at most 8000 over several steps. Where drafts have no
        distribution, at least 2000 of each drafted path. What is off by less than about ``4.5 / sqrt(samples)`` in
        total variation may pass.
    tolerance : float
        Total variation up to which an exact distribution counts as right: the rounding of float32 probabilities.
    seed : int
        Of the audit's own random numbers.
    progress : callable, optional
        Called with each case's name.

    Returns
    -------
    Report
        Printed, a table with the smallest counterexample and the likely cause.

    Raises
    ------
    ValueError
        An unknown signature, cases that no name contains, or a drafter without a loop that would call it: beside a
        verifier of trees, or with `steps` off.
    TypeError
        A verifier or drafter that is no callable, or whose arguments are not those of its signature (those of a
        compiled one that is called by names are not known); a verifier that raises a TypeError in every case.
    """
    check_one_of("audit", "signature", signature, SIGNATURES)
    for name, value, needed in (("verifier", verifier, True), ("draft", draft, False), ("progress", progress, False)):
        if needed or value is not None:
            check_callable("audit", name, value)
    if cases is not None:
        check_sequence("audit", "cases", cases, str, "strings", least=0)
    check_flag("audit", "steps", steps)
    if draft is not None and not steps:
        raise ValueError("audit: draft must be None without steps, as only several steps call it, got one")
    check_int("audit", "samples", samples, 1, 2**31 - 1)
    check_number("audit", "tolerance", tolerance, 0, 1)
    check_int("audit", "seed", seed, 0, None)
    kind = SIGNATURES[signature](verifier, draft)
    table = _cases(kind)
    if cases is not None:
        table = [case for case in table if any(part in case.name for part in cases)]
        if not table:
            raise ValueError(f"audit: cases must be parts of names as {', '.join(c.name for c in _cases(kind)[:3])}")
    rng = np.random.default_rng(seed)
    rows = []
    with torch.compiler.set_stance("force_eager"):
        for case in table:
            if progress is not None:
                progress(case.name)
            rows.append(_row(kind, case, rng, samples, tolerance))
        over_steps: list[Loop] = []
        if steps and not kind.trees:
            if progress is not None:
                progress("several steps")
            over_steps = loops(kind, samples, seed, tolerance)
    found = [(row.problem, row.joint) for row in rows if row.joint is not None]
    always = [[m for m, p in joint.failures.items() if p > 0.999 and "TypeError" in m] for _, joint in found]
    if always and all(always):
        raise TypeError(
            f"audit: verifier must take and return what {signature!r} does, but in every case {always[0][0]}"
        )
    wrong = [row for row in rows if row.joint is not None and row.lossless is False and not row.joint.failures]
    off = any(row.off for row in wrong)
    served = [(problem, joint) for problem, joint in found if joint.at_ends or not joint.failures]  # others fit nothing
    fits = best(sorted(served, key=lambda f: -f[1].distance(target_joint(f[0]))), tolerance) if off else []
    return Report(_name(verifier), signature, rows, over_steps, fits, tolerance)


def _cases(kind: Signature) -> list[Case]:
    if kind.trees:
        return [*trees(kind.name == "plain")]
    return [*chains()]


def _row(kind: Signature, case: Case, rng: np.random.Generator, samples: int, tolerance: float) -> Row:
    problem, vocab = case.problem, case.problem.vocab
    note = kind.refuses(problem)
    if case.beside is not None and not note:
        ragged = case.beside.length != case.drafted
        if not kind.batched:
            note = "one sequence a call"
        elif ragged and not kind.ragged:
            note = "drafts have one length"
        else:
            note = kind.refuses(case.beside)
    if note:
        return Row(case.name, vocab, case.drafted, problem, note=note)
    joint = Extractor(kind, case, rng).joint(samples, tolerance)
    choices = [problem, *case.also]
    distances = [joint.distance(expected) for expected in case.expected]
    nearest = int(np.argmin(distances))
    problem, distance = choices[nearest], distances[nearest]
    expected = target_joint(problem)
    agrees = bool(joint.agrees(expected, tolerance))
    good = agrees and not joint.impossible and not joint.failures
    return Row(case.name, vocab, case.drafted, problem, joint, distance, joint.p_value(expected), good, off=not agrees)


def _name(verifier: Callable[..., Any]) -> str:
    module = inspect.getmodule(verifier)
    name = getattr(verifier, "__qualname__", None) or type(verifier).__name__
    return f"{module.__name__}:{name}" if module else name
