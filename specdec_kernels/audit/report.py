"""What an audit found, in words and as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..testing import ChainProblem, Float64, target_joint
from .causes import Fit
from .extract import Joint
from .loops import Finding, Loop
from .step import Problem

_END_CHANCE = {torch.float32: "2**-24", torch.float64: "2**-53"}


@dataclass(frozen=True)
class Row:
    """One case's result.

    Attributes
    ----------
    case : str
    vocab, drafted : int
    joint : Joint or None
        What was found; None where the case was not run.
    problem : Problem
        What it is compared with.
    distance, p_value : float
        Total variation; of samples also the p-value of a G-test (1 where exact).
    lossless : bool or None
        None where it was not run.
    note : str
        Why it was not run.
    off : bool
        Whether the distribution as a whole is wrong, not only at an end of a uniform.
    """

    case: str
    vocab: int
    drafted: int
    problem: Problem
    joint: Joint | None = None
    distance: float = 0.0
    p_value: float = 1.0
    lossless: bool | None = None
    note: str = ""
    off: bool = False

    @property
    def how(self) -> str:
        if self.joint is None:
            return "not run"
        return "exact" if self.joint.samples is None else f"{self.joint.samples} samples"

    @property
    def result(self) -> str:
        if self.joint is None:
            return self.note
        found = [
            f"{'only at an end of a uniform' if self.joint.at_ends else f'probability {p:.1e}'}: {message}"
            for message, p in self.joint.failures.items()
        ]
        if self.joint.impossible:
            where = "at an end of a uniform" if self.joint.at_ends else f"p = {sum(self.joint.impossible.values()):.1e}"
            found.append(f"emits what the target cannot give ({where})")
        if not self.lossless and (not found or (self.off and self.joint.at_ends)):
            found.append("another distribution")
        return "; ".join(found) or "lossless"


@dataclass(frozen=True)
class Report:
    """Whether a verifier is lossless.

    Attributes
    ----------
    verifier, signature : str
    rows : list of Row
        The cases, the smallest first.
    loops : list of Loop
        Runs over several steps.
    fits : list of Fit
        What explains the cases that are off; where none does, the nearest.
    tolerance : float
        Total variation that counts as zero.
    """

    verifier: str
    signature: str
    rows: list[Row]
    loops: list[Loop] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    tolerance: float = 1e-5

    @property
    def ran(self) -> bool:
        """Whether the verifier served any case."""
        return any(row.lossless is not None for row in self.rows)

    @property
    def lossless(self) -> bool:
        """Also False where it served no case: nothing is known then."""
        return (
            self.ran
            and all(row.lossless is not False for row in self.rows)
            and all(loop.lossless for loop in self.loops)
        )

    @property
    def smallest(self) -> Row | None:
        """The first case that is off."""
        return next((row for row in self.rows if row.lossless is False), None)

    @property
    def counterexample(self) -> str | None:
        """The smallest counterexample, in numbers."""
        return None if self.smallest is None else _counterexample(self.smallest)

    @property
    def _wrong_beside_others_alone(self) -> bool:
        """Whether batches of one kind were right, and only those of two kinds wrong."""
        wrong, right = ({row.case for row in self.rows if row.lossless is how} for how in (False, True))
        return all("beside" in case for case in wrong) and any("beside" not in case for case in right)

    @property
    def findings(self) -> list[Finding]:
        """All that was found wrong: the likely causes."""
        found: list[Finding] = []
        odd = [r.joint for r in self.rows if r.joint and (r.joint.impossible or r.joint.failures)]
        if odd and all(joint.at_ends for joint in odd):
            found += _at_ends(odd)
        else:
            failed = (r for r in self.rows if r.joint and r.joint.failures and not r.joint.at_ends)
            row = next(failed, None if self.fits else self.smallest)
            found += [] if row is None else [Finding("failure", f"{row.case}: {row.result}.")]
        if self.fits and self.fits[0].explains:
            found.append(Finding(self.fits[0].cause.name, self.fits[0].words))
        elif self.fits and self._wrong_beside_others_alone:
            words = (
                "Only a batch of unlike sequences comes out wrong: a sequence's tokens depend on those beside it, or "
                "on its draft being shorter than theirs."
            )
            found.append(Finding("neighbours", words))
        elif self.fits:
            nearest = f"No known cause explains every case; the nearest is this one. {self.fits[0].words}"
            found.append(Finding("unknown", nearest))
        for loop in self.loops:
            if loop.lossless or self.fits:
                continue
            unknown = "Several steps come out wrong, and no known cause explains it."
            failure = loop.failure and Finding("failure", f"Over several steps {loop.failure}.")
            finding = loop.cause or failure or Finding("unknown", unknown)
            found += [finding] if finding not in found else []
        return found

    def as_dict(self) -> dict[str, Any]:
        """What ``specdec audit --json`` prints."""
        cases = [
            {
                "case": row.case, "vocab": row.vocab, "drafted": row.drafted, "how": row.how,
                "lossless": row.lossless, "total_variation": row.distance if row.joint else None,
                "p_value": row.p_value if row.joint else None, "result": row.result,
            }
            for row in self.rows
        ]  # fmt: skip
        over_steps = [
            {
                "name": loop.name, "vocab": loop.vocab, "how": loop.how, "lossless": loop.lossless,
                "total_variation": loop.distance, "p_value": loop.p_value, "failure": loop.failure,
            }
            for loop in self.loops
        ]  # fmt: skip
        findings = [finding._asdict() for finding in self.findings]
        return {
            "verifier": self.verifier, "signature": self.signature, "ran": self.ran, "lossless": self.lossless,
            "causes": findings, "counterexample": self.counterexample, "cases": cases, "loops": over_steps,
        }  # fmt: skip

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        lines = [f"audit of {self.verifier} as {self.signature}", ""]
        wide = max(len(name) for name in (*(row.case for row in self.rows), *(loop.name for loop in self.loops)))
        lines.append(f"{'case':{wide}}  ids  drafted  {'how':16}  {'TV':>7}  result")
        for row in self.rows:
            distance = f"{row.distance:7.0e}" if row.joint else " " * 7
            lines.append(f"{row.case:{wide}}  {row.vocab:3}  {row.drafted:7}  {row.how:16}  {distance}  {row.result}")
        for loop in self.loops:
            result = loop.failure or ("lossless" if loop.lossless else "another distribution")
            if loop.samples is not None and loop.failure is None:
                result += f" (p = {loop.p_value:.1e})"
            lines.append(f"{loop.name:{wide}}  {loop.vocab:3}           {loop.how:16}  {loop.distance:7.0e}  {result}")
        ran = sum(row.lossless is not None for row in self.rows)
        yes = "yes" if ran == len(self.rows) else f"yes, in the {ran} of {len(self.rows)} cases that it serves"
        answer = yes if self.lossless else "NO" if self.ran else "not known, as it served none of the cases"
        lines += ["", f"Lossless: {answer}."]
        if self.counterexample:
            lines += ["", "Smallest counterexample", self.counterexample]
        if self.findings:
            lines += ["", "Likely cause", *(f"  {finding.words}" for finding in self.findings)]
        return "\n".join(lines)


def _at_ends(joints: list[Joint]) -> list[Finding]:
    """What goes wrong only where a uniform is at an end of its range."""
    dtypes = {dtype for joint in joints for dtype in joint.dtypes}
    chance = " or ".join(sorted({_END_CHANCE.get(dtype, str(dtype)) for dtype in dtypes}))
    chance = f" (its chance is {chance})" if chance else ""  # of numbers that a kernel makes it is not known
    found = []
    impossible = [joint for joint in joints if joint.impossible]
    if impossible:
        if all(joint.accepted for joint in impossible):
            words = (
                f"Where a uniform is exactly 0{chance} it accepts a draft token that the target "
                "cannot give: `<=` where `<` is meant, so that 0 <= 0 passes."
            )
            found.append(Finding("zero-accepted", words))
        else:
            words = (
                f"Where a uniform is at an end of its range{chance} it draws a token that the target "
                "cannot give: the draw begins on an id of weight 0, or runs past the last one of weight."
            )
            found.append(Finding("draw-at-an-end", words))
    failures = sorted({message for joint in joints for message in joint.failures})
    found += [Finding("failure", f"At an end of a uniform's range{chance} {m}.") for m in failures]
    return found


def _counterexample(row: Row) -> str:
    joint, problem = row.joint, row.problem
    assert joint is not None
    lines = [f"  {row.case}: {row.vocab} ids, {row.drafted} drafted; {row.how}, total variation {row.distance:.1e}"]
    if isinstance(problem, ChainProblem):
        lines.append(f"  target of the first token  {_probs(problem.target_laws()[0])}")
        if problem.draft is not None:
            lines.append(f"  draft of the first token   {_probs(problem.draft_laws()[0])}")
        else:
            lines.append("  draft: one-hot")
    else:
        lines.append(f"  tree with the parents {problem.parents}")
        lines.append(f"  target at the root  {_probs(problem.target_laws()[0])}")
    if joint.failures:
        return "\n".join([*lines, *(f"  {message}, with probability {p:.1e}" for message, p in joint.failures.items())])
    expected = np.broadcast_to(target_joint(problem), joint.law.shape)
    if joint.impossible:
        tokens = min(joint.impossible, key=len)
        lines.append(f"  it emits {list(tokens)}, which the target gives with probability 0")
        return "\n".join(lines)
    worst = int(np.abs(joint.law - expected).reshape(len(joint.law), -1).sum(-1).argmax())
    found, wanted = joint.law[worst], expected[worst]
    for depth in range(1, found.ndim + 1):  # the fewest tokens that show it
        rest = tuple(range(depth, found.ndim))
        off = found.sum(rest) - wanted.sum(rest)
        if np.abs(off).sum() >= 0.5 * np.abs(found - wanted).sum() or depth == found.ndim:
            cell = np.unravel_index(np.abs(off).argmax(), off.shape)
            told = ", ".join(str(int(i)) for i in cell)
            lines.append(
                f"  tokens beginning with [{told}] come with probability {found.sum(rest)[cell]:.6f}, "
                f"not {wanted.sum(rest)[cell]:.6f}"
            )
            break
    return "\n".join(lines)


def _probs(law: Float64) -> str:
    return "(" + ", ".join(f"{p:.4g}" for p in law) + ")"
