"""Why a verifier may be wrong: what each known defect would emit, in float64, to be compared with what was found.

A cause is itself a rule: from the rows along a drafted path it computes the probability that 0, 1, … draft tokens are
accepted and, for each, what the final token is drawn from. `best` asks which rule emits what the verifier does, in
every case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..sampling import SamplingParams
from ..testing import ChainProblem, Float64, TreeProblem, float64_law, joint_of, target_joint
from .extract import Joint
from .step import Problem


class Rows(NamedTuple):
    """What a rule sees of one drafted path of L tokens."""

    path: tuple[int, ...]
    target: Float64
    """``[L + 1, vocab]``."""
    draft: Float64
    """``[L, vocab]``, what the tokens were drawn from."""


Answer = tuple[Float64, Float64]
"""``[L + 1]`` probabilities of 0 … L accepted tokens, ``[L + 1, vocab]`` distributions of the token after them."""
Rule = Callable[[Rows], Answer]


class View:
    """A problem's tables, under any sampling parameters."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.paths, _ = problem.paths()
        self._rows: dict[tuple[SamplingParams | None, SamplingParams | None], list[Rows]] = {}

    def rows(self, target: SamplingParams | None = None, draft: SamplingParams | None = None) -> list[Rows]:
        """The rows along each path of a chain; under other parameters, if they are given."""
        key = (target, draft)
        if key not in self._rows:
            self._rows[key] = self._made(target, draft)
        return self._rows[key]

    def _made(self, target: SamplingParams | None, draft: SamplingParams | None) -> list[Rows]:
        problem = self.problem
        assert isinstance(problem, ChainProblem)
        length = problem.length
        p = problem.target_laws() if target is None else [float64_law(t, target) for t in problem.target]
        q = None if problem.draft is None else problem.draft_laws()
        if draft is not None and problem.draft is not None and not problem.as_probs:
            q = [float64_law(t, draft) for t in problem.draft]
        made = []
        for path in self.paths:
            t = tuple(int(v) for v in path)
            rows = [p[d][t[:d]] for d in range(length + 1)]
            own = [np.eye(problem.vocab)[v] for v in t] if q is None else [q[d][t[:d]] for d in range(length)]
            made.append(Rows(t, np.array(rows), np.array(own).reshape(length, problem.vocab)))
        return made

    def joint(self, rule: Rule, rows: list[Rows]) -> Float64:
        """What the rule emits."""
        emitted, volume, owner = [], [], []
        for number, of in enumerate(rows):
            chances, final = rule(of)
            for accepted, chance in enumerate(chances):
                for token in np.flatnonzero(chance * final[accepted] > 0):
                    emitted.append((*of.path[:accepted], int(token)))
                    volume.append(chance * final[accepted][token])
                    owner.append(number)
        return joint_of(self.problem, emitted, np.array(volume), np.array(owner))


# --- rules ------------------------------------------------------------------------------------------------------------


def _ratio(p: float, q: float) -> float:
    return 0.0 if p <= 0 else np.inf if q <= 0 else p / q


def _norm(weights: Float64, otherwise: Float64) -> Float64:
    weights = np.maximum(weights, 0)
    return weights / weights.sum() if weights.sum() > 1e-12 else otherwise


def _in_order(accept: Sequence[float]) -> Float64:
    """Tokens are accepted up to the first that is not."""
    a = np.array([*accept, 0.0])
    chances: Float64 = np.concatenate([[1.0], np.cumprod(a[:-1])]) * (1 - a)
    return chances


def token(rows: Rows, accept: Callable[[float, float], float] | None = None, draft: Float64 | None = None) -> Answer:
    """The token rule, with another test of (P(x), Q(x)) or another Q."""
    p, q = rows.target, rows.draft if draft is None else draft
    accept = accept or (lambda p, q: min(1.0, _ratio(p, q)))
    final = [_norm(p[i] - q[i], p[i]) for i in range(len(rows.path))]
    return _in_order([accept(p[i][x], q[i][x]) for i, x in enumerate(rows.path)]), np.array([*final, p[-1]])


def _finals(change: Callable[[Rows, int], Float64]) -> Rule:
    """The token rule with another residual."""

    def rule(rows: Rows) -> Answer:
        chances, final = token(rows)
        for i in range(len(rows.path)):
            final[i] = change(rows, i)
        return chances, final

    return rule


def _without(p: Float64, x: int) -> Float64:
    return _norm(np.where(np.arange(len(p)) == x, 0, p), p)


def _bonus_of_the_last(rows: Rows) -> Answer:
    chances, final = token(rows)
    final[-1] = rows.target[max(len(rows.path) - 1, 0)]
    return chances, final


def _shifted(rows: Rows) -> Answer:
    """Each token is tested against the target's next row."""
    return token(rows._replace(target=np.concatenate([rows.target[1:], rows.target[-1:]])))


def _shifted_draft(rows: Rows) -> Answer:
    return token(rows, draft=np.concatenate([rows.draft[:1], rows.draft[:-1]]))


def _ratios(rows: Rows) -> list[float]:
    """The chance to accept each token of the path."""
    return [min(1.0, _ratio(rows.target[i][x], rows.draft[i][x])) for i, x in enumerate(rows.path)]


def _one_coin(rows: Rows) -> Answer:
    """One number for all tests: tokens are accepted as long as it stays below the least ratio so far."""
    _, final = token(rows)
    reach = np.minimum.accumulate([1.0, *_ratios(rows)])
    return reach - np.append(reach[1:], 0.0), final


def _coin_again(which: int | None) -> Rule:
    """The final draw, by the inverse distribution function, reuses a coin: the first, or the one that rejected."""

    def rule(rows: Rows) -> Answer:
        chances, final = token(rows)
        ratios = _ratios(rows)
        for accepted in range(len(chances)):
            coin = accepted if which is None else which
            if coin >= len(ratios):
                continue
            low, high = (ratios[coin], 1.0) if coin == accepted else (0.0, ratios[coin])
            if high > low:
                ends = np.append(0.0, final[accepted].cumsum()).clip(0, 1)
                final[accepted] = _norm(np.minimum(ends[1:], high) - np.maximum(ends[:-1], low), final[accepted])
        return chances, final

    return rule


def _greedy(rows: Rows) -> Answer:
    top = np.eye(rows.target.shape[1])[rows.target.argmax(-1)]
    return token(rows._replace(target=top))


def _lenient(alpha: float) -> Rule:
    return lambda rows: token(rows, lambda p, q: min(1.0, _ratio(p, q) / (1 - alpha)))


def _mixed(share: float) -> Rule:
    return lambda rows: token(rows, lambda p, q: min(1.0, 1 - share + share * _ratio(p, q)))


def _hotter(power: float) -> Rule:
    """Q at another temperature: Q ** power, renormalised."""
    return lambda rows: token(rows, draft=np.array([_norm(q**power, q) for q in rows.draft]))


def block(rows: Rows, defect: str = "") -> Answer:
    """Block verification, with a defect by its name."""
    p, q, length = rows.target, rows.draft, len(rows.path)
    weights, test = [1.0], [1.0]
    for i, x in enumerate(rows.path):
        before = 1.0 if defect == "forgotten" else weights[-1]
        grown = 0.0 if before == 0 else before * _ratio(p[i][x], q[i][x])
        weights.append(grown if defect == "unclipped" else min(1.0, grown))
    for i in range(1, length + 1):
        w = weights[i - 1] if defect == "stale" else weights[i]
        left = np.maximum(w * p[i] - q[i], 0).sum() if i < length else 0.0
        if i == length or defect == "plain test":
            test.append(min(1.0, w))
        else:
            test.append(left / (left + 1 - w) if left + 1 - w > 0 else 1.0)
        test[-1] = float(np.clip(test[-1], 0, 1))
    if defect == "stops":
        chances = _in_order(test[1:])
    else:
        missed = np.append(np.cumprod((1 - np.array(test))[::-1])[::-1][1:], 1.0)
        chances = np.array(test) * missed
    final = []
    for i in range(length):
        own = {"stale": max(i - 1, 0), "stale residual": max(i - 1, 0), "last": length}.get(defect, i)
        w = 1.0 if defect == "no weight" else min(1.0, weights[own])
        final.append(_norm(w * p[i] - q[i], p[i]))
    return chances, np.array([*final, p[-1]])


# --- trees ------------------------------------------------------------------------------------------------------------


def tree_joint(problem: TreeProblem, rule: str) -> Float64:
    """What a walk from the root down emits, which tries the children of a node in order by a rule of `_tried`."""
    paths, _ = problem.paths()
    target = problem.target_laws()
    drafts = None if problem.draft is None else [float64_law(q, problem.draft_params) for q in problem.draft]
    emitted: list[tuple[int, ...]] = []
    volume: list[float] = []
    owner: list[int] = []

    def walk(node: int, above: tuple[int, ...], chance: float, number: int, tokens: Sequence[int]) -> None:
        children = [c for c in range(len(problem.parents)) if problem.parents[c] == node and tokens[c - 1] >= 0]
        p = target[len(above)][above]
        q = None if drafts is None or not children else drafts[len(above)][above]
        taken, rest = _tried(rule, p, q, [int(tokens[c - 1]) for c in children])
        for child, share in zip(children, taken, strict=True):
            if share > 0:
                walk(child, (*above, int(tokens[child - 1])), chance * share, number, tokens)
        for v in np.flatnonzero(rest > 0):
            emitted.append((*above, int(v)))
            volume.append(chance * (1 - sum(taken)) * rest[v])
            owner.append(number)

    for number, tokens in enumerate(paths):
        walk(0, (), 1.0, number, tokens)
    return joint_of(problem, emitted, np.array(volume), np.array(owner))


def _tried(rule: str, p: Float64, q: Float64 | None, tokens: list[int]) -> tuple[list[float], Float64]:
    """How often each child is accepted, and what the final token is drawn from where none is."""
    taken, left = [], 1.0
    own = p.copy()
    for x in tokens:
        if rule == "everything":
            accept = 1.0
        elif q is not None:
            accept = min(1.0, _ratio(own[x], q[x]))
        else:
            accept = min(1.0, float(own[x]))
        taken.append(left * accept)
        left *= 1 - accept
        if rule == "not updated":
            continue
        if q is None:
            own = _norm(np.where(np.arange(len(p)) == x, 0, own), own)
        elif rule == "target not updated":
            q = _norm(np.where(np.arange(len(p)) == x, 0, q), q)
        else:
            own = _norm(own - q, own)
            if rule != "draft not updated":
                q = _norm(np.where(np.arange(len(p)) == x, 0, q), q)
    if rule in ("not updated", "target not updated"):
        excluded = np.where(np.isin(np.arange(len(p)), tokens), 0, p)
        own = _norm(p - q if q is not None else excluded, p)
    if rule == "final from the target":
        own = p
    return taken, own


# --- causes -----------------------------------------------------------------------------------------------------------


Predict = Callable[[View, float], Float64 | None]


@dataclass(frozen=True)
class Cause:
    """A defect: its words, and what it would emit.

    Attributes
    ----------
    name, words : str
    predict : callable
        ``(view, theta)``: the joint distribution; None where the cause does not apply.
    thetas : tuple of float
        Coarse values of a free number; empty: there is no free number.
    """

    name: str
    words: str
    predict: Predict
    thetas: tuple[float, ...] = ()


def _of(rule: Rule) -> Predict:
    return lambda view, theta: view.joint(rule, view.rows()) if isinstance(view.problem, ChainProblem) else None


def _fitted(rule: Callable[[float], Rule]) -> Predict:
    return lambda view, theta: _of(rule(theta))(view, theta)


Change = Callable[[SamplingParams, SamplingParams], SamplingParams]


def _with(target: Change | None = None, draft: Change | None = None) -> Predict:
    """The token rule under other parameters, made of (the target's, the draft's)."""

    def predict(view: View, theta: float) -> Float64 | None:
        if not isinstance(view.problem, ChainProblem):
            return None
        own = (view.problem.params, view.problem.draft_params)
        return view.joint(token, view.rows(target and target(*own), draft and draft(*own)))

    return predict


def _tree(rule: str) -> Predict:
    return lambda view, theta: tree_joint(view.problem, rule) if isinstance(view.problem, TreeProblem) else None


def _off(params: SamplingParams, *names: str) -> SamplingParams:
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return replace(params, **{name: off[name] for name in names})  # type: ignore[arg-type]


_EVERYTHING = "It accepts every draft token: what comes out is the draft's distribution, whatever the target says."
CAUSES: tuple[Cause, ...] = (
    Cause("everything-accepted", _EVERYTHING, _of(lambda rows: token(rows, lambda p, q: 1.0))),
    Cause("everything-rejected", "It accepts no draft token and yet draws from the residual.",
          _of(lambda rows: token(rows, lambda p, q: 0.0))),
    Cause("no-coin", "It accepts a draft token exactly where the target gives it at least the draft's probability; "
          "no random number is compared with their ratio.",
          _of(lambda rows: token(rows, lambda p, q: float(p >= q)))),
    Cause("draft-truncation", "It cuts the draft's distribution as it cuts the target's (top-k, top-p), although the "
          "draft token was drawn without that: the q of its ratio is not what the token came from.",
          _with(draft=lambda t, d: replace(d, top_k=t.top_k, top_p=t.top_p))),
    Cause("draft-truncation", "It cuts the draft's distribution by the target's top-p, although the draft token was "
          "drawn without that: the q of its ratio is not what the token came from.",
          _with(draft=lambda t, d: replace(d, top_p=t.top_p))),
    Cause("draft-truncation", "It cuts the draft's distribution by the target's top-k, although the draft token was "
          "drawn without that: the q of its ratio is not what the token came from.",
          _with(draft=lambda t, d: replace(d, top_k=t.top_k))),
    Cause("draft-uncut", "Its q is the draft's distribution before top-k and top-p, although the draft token was "
          "drawn after them.", _with(draft=lambda t, d: _off(d, "top_k", "top_p"))),
    Cause("draft-temperature", "It computes q at the target's temperature, although the draft token was drawn at "
          "another.", _with(draft=lambda t, d: replace(d, temperature=t.temperature))),
    Cause("draft-temperature", "It computes q at temperature 1, although the draft token was drawn at another.",
          _with(draft=lambda t, d: _off(d, "temperature"))),
    Cause("draft-parameters", "It computes q with the target's sampling parameters, although the draft token was drawn "
          "with the draft's own.", _with(draft=lambda t, d: t)),
    Cause("draft-parameters", "It computes q without any sampling parameters, although the draft token was drawn with "
          "some.", _with(draft=lambda t, d: _off(d, "temperature", "top_k", "top_p"))),
    Cause("draft-temperature", "It computes q at {inverse:.2f} times the temperature that the draft token was drawn "
          "at.",
          _fitted(_hotter), (0.25, 0.4, 0.55, 0.7, 0.85, 1.2, 1.5, 2.0, 3.0, 4.0)),
    Cause("target-temperature", "It ignores the target's temperature.", _with(lambda t, d: _off(t, "temperature"))),
    Cause("target-truncation", "It ignores the target's top-k and top-p.",
          _with(lambda t, d: _off(t, "top_k", "top_p"))),
    Cause("target-truncation", "It ignores the target's top-p.", _with(lambda t, d: _off(t, "top_p"))),
    Cause("target-truncation", "It ignores the target's top-k.", _with(lambda t, d: _off(t, "top_k"))),
    Cause("target-parameters", "It ignores all of the target's sampling parameters.",
          _with(lambda t, d: _off(t, "temperature", "top_k", "top_p"))),
    Cause("greedy", "It decodes greedily, although it is asked to sample.", _of(_greedy)),
    Cause("residual", "After a rejection it draws from the target's distribution itself, not from what that has in "
          "excess of the draft's: the rejected tokens are counted twice.", _of(_finals(lambda r, i: r.target[i]))),
    Cause("residual", "After a rejection it draws from the target's distribution without the rejected token, as if the "
          "draft were one-hot.", _of(_finals(lambda r, i: _without(r.target[i], r.path[i])))),
    Cause("residual", "After a rejection it draws from the difference of target and draft in absolute value.",
          _of(_finals(lambda r, i: _norm(np.abs(r.target[i] - r.draft[i]), r.target[i])))),
    Cause("residual", "After a rejection it draws from the draft's distribution.",
          _of(_finals(lambda r, i: r.draft[i]))),
    Cause("bonus", "After a fully accepted draft it draws the bonus token from the row of the last draft token.",
          _of(_bonus_of_the_last)),
    Cause("rows", "It compares each draft token with the target's next row: an index is off by one.", _of(_shifted)),
    Cause("rows", "It compares each draft token with the draft's row before: an index is off by one.",
          _of(_shifted_draft)),
    Cause("shared-coin", "It takes one random number for all draft tokens of a step.", _of(_one_coin)),
    Cause("shared-coin", "It draws the final token with the number that its first draft token was tested with.",
          _of(_coin_again(0))),
    Cause("shared-coin", "It draws the recovered token with the number that rejected the draft token.",
          _of(_coin_again(None))),
    Cause("block-weight", "Block verification with a stale weight: test and residual take the weight of the token "
          "before.", _of(lambda rows: block(rows, "stale"))),
    Cause("block-weight", "Block verification whose residual takes the weight of the token before the last accepted "
          "one.", _of(lambda rows: block(rows, "stale residual"))),
    Cause("block-weight", "Block verification whose residual takes the weight of the whole block, not that of the "
          "accepted tokens.", _of(lambda rows: block(rows, "last"))),
    Cause("block-weight", "Block verification whose weight forgets the tokens before: it is a single token's ratio.",
          _of(lambda rows: block(rows, "forgotten"))),
    Cause("block-weight", "Block verification whose weight is not cut at 1 on the way.",
          _of(lambda rows: block(rows, "unclipped"))),
    Cause("block-weight", "Block verification whose residual leaves the weight out.",
          _of(lambda rows: block(rows, "no weight"))),
    Cause("block-test", "Block verification that tests its weight itself inside the block, without the residual mass "
          "that follows.", _of(lambda rows: block(rows, "plain test"))),
    Cause("block-test", "Block verification that stops at the first token that fails its test, although the last "
          "success counts.",
          _of(lambda rows: block(rows, "stops"))),
    Cause("lenient", "It accepts more than it may: P / Q is compared after a division by {rest:.2f}.",
          _fitted(_lenient), (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    Cause("lenient", "It tests against a mixture, {theta:.2f} of the target and the rest of the draft.",
          _fitted(_mixed), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    Cause("siblings", "Siblings are tried against distributions that are not updated: after a rejected child the next "
          "one must be tested against what is left of the target.", _tree("not updated")),
    Cause("siblings", "Siblings are tried against a target that is not updated after a rejected child.",
          _tree("target not updated")),
    Cause("siblings", "Siblings are tried against a draft from which the rejected child is not taken.",
          _tree("draft not updated")),
    Cause("everything-accepted", _EVERYTHING, _tree("everything")),
    Cause("residual", "Where no child is accepted, the final token is drawn from the target's own distribution.",
          _tree("final from the target")),
)  # fmt: skip


class Fit(NamedTuple):
    """How well a cause explains what was found."""

    cause: Cause
    theta: float
    explains: bool
    left: float
    """Total variation that it leaves unexplained, summed over the cases."""

    @property
    def words(self) -> str:
        theta = self.theta or 1.0
        return self.cause.words.format(theta=theta, inverse=1 / theta, rest=1 - theta)


def best(found: Sequence[tuple[Problem, Joint]], tolerance: float) -> list[Fit]:
    """The causes that emit what was found in every case, or else the one that comes nearest."""
    views = [(View(problem), joint) for problem, joint in found]
    fits = [fit for cause in CAUSES if (fit := _fitted_best(cause, views, tolerance)) is not None]
    explaining = [fit for fit in fits if fit.explains]
    fixed = [fit for fit in explaining if not fit.cause.thetas]
    return fixed or explaining or sorted(fits, key=lambda f: f.left)[:1]


Views = Sequence[tuple[View, Joint]]
_FITTED_ON = 4
"""Cases that a free number is fitted on."""


def _fitted_best(cause: Cause, views: Views, tolerance: float) -> Fit | None:
    if not cause.thetas:
        return _fit(cause, views, 0.0, tolerance)
    few = views[:_FITTED_ON]
    made = [fit for theta in cause.thetas if (fit := _fit(cause, few, theta, tolerance)) is not None]
    if not made:
        return None
    fit, low, high = min(made, key=lambda f: f.left), cause.thetas[0], cause.thetas[-1]
    step = 0.2 * fit.theta
    while step > 1e-6:
        near = [_fit(cause, few, t, tolerance) for t in (fit.theta - step, fit.theta + step) if low <= t <= high]
        better = min((f for f in near if f is not None), key=lambda f: f.left, default=fit)
        if better.left < fit.left:
            fit = better
        else:
            step /= 2.5
    return _fit(cause, views, fit.theta, tolerance)


def _fit(cause: Cause, views: Views, theta: float, tolerance: float) -> Fit | None:
    left, explains = 0.0, True
    for view, joint in views:
        predicted = cause.predict(view, theta)
        if predicted is None:
            return None
        distance, target = joint.distance(predicted), target_joint(view.problem)
        left += distance
        explains = explains and joint.agrees(predicted, 10 * tolerance)
        if joint.samples is None and not joint.agrees(target, tolerance):  # a small error agrees with the target, too
            explains = explains and distance < joint.distance(target) / 2
    return Fit(cause, theta, explains, left)
