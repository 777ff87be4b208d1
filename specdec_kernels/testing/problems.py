"""Verify steps of small vocabularies, whose whole joint distributions can be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..checks import (
    FLOAT_DTYPES,
    check_array,
    check_callable,
    check_device,
    check_flag,
    check_instance,
    check_int,
    check_mapping,
    check_sequence,
    check_tensor,
)
from ..laws import TargetLaw
from ..sampling import SamplingParams
from ..tree import DraftTree
from ..types import PLACEHOLDER_TOKEN_ID, RowStats, TokenMap
from .laws import Float64, Int64, float64_law, float64_target_law

Verify = Callable[..., Any]
"""Called like `specdec_kernels.verify_chain`, or for a `TreeProblem` like `specdec_kernels.verify_tree`."""

LATTICE = 1 << 24
"""Uniforms are multiples of 1 / LATTICE."""


@dataclass(eq=False)
class ChainProblem:
    """One verify step of a small vocabulary with context-dependent distributions; joint distributions can be compared.

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

    Raises
    ------
    TypeError, ValueError
        A field of another type, shape or size, or out of its range; a law without a draft.
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

    def __post_init__(self) -> None:
        caller, cascade = "ChainProblem", self.law is not None and getattr(self.law, "cascade_bonus", False)
        _check_common(caller, self.target, self.params, self.draft_params, self.eos, self.law)
        check_flag(caller, "as_probs", self.as_probs)
        if self.draft_stats is not None:
            check_callable(caller, "draft_stats", self.draft_stats)
        if self.token_map is not None:
            check_instance(caller, "token_map", self.token_map, TokenMap, "a TokenMap or None")
        if self.draft is not None:
            known = self.vocab if self.token_map is None else len(self.token_map)
            _check_depths(caller, "draft", self.draft, self.vocab, self.num_draft + bool(cascade), known)
        elif self.law is not None:
            raise ValueError(f"{caller}: draft must be given where there is a law, got None")
        for name in ("stop", "num_draft_tokens"):
            if (value := getattr(self, name)) is not None:
                check_int(caller, name, value, 0, self.num_draft)
        check_int(caller, "stop_token", self.stop_token, -(2**63), None)
        if 0 <= self.stop_token < self.vocab:  # a drafted token like others: nothing would end there
            raise ValueError(f"{caller}: stop_token must be outside [0, {self.vocab - 1}], got {self.stop_token}")

    @property
    def num_draft(self) -> int:
        return len(self.target) - 1

    @property
    def num_tokens(self) -> int:
        """The most tokens that a step emits; it takes as many uniforms."""
        return len(self.target)

    num_uniforms = num_tokens

    @property
    def each_is_right(self) -> bool:
        """Whether the output has the target's distribution for every choice of draft tokens, not only on average."""
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
        """The distributions that a verifier must produce, ``[vocab] * d + [vocab]`` for each depth d: where tokens are
        drafted (and of a cascade's bonus) those that `law` makes. After an EOS only EOS follows.
        """
        laws = [float64_law(t, self.params) for t in self.target]
        if self.law is not None:
            draft = self.draft_laws()
            raw = [self._over_target_ids(float64_law(q)) for q in self.draft or []]
            for d in range(self._draft_rows):
                laws[d] = float64_target_law(self.law, laws[d], draft[d], float64_law(self.target[d]), raw[d])
        return laws if self.eos is None else _ended(laws, self.eos)

    def draft_laws(self) -> list[Float64]:
        """``[vocab] * d + [vocab]`` over target ids for each depth d < num_draft; with ``bonus="cascade"`` one more,
        for the bonus.
        """
        assert self.draft is not None
        out = []
        for rows in self.draft:
            law = rows.double().cpu().numpy() if self.as_probs else float64_law(rows, self.draft_params)
            out.append(self._over_target_ids(law / law.sum(-1, keepdims=True)))
        return out

    @property
    def _draft_rows(self) -> int:
        """Depths at which the draft's distribution plays a part."""
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
        """Run `verify` on drafted `paths` ``[n, length]`` with `uniforms` ``[n, num_draft + 1]`` in units of 2**-24.

        Raises
        ------
        TypeError, ValueError
            A wrong argument, or what `verify` refuses.
        """
        device = _check_call(self, verify, paths, uniforms, acceptance, device, self.length)
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
        if self.draft:
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


@dataclass(eq=False)
class TreeProblem:
    """One verify step of a token tree, as `ChainProblem` is one of a chain.

    Attributes
    ----------
    parents : list of int
        Of the nodes; −1 for the root, node 0.
    target : list of Tensor
        As in `ChainProblem`, to the depth of the tree: row i of a step is the distribution after node i's path.
    draft : list of Tensor or None
        As many as `target`, each ``[vocab] * d + [vocab]`` logits: the deepest nodes have a row of the draft, too,
        although no child was drawn from it.
    sampled : bool
        Whether siblings are drawn from the draft's distribution without replacement; else the tokens are given, and
        each choice of them must come out right.
    options : dict
        Further arguments of the call.

    Raises
    ------
    TypeError, ValueError
        A field of another type, shape or size; siblings that are sampled without a draft.
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

    def __post_init__(self) -> None:
        caller = "TreeProblem"
        _check_common(caller, self.target, self.params, self.draft_params, self.eos, self.law)
        check_sequence(caller, "parents", self.parents, int, "integers")
        depths = DraftTree.from_parents(self.parents).max_depth + 1
        _check_depths(caller, "target", self.target, self.vocab, depths)
        if self.draft is not None:
            _check_depths(caller, "draft", self.draft, self.vocab, depths)
        check_flag(caller, "sampled", self.sampled)
        if self.sampled and self.draft is None:
            raise ValueError(f"{caller}: draft must be given where siblings are sampled, got None")
        check_mapping(caller, "options", self.options, str, object, "names to values")

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
        """The target's own distributions ``[vocab] * d + [vocab]`` for each depth d, whatever the `law` makes of them:
        that depends on which nodes have children.
        """
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
        """Run `verify` on drafted tokens with `uniforms` ``[n, num_nodes]`` in units of 2**-24.

        Raises
        ------
        TypeError, ValueError
            A wrong argument, or what `verify` refuses.
        """
        device = _check_call(self, verify, paths, uniforms, acceptance, device, len(self.parents) - 1)
        spoiled = torch.full((self.vocab,), torch.nan, device="cpu")
        distinct, which = np.unique(paths, axis=0, return_inverse=True)
        contexts = [[self._context(node, path) for node in range(len(self.parents))] for path in distinct.tolist()]

        def rows(laws: list[Tensor]) -> Tensor:
            of_path = [torch.stack([spoiled if c is None else laws[len(c)][c] for c in nodes]) for nodes in contexts]
            return torch.stack(of_path)[which].to(device)

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


def _check_common(caller: str, target: object, params: object, draft_params: object, eos: object, law: object) -> None:
    """Raise for the first wrong field of those that both kinds of problem have."""
    check_sequence(caller, "target", target, Tensor, "tensors")
    tensors = cast(list[Tensor], target)
    if tensors[0].dim() != 1 or len(tensors[0]) < 1:
        raise ValueError(f"{caller}: target must begin with [vocab >= 1] logits, got {list(tensors[0].shape)}")
    vocab = len(tensors[0])
    _check_depths(caller, "target", tensors, vocab, None)
    for name, value in (("params", params), ("draft_params", draft_params)):
        check_instance(caller, name, value, SamplingParams, "a SamplingParams")
    if eos is not None:
        check_int(caller, "eos", eos, 0, vocab - 1)
    if law is not None:
        check_instance(caller, "law", law, TargetLaw, "one of sk.laws or None")


def _check_depths(
    caller: str, name: str, tensors: object, vocab: int, depths: int | None, known: int | None = None
) -> None:
    """Raise unless ``[vocab] * d + [vocab]`` for each depth d; of a reduced vocabulary the last are the `known` ids."""
    width = vocab if known is None else known
    check_sequence(caller, name, tensors, Tensor, "tensors", least=0)
    for d, tensor in enumerate(cast(list[Tensor], tensors)):
        check_tensor(caller, name, tensor, FLOAT_DTYPES, None)
        *above, last = tensor.shape or (0,)
        if above != [vocab] * d or last != width:
            raise ValueError(f"{caller}: {name}[{d}] must be {[vocab] * d + [width]}, got {list(tensor.shape)}")
    if depths is not None and len(cast(list[Tensor], tensors)) != depths:
        raise ValueError(f"{caller}: {name} must have {depths} tensors, got {len(cast(list[Tensor], tensors))}")


def _check_call(
    problem: ChainProblem | TreeProblem, verify: object, paths: object, uniforms: object, acceptance: object,
    device: object, width: int,
) -> torch.device:  # fmt: skip
    caller = type(problem).__name__
    check_callable(caller, "verify", verify)
    check_array(caller, "paths", paths, "i", f"[n, {width}] int64", width)
    check_array(caller, "uniforms", uniforms, "i", "[n, num_uniforms] int64")  # as many as the verifier takes
    assert isinstance(paths, np.ndarray) and isinstance(uniforms, np.ndarray)
    if paths.ndim != 2:
        raise ValueError(f"{caller}: paths must be [n, {width}], got {list(paths.shape)}")
    if uniforms.ndim != 2 or len(uniforms) != len(paths):
        raise ValueError(f"{caller}: uniforms must be [n={len(paths)}, num_uniforms], got {list(uniforms.shape)}")
    # a tree's node may have no token: its draft had nothing left
    least = PLACEHOLDER_TOKEN_ID if isinstance(problem, TreeProblem) else 0
    for name, values, low, end in (("paths", paths, least, problem.vocab), ("uniforms", uniforms, 0, LATTICE)):
        wrong = values[(values < low) | (values >= end)]
        if wrong.size:
            raise ValueError(f"{caller}: {name} must be in [{low}, {end - 1}], got {wrong[0]}")
    check_instance(caller, "acceptance", acceptance, str, "a string")
    return check_device(caller, "device", device)


def _ended(laws: list[Float64], eos: int) -> list[Float64]:
    """After an EOS only EOS follows."""
    vocab = laws[0].shape[-1]
    for d in range(1, len(laws)):
        for path in itertools.product(range(vocab), repeat=d):
            if eos in path:
                laws[d][path] = np.eye(1, vocab, eos)[0]
    return laws
