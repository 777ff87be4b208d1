"""Tools that prove a backend right: float64 laws, independent random numbers, and the exact law a verifier produces.

The uniforms of the ratio rules are inputs, so a verifier is a piecewise constant function of them. `exact_law` finds
its pieces on the lattice of multiples of 2**-24 (where production uniforms lie), and so computes the law of the emitted
tokens without sampling. Nothing here calls the code it judges: the laws are numpy in float64, and Philox is written
anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .laws import Lossy, TargetLaw
from .sampling import SamplingParams
from .tree import DraftTree
from .types import PLACEHOLDER_TOKEN_ID, RowStats, TokenMap

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Verify = Callable[..., Any]
"""Called as `specdec_kernels.verify_chain` is."""

LATTICE = 1 << 24
_CALL_ROWS = 1 << 15  # rows handed to the verifier at once


# --- laws -------------------------------------------------------------------------------------------------------------


def float64_law(logits: Tensor, params: SamplingParams | None = None) -> Float64:
    """The law of each row after temperature → top-k → top-p → min-p → renormalise (or min-p first), in float64.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocab]`` of any floating dtype; NaN is read as −inf.
    params : SamplingParams, optional
        Tensors in it hold one value for each index of the first dimension.

    Returns
    -------
    ndarray
        ``[..., vocab]`` float64.
    """
    x = logits.detach().double().cpu().numpy()
    params = params or SamplingParams()
    out = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        batch = index[0] if index else 0
        t, k, p, m = (_value(v, batch) for v in (params.temperature, params.top_k, params.top_p, params.min_p))
        out[index] = _row_law(x[index], t, int(k), p, m, params.min_p_first)
    return out


def _value(value: float | Tensor, index: int) -> float:
    return float(value[index]) if isinstance(value, Tensor) else float(value)


def _row_law(x: Float64, temperature: float, top_k: int, top_p: float, min_p: float, min_p_first: bool) -> Float64:
    x = np.where(np.isnan(x), -np.inf, x)
    top = x.max()
    if temperature == 0 or np.isinf(top):  # greedy, a +inf, or nothing possible: np.argmax takes the lowest id
        return np.eye(1, x.size, int(x.argmax()))[0]
    weights = np.exp((x - top) / temperature)
    kept = x > -np.inf
    if min_p_first:
        kept &= weights >= min_p
    if 0 < top_k < x.size:
        kept &= x >= np.sort(x)[-top_k]
    if 0 < top_p < 1:
        values, which = np.unique(x[kept], return_inverse=True)  # ties live and die together
        mass = np.bincount(which, weights[kept])[::-1]
        above = np.cumsum(mass) - mass  # strictly above each value, from the largest down
        kept &= x >= values[::-1][above < top_p * mass.sum()][-1]
    if not min_p_first:
        kept &= weights >= min_p
    weights = np.where(kept, weights, 0.0)
    return weights / weights.sum()


# --- random numbers ---------------------------------------------------------------------------------------------------


def philox4x32(key: NDArray[np.uint64], counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., SC 2011), apart from the package's own.

    Parameters
    ----------
    key, counter : ndarray
        ``[..., 2]`` and ``[..., 4]`` uint64 holding 32-bit words.

    Returns
    -------
    ndarray
        ``[..., 4]`` uint64 holding 32-bit words.
    """
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = key[..., 0], key[..., 1]
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ k0,
            product1 & low32,
            (product0 >> shift) ^ c3 ^ k1,
            product0 & low32,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low32, (k1 + np.uint64(0xBB67AE85)) & low32
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), -1)


def words32(values: Int64) -> NDArray[np.uint64]:
    """``[...]`` int64 to ``[..., 2]``: the low and the high 32-bit word."""
    bits = np.asarray(values, np.int64).view(np.uint64)
    return np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], -1)


def float64_gumbel(keys: Tensor, vocab: int) -> Float64:
    """The Gumbel noise ``[..., vocab]`` of each key ``[...]`` and target id, in float64 on the contract's bits."""
    key = words32(keys.cpu().numpy())[..., None, :]
    counter = np.zeros(((vocab + 3) // 4, 4), np.uint64)
    counter[:, 0], counter[:, 3] = np.arange(counter.shape[0]), 0x47554D42
    bits = philox4x32(key, counter).reshape(*keys.shape, -1)[..., :vocab]
    noise: Float64 = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32))
    return noise


# --- target laws ------------------------------------------------------------------------------------------------------


def float64_target_law(law: TargetLaw, P: Float64, Q: Float64, p: Float64, q: Float64) -> Float64:
    """The law that verification really produces with one of `sk.laws`, row by row, in float64.

    Parameters
    ----------
    law : TargetLaw
        For a `Lossy` whose β is a number, what comes out is ``min(Q, P / (1 − α)) + (1 − A) norm((P / β − Q)+)`` with
        ``A = Σ min(Q, P / (1 − α))``; for the others it is π.
    P, Q : ndarray
        ``[..., vocab]`` laws of target and draft after the sampling transform.
    p, q : ndarray
        The raw ones.

    Returns
    -------
    ndarray
        ``[..., vocab]`` float64.
    """
    if isinstance(law, Lossy):
        taken = np.minimum(Q, P / (1 - law.alpha))
        rest = 1 - taken.sum(-1, keepdims=True)
        inverse_beta: Any = _exact_inverse_beta(P, Q, rest) if isinstance(law.beta, str) else 1 / law.beta
        left = np.maximum(P * inverse_beta - Q, 0)
        mass = left.sum(-1, keepdims=True)
        recovered: Float64 = np.where(mass > 0, left / np.where(mass > 0, mass, 1), P)
        return taken + rest * recovered
    top_p, top_q = p.max(-1, keepdims=True), q.max(-1, keepdims=True)
    name, log_loss, alpha = type(law).__name__, getattr(law, "loss", "") == "log", law.alpha
    if name.startswith("Token"):
        replaced = {"TokenV1": q < top_p - alpha, "TokenV2": p < top_p - alpha, "TokenV3": p < (1 - alpha) * top_p}[
            name
        ]
        return np.where(replaced, 0, Q) + P * np.where(replaced, Q, 0).sum(-1, keepdims=True)
    if name == "BiLD":
        surprise = np.where(p > 0, -np.log(np.where(p > 0, p, 1)), np.inf)
        if getattr(law, "distance", "") == "argmax":
            defer = np.take_along_axis(surprise, q.argmax(-1)[..., None], -1) > alpha
        else:
            defer = np.where(q > 0, q * np.where(q > 0, surprise, 0), 0).sum(-1, keepdims=True) > alpha
    elif name == "Chow":
        defer = _entropy(q) > alpha if log_loss else top_q < 1 - alpha
    else:
        price = alpha * np.maximum(P - Q, 0).sum(-1, keepdims=True) if name == "Opt" else alpha
        defer = _entropy(q) > _entropy(p) + price if log_loss else top_q < top_p - price
    return np.where(defer, P, Q)


def _entropy(law: Float64) -> Float64:
    """In nats, the last dimension kept."""
    out: Float64 = -(law * np.log(np.where(law > 0, law, 1))).sum(-1, keepdims=True)
    return out


def _exact_inverse_beta(P: Float64, Q: Float64, rest: Float64) -> Float64:
    low, high = np.zeros_like(rest), np.ones_like(rest)
    for _ in range(80):
        middle = (low + high) / 2
        above = np.maximum(P * middle - Q, 0).sum(-1, keepdims=True) > rest
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return high


# --- the exact law of a verifier --------------------------------------------------------------------------------------


@dataclass
class ChainProblem:
    """One verify step of a small vocabulary whose laws depend on the context, so that whole joint laws can be compared.

    Attributes
    ----------
    target : list of Tensor
        ``target[d]``, d = 0 … num_draft: ``[vocab] * d + [vocab]`` logits of the token after each path of d tokens.
    draft : list of Tensor or None
        ``draft[d]``: ``[vocab] * d + [vocab_draft]`` logits (or, with `as_probs`, float32 probabilities). None: one-hot
        drafts.
    params, draft_params : SamplingParams
        Scalars.
    as_probs : bool
        `draft` holds probabilities, given as ``draft_probs``.
    draft_stats : callable or None
        Makes the RowStats of draft rows (as `specdec_kernels.row_stats` does); passed as ``draft_stats``.
    token_map : TokenMap or None
        Of a reduced draft vocabulary.
    stop : int or None
        Position whose draft token is replaced by `stop_token`: the block ends there.
    stop_token : int
        −1, or an id outside the vocabulary.
    num_draft_tokens : int or None
        Ragged length; what lies after it is filled with ids and rows that must not be read.
    eos : int or None
        The one EOS id.
    law : TargetLaw or None
        Passed as ``target_law``. With ``bonus="cascade"`` `draft` has an entry more, for the bonus.
    """

    target: list[Tensor]
    draft: list[Tensor] | None
    params: SamplingParams = field(default_factory=SamplingParams)
    draft_params: SamplingParams = field(default_factory=SamplingParams)
    as_probs: bool = False
    draft_stats: Callable[[Tensor, SamplingParams], RowStats] | None = None
    token_map: TokenMap | None = None
    stop: int | None = None
    stop_token: int = PLACEHOLDER_TOKEN_ID
    num_draft_tokens: int | None = None
    eos: int | None = None
    law: TargetLaw | None = None

    @property
    def num_draft(self) -> int:
        return len(self.target) - 1

    @property
    def num_tokens(self) -> int:
        """That a step emits at most; it takes as many uniforms."""
        return len(self.target)

    num_uniforms = num_tokens

    @property
    def each_is_right(self) -> bool:
        """Whether any choice of draft tokens comes out with the target's law, not only their mixture."""
        return self.draft is None

    @property
    def vocab(self) -> int:
        return self.target[0].shape[-1]

    @property
    def length(self) -> int:
        """Draft tokens that count."""
        stop = self.num_draft if self.stop is None else self.stop
        return min(stop, self.num_draft if self.num_draft_tokens is None else self.num_draft_tokens)

    def target_laws(self) -> list[Float64]:
        """The laws that a verifier is to produce, ``[vocab] * d + [vocab]`` for each depth d: where tokens are drafted
        (and of a cascade's bonus) those that `law` makes. After an EOS only EOS follows.
        """
        laws = [float64_law(t, self.params) for t in self.target]
        if self.law is not None:
            draft = self.draft_laws()
            raw = [self._over_target_ids(float64_law(q)) for q in self.draft or []]
            for d in range(self._draft_rows):
                laws[d] = float64_target_law(self.law, laws[d], draft[d], float64_law(self.target[d]), raw[d])
        return laws if self.eos is None else _ended(laws, self.eos)

    def draft_laws(self) -> list[Float64]:
        """``[vocab] * d + [vocab]`` over target ids for each depth d < num_draft."""
        assert self.draft is not None
        out = []
        for rows in self.draft:
            law = rows.double().cpu().numpy() if self.as_probs else float64_law(rows, self.draft_params)
            out.append(self._over_target_ids(law / law.sum(-1, keepdims=True)))
        return out

    @property
    def _draft_rows(self) -> int:
        """Depths whose law the draft's has a part in."""
        return self.length + (self.law is not None and self.law.cascade_bonus)

    def _over_target_ids(self, law: Float64) -> Float64:
        if self.token_map is None:
            return law
        full = np.zeros((*law.shape[:-1], self.vocab))
        full[..., self.token_map.draft_to_target.cpu().numpy()] = law
        return full

    def paths(self) -> tuple[Int64, Float64]:
        """The drafted paths ``[n, length]`` that can occur and their probabilities (1 each for one-hot drafts)."""
        paths = np.array(list(itertools.product(range(self.vocab), repeat=self.length)), np.int64)
        paths = paths.reshape(self.vocab**self.length, self.length)
        weights = np.ones(len(paths))
        if self.draft is not None:
            laws = self.draft_laws()
            for d in range(self.length):
                weights *= laws[d][tuple(paths[:, : d + 1].T)]
        return paths[weights > 0], weights[weights > 0]

    def call(
        self, verify: Verify, paths: Int64, uniforms: Int64, acceptance: str, device: torch.device | str = "cpu"
    ) -> Any:
        """Run `verify` on drafted `paths` ``[n, length]`` with `uniforms` ``[n, num_draft + 1]`` in units of 2**-24."""
        n, spoiled = len(paths), torch.nan
        tokens = torch.full(
            (n, self.num_draft), self.stop_token if self.stop == self.length else 2**31 - 1, dtype=torch.int64
        )
        tokens[:, : self.length] = torch.from_numpy(paths)
        index = [torch.from_numpy(paths[:, d]) for d in range(self.length)]
        target = torch.stack(
            [t[tuple(index[:d])] if d else t.expand(n, -1) for d, t in enumerate(self.target[: self.length + 1])], 1
        )
        target = torch.nn.functional.pad(target, (0, 0, 0, self.num_draft - self.length), value=spoiled)
        arguments: dict[str, Any] = {"params": self.params, "acceptance": acceptance}
        if self.law is not None:
            arguments["target_law"] = self.law
        if self.draft is not None and self.num_draft:
            used = [q[tuple(index[:d])] if d else q.expand(n, -1) for d, q in enumerate(self.draft[: self._draft_rows])]
            used += [self.draft[0].expand(n, -1) * spoiled] * (self.num_draft - self.length)
            rows = torch.stack(used, 1).to(device)
            arguments["draft_probs" if self.as_probs else "draft_logits"] = rows
            if not self.as_probs:
                arguments["draft_params"] = self.draft_params
                if self.draft_stats is not None:
                    arguments["draft_stats"] = self.draft_stats(rows, self.draft_params)
            if self.token_map is not None:
                arguments["draft_token_map"] = self.token_map.to(device)
        if self.num_draft_tokens is not None:
            arguments["num_draft_tokens"] = torch.full((n,), self.num_draft_tokens, dtype=torch.int32, device=device)
        if self.eos is not None:
            arguments["eos_token_ids"] = torch.tensor([self.eos], device=device)
        coins = torch.from_numpy((uniforms / LATTICE).astype(np.float32)).to(device)
        return verify(target.to(device), tokens.to(device), uniform_samples=coins, **arguments)


@dataclass
class TreeProblem:
    """The same for one verify step of a token tree.

    Attributes
    ----------
    parents : list of int
        Of the nodes; −1 for the root, node 0.
    target, draft : list of Tensor
        As in `ChainProblem`, to the depth of the tree: row i of a step is the law after node i's path. `draft` may be
        None.
    sampled : bool
        Whether siblings are drawn from the draft's law without replacement; else the tokens are given, and each choice
        of them must come out right.
    options : dict
        Further arguments of the call.
    """

    parents: list[int]
    target: list[Tensor]
    draft: list[Tensor] | None = None
    sampled: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    draft_params: SamplingParams = field(default_factory=SamplingParams)
    eos: int | None = None
    law: TargetLaw | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        return self.target[0].shape[-1]

    @property
    def num_tokens(self) -> int:
        return len(self.target)

    @property
    def num_uniforms(self) -> int:
        return len(self.parents)

    @property
    def each_is_right(self) -> bool:
        return not self.sampled

    def target_laws(self) -> list[Float64]:
        laws = [float64_law(t, self.params) for t in self.target]
        return laws if self.eos is None else _ended(laws, self.eos)

    def paths(self) -> tuple[Int64, Float64]:
        """The tokens of the nodes below the root ``[n, num_nodes − 1]`` that can occur, and their probabilities."""
        found: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        laws = [float64_law(q, self.draft_params) for q in self.draft] if self.sampled and self.draft else None
        for node in range(1, len(self.parents)):
            longer = []
            for tokens, weight in found:
                if laws is None:
                    longer += [((*tokens, t), 1.0) for t in range(self.vocab)]
                    continue
                above = self._context(self.parents[node], tokens)
                left = np.zeros(self.vocab) if above is None else laws[len(above)][above].copy()
                left[[tokens[s - 1] for s in range(1, node) if self.parents[s] == self.parents[node]]] = 0
                if left.sum() == 0:  # nothing is left to draw
                    longer.append(((*tokens, PLACEHOLDER_TOKEN_ID), weight))
                longer += [((*tokens, t), weight * q / left.sum()) for t, q in enumerate(left) if q > 0]
            found = longer
        paths = np.array([tokens for tokens, _ in found], np.int64).reshape(len(found), len(self.parents) - 1)
        return paths, np.array([weight for _, weight in found])

    def _context(self, node: int, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens on the path to a node; None where one is missing."""
        out: list[int] = []
        while node > 0:
            out.insert(0, tokens[node - 1])
            node = self.parents[node]
        return None if PLACEHOLDER_TOKEN_ID in out else tuple(out)

    def call(
        self, verify: Verify, paths: Int64, uniforms: Int64, acceptance: str, device: torch.device | str = "cpu"
    ) -> Any:
        """Run `verify` on drafted tokens with `uniforms` ``[n, num_nodes]`` in units of 2**-24."""
        spoiled = torch.full((self.vocab,), torch.nan)

        def rows(laws: list[Tensor]) -> Tensor:
            out = []
            for tokens in paths.tolist():
                contexts = [self._context(node, tokens) for node in range(len(self.parents))]
                out.append(torch.stack([spoiled if c is None else laws[len(c)][c] for c in contexts]))
            return torch.stack(out).to(device)

        arguments: dict[str, Any] = {"params": self.params, "acceptance": acceptance, **self.options}
        if self.law is not None:
            arguments["target_law"] = self.law
        if self.draft is not None:
            arguments |= {"draft_logits": rows(self.draft), "draft_params": self.draft_params}
        if self.eos is not None:
            arguments["eos_token_ids"] = torch.tensor([self.eos], device=device)
        coins = torch.from_numpy((uniforms / LATTICE).astype(np.float32)).to(device)
        tokens = torch.nn.functional.pad(torch.from_numpy(paths), (1, 0)).to(device)
        return verify(rows(self.target), DraftTree.from_parents(self.parents).to(device), tokens,
                      uniform_samples=coins, **arguments)  # fmt: skip


def exact_law(
    verify: Verify, problem: ChainProblem | TreeProblem, acceptance: str, device: torch.device | str = "cpu"
) -> Float64:
    """The joint law of as many tokens as a step can emit that `verify` really produces, drafting from the draft's law.

    What a step emits is continued with the law that it should have, so a right verifier yields exactly `target_joint`.
    The uniforms are taken to be independent and uniform on the lattice; no structure of the rule is assumed, beyond
    that each uniform's breakpoints show when the others are at the ends of their range (of a tree: or anywhere between
    breakpoints that showed so).

    Returns
    -------
    ndarray
        ``[n] + [vocab] * num_tokens`` float64: n = 1, or for drafts without a law one a path, each of them right.
    """
    paths, weights = problem.paths()
    vocab, width = problem.vocab, problem.num_tokens

    def run(path: Int64, uniforms: Int64) -> Int64:
        """The emitted tokens as one number (base vocab + 1, −1 as 0)."""
        codes = np.empty(len(path), np.int64)
        for i in range(0, len(path), _CALL_ROWS):
            part = slice(i, i + _CALL_ROWS)
            out = problem.call(verify, paths[path[part]], uniforms[part], acceptance, device)
            emitted, counts = out.tokens.cpu().numpy(), out.num_tokens.cpu().numpy()
            assert ((emitted >= 0) == (np.arange(width) < counts[:, None])).all(), "tokens and num_tokens disagree"
            assert (emitted < vocab).all(), "an id outside the vocabulary"
            codes[part] = (emitted + 1) @ (vocab + 1) ** np.arange(width)
        return codes

    codes, volumes, owner = _pieces(run, len(paths), problem.num_uniforms, isinstance(problem, TreeProblem))
    laws, one_hot = problem.target_laws(), problem.each_is_right
    joint = np.zeros((len(paths) if one_hot else 1, *[vocab] * width))
    rest: dict[tuple[int, ...], Float64] = {}
    for code, volume, path in zip(codes, volumes, owner, strict=True):
        emitted = tuple(int(code // (vocab + 1) ** i % (vocab + 1)) - 1 for i in range(width))
        emitted = tuple(t for t in emitted if t >= 0)
        if emitted not in rest:
            rest[emitted] = _continuation(laws, emitted)
        joint[(path if one_hot else 0, *emitted)] += volume * (1.0 if one_hot else weights[path]) * rest[emitted]
    return joint


def target_joint(problem: ChainProblem | TreeProblem) -> Float64:
    """``[vocab] * num_tokens``: the joint law of plain sampling from the target (its `law`), by enumeration."""
    return _continuation(problem.target_laws(), ())


def _ended(laws: list[Float64], eos: int) -> list[Float64]:
    """After an EOS only EOS follows."""
    vocab = laws[0].shape[-1]
    for d in range(1, len(laws)):
        for path in itertools.product(range(vocab), repeat=d):
            if eos in path:
                laws[d][path] = np.eye(1, vocab, eos)[0]
    return laws


def total_variation(laws: Float64, expected: Float64) -> float:
    """The largest ``Σ |law − expected| / 2`` over the laws stacked along the first dimension."""
    return float(np.abs(laws - expected).reshape(len(laws), -1).sum(-1).max() / 2)


def _continuation(laws: Sequence[Float64], prefix: tuple[int, ...]) -> Float64:
    """The joint law of the tokens after `prefix`, up to the depth of `laws`."""
    if len(prefix) == len(laws):
        return np.ones(())
    joint = laws[len(prefix)][prefix]
    for d in range(len(prefix) + 1, len(laws)):
        joint = joint[..., None] * laws[d][prefix]
    return joint


def _pieces(
    run: Callable[[Int64, Int64], Int64], num_paths: int, width: int, hidden: bool
) -> tuple[Int64, Float64, Int64]:
    """Cut the cube of uniforms of every path into boxes of constant outcome: outcome, volume and path of each box.

    `hidden`: also look for breakpoints that show only while the other uniforms are inside their range.
    """
    ends = np.array([0, LATTICE - 1])
    probes = [[ends] * width for _ in range(num_paths)]
    cuts: set[tuple[int, int, int]] = set()  # (path, axis, first lattice point of the next piece)
    while True:
        known = len(cuts)
        cuts |= _breakpoints(run, probes)
        edges: dict[tuple[int, int], list[int]] = {}
        for cut_path, cut_axis, at_point in sorted(cuts):
            edges.setdefault((cut_path, cut_axis), []).append(at_point)
        sides = [[np.array([0, *edges.get((p, a), []), LATTICE]) for a in range(width)] for p in range(num_paths)]
        probes = [[(s[:-1] + s[1:]) // 2 for s in axes] for axes in sides]
        if not hidden or len(cuts) == known:
            break
    corners, volumes, owner = [], [], []
    for p in range(num_paths):
        middles = np.meshgrid(*probes[p], indexing="ij")
        sizes = np.meshgrid(*[np.diff(s) / LATTICE for s in sides[p]], indexing="ij")
        corners.append(np.stack([m.ravel() for m in middles], -1))
        volumes.append(np.prod([s.ravel() for s in sizes], 0))
        owner.append(np.full(len(volumes[-1]), p))
    boxes, owners = np.concatenate(corners), np.concatenate(owner)
    return run(owners, boxes), np.concatenate(volumes), owners


def _breakpoints(run: Callable[[Int64, Int64], Int64], probes: list[list[Int64]]) -> set[tuple[int, int, int]]:
    """Where the outcome changes along lines of one uniform, the others at all combinations of ``probes[path][axis]``:
    (path, axis, first lattice point after the change).
    """
    width = len(probes[0])
    lines = [
        (path, axis, others)
        for path, values in enumerate(probes)
        for axis in range(width)
        for others in itertools.product(*values[:axis], *values[axis + 1 :])
    ]
    path = np.array([line[0] for line in lines])
    axis = np.array([line[1] for line in lines])
    start = np.array([np.insert(line[2], line[1], 0) for line in lines], np.int64).reshape(len(lines), width)

    def at(line: Int64, position: Int64) -> Int64:
        uniforms = start[line].copy()
        uniforms[np.arange(len(line)), axis[line]] = position
        return run(path[line], uniforms)

    grid = np.linspace(0, LATTICE - 1, 9).astype(np.int64)
    line, position = np.repeat(np.arange(len(lines)), len(grid)), np.tile(grid, len(lines))
    code = at(line, position).reshape(len(lines), -1)
    low, high = np.tile(grid[:-1], len(lines)), np.tile(grid[1:], len(lines))
    line, code_low, code_high = (
        np.repeat(np.arange(len(lines)), len(grid) - 1),
        code[:, :-1].ravel(),
        code[:, 1:].ravel(),
    )
    cuts: set[tuple[int, int, int]] = set()
    while True:
        differ = code_low != code_high
        line, low, high, code_low, code_high = (v[differ] for v in (line, low, high, code_low, code_high))
        done = high - low == 1
        cuts.update(zip(path[line[done]].tolist(), axis[line[done]].tolist(), high[done].tolist(), strict=True))
        line, low, high, code_low, code_high = (v[~done] for v in (line, low, high, code_low, code_high))
        if not len(line):
            return cuts
        middle = (low + high) // 2
        code_middle = at(line, middle)
        line = np.tile(line, 2)
        low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
        code_low, code_high = np.concatenate([code_low, code_middle]), np.concatenate([code_middle, code_high])
