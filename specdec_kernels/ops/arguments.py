"""What each op takes: one typed definition, from which come the schema, the order and the way back to names.

Few arguments cross torch's dispatcher, because each costs a tenth of a microsecond or more. In the order of a
definition's fields, groups taken apart: every tensor alone, and whatever is annotated with a schema type of its own
(numbers that give a size, or need all 64 bits); then, where there are `FlatParams`, ``per_sequence``, their tensors in
one list (None: no group has any); then ``settings``, all other numbers in one list of floats, which hold them exactly.
``csrc/bind_arguments.h`` has the same order for C++, and python_tests/ops/test_arguments.py compares the two. Compiled
parts that were built beside another text of this file are refused (`backends.native`).

A backend in Python takes an op's definition itself. This file imports no backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from ..flat import FlatLaw, FlatParams

Int = Annotated[int, "int"]
Ints = Annotated[list[int], "int[]"]
Written = Annotated[list[Tensor], "Tensor(a!)[]"]
WrittenTensor = Annotated[Tensor, "Tensor(a!)"]
WrittenCounts = Annotated[Tensor, "Tensor(b!)"]
WrittenNumber = Annotated[Tensor, "Tensor(c!)"]
Processing = Annotated[list[Tensor | None] | None, "Tensor?[]?"]
"""`flat.FlatProcessors`; None: nothing is processed."""
TENSORS = {Tensor: "Tensor", Tensor | None: "Tensor?"}

NEED_LOGITS = ("match", "typical")  # rules of chains and of trees
TILE = 1024
"""Ids of a row whose weights are added before anything else is; csrc/common/params.h has the same number."""

# Numbers that cross instead of names, and that C++ has too: in csrc/common/params.h and csrc/bind_cache.h.
ACCEPTANCES = {"token": 0, "block": 1, "match": 2, "greedy": 3}
TREE_ACCEPTANCES = {"sample": 0, "greedy": 1, "match": 2, "typical": 3, "recursive": 4, "traversal": 5}
PURPOSES = {"draft": 0, "accept": 1, "final": 2, "sample": 3}
"""Streams of random numbers, by the number that stands in their counters; C++ has some in csrc/common/philox.h."""
CACHE_DIMS = {"block": 0, "head": 1, "row": 2, "element": 3, "batch_and_head": 4, "further": 5}
"""What a dimension of a cache tensor is; a block is a page, or without a block table a sequence."""


def tiles_of(width: int) -> int:
    """Tiles that so many ids lie in."""
    return -(-width // TILE)


class RowStatsArguments(NamedTuple):
    """Arguments of `row_stats`."""

    logits: Tensor
    params: FlatParams
    processors: Processing = None


class WarpProbsArguments(NamedTuple):
    """Arguments of `warp_probs`."""

    logits: Tensor
    params: FlatParams
    processors: Processing = None


class MaskLogitsArguments(NamedTuple):
    """Arguments of `mask_logits_`."""

    logits: WrittenTensor
    params: FlatParams


class UniformSamplesArguments(NamedTuple):
    """Arguments of `uniform_samples`; `step` counts where there are no `steps`."""

    seeds: Tensor
    steps: Tensor | None
    step: Int
    num: Int
    purpose: Int


class NoiseKeysArguments(NamedTuple):
    """Arguments of `noise_keys`; `step` counts where there are no `steps`."""

    seeds: Tensor
    positions: Tensor
    steps: Tensor | None
    step: Int
    purpose: Int


class SampleArguments(NamedTuple):
    """Arguments of `sample`: rows ``[batch, vocab]`` or ``[batch, n, vocab]``; the output is shaped as the rows are.

    `probs`: they are probabilities, of any sum. With `row_index` ``[batch]`` sequence b has the rows
    ``logits[row_index[b]]``. (The op takes both because each view made in Python costs half a microsecond.)
    """

    logits: Tensor
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    draft_to_target: Tensor | None
    num_samples: Int
    params: FlatParams
    processors: Processing = None
    probs: bool = False
    row_index: Tensor | None = None

    def rowwise(self, run: Callable[[SampleArguments], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `run`, which takes and gives ``[batch, n, vocab]`` and ``[batch, n, num_samples]`` alone, comes to."""
        given: Any = self
        if self.logits.dim() == 2:
            rows = ("logits", "uniform_samples", "noise_keys")  # `row_index` names sequences
            given = self._replace(**{k: t.unsqueeze(1) for k in rows if (t := getattr(self, k)) is not None})
        token, log_prob, *stats = run(given)
        if self.num_samples == 1:
            token, log_prob = token[..., 0], log_prob[..., 0]
        out = (token, log_prob, *stats)
        return out if given is self else tuple(t.squeeze(1) for t in out)


class TokenLogprobsArguments(NamedTuple):
    """Arguments of `token_logprobs`."""

    logits: Tensor
    tokens: Tensor
    rows: Tensor | None
    num_tokens: Tensor | None
    num_top: Int
    params: FlatParams
    processors: Processing = None


class VerifyArguments(NamedTuple):
    """What chains and trees share. Kept stats have all three tensors or none. `target_probs`: the target's rows are
    probabilities.

    `seeds` replace `uniform_samples`, or where there are `positions` of `noise_keys`: the step's own.
    """

    target_logits: Tensor
    draft_logits: Tensor | None
    draft_probs: Tensor | None
    draft_values: Tensor | None
    draft_argmax: Tensor | None
    draft_status: Tensor | None
    target_to_draft: Tensor | None
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    seeds: Tensor | None
    steps: Tensor | None
    positions: Tensor | None
    step: Int
    eos_token_ids: Tensor | None
    law: FlatLaw
    params: FlatParams
    draft_params: FlatParams
    processors: Processing = None
    target_probs: bool = False


GROUPS = (FlatLaw, FlatParams, VerifyArguments)


class VerifyChainArguments(NamedTuple):
    """Arguments of `verify_chain`: padded drafts, or with `cu_num_draft_tokens` ragged ones laid end to end.

    `num_draft` is the width of the result less one. With `draft_index` the draft's rows are ``[requests, >= num_draft,
    vocab]``, of which a sequence has those of the request of its index. With `bonus_tokens` the target has no rows
    beyond those of the draft tokens; the number of random numbers is unchanged.
    """

    shared: VerifyArguments
    draft_tokens: Tensor
    num_draft_tokens: Tensor | None
    cu_num_draft_tokens: Tensor | None
    num_draft: Int
    acceptance: int
    return_acceptance: bool
    draft_index: Tensor | None = None
    bonus_tokens: Tensor | None = None


class VerifyTreeArguments(NamedTuple):
    """Arguments of `verify_tree`."""

    shared: VerifyArguments
    node_tokens: Tensor
    links: Tensor
    tree_status: Tensor
    max_depth: Int
    acceptance: int
    epsilon: float
    delta: float


class GatherKVArguments(NamedTuple):
    """Arguments of `gather_kv_`; layouts hold numbers of `CACHE_DIMS`."""

    cache: Written
    key_layout: Ints
    value_layout: Ints
    accepted_nodes: Tensor
    context_lengths: Tensor
    block_table: Tensor | None


class CountTokensArguments(NamedTuple):
    """Arguments of `count_tokens_`: the tensors of a `TokenCounts`, and what is counted."""

    ids: WrittenTensor
    counts: WrittenCounts
    num_output: WrittenNumber
    tokens: Tensor
    num_tokens: Tensor | None


class ShardStatsArguments(NamedTuple):
    """Arguments of `shard_stats`; `probs`: the rows are probabilities."""

    logits: Tensor
    params: FlatParams
    probs: bool


class MergeShardsArguments(NamedTuple):
    """Arguments of `merge_shards`; `probs`: as in `ShardStatsArguments`."""

    tile_max: Tensor
    tile_mass: Tensor
    logits_at: Tensor
    params: FlatParams
    probs: bool


class ShardDrawArguments(NamedTuple):
    """Arguments of `shard_draw`.

    The draft has logits with all three of its stats, probabilities with a status, or point tokens.
    With `noise_keys` noisy tokens are asked for; with `masses` and `uniform_samples` drawn ones; else tiles' masses.
    """

    logits: Tensor
    values: Tensor
    argmax: Tensor
    draft_logits: Tensor | None
    draft_probs: Tensor | None
    draft_values: Tensor | None
    draft_argmax: Tensor | None
    draft_status: Tensor | None
    point_tokens: Tensor | None
    weights: Tensor
    masses: Tensor | None
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    first: Int
    params: FlatParams
    draft_params: FlatParams


A = TypeVar("A")


class Definition(Generic[A]):
    """The forms of one op's arguments.

    Attributes
    ----------
    alone : dict
        Schema types of the arguments that cross alone, by name, in their order.
    per_sequence, settings : list of str
        What the two lists hold, in their order.
    schema : str
        Of torch.
    call : callable
        ``call(op, **leaves)`` calls `op` with its arguments. A leaf is a field of the definition, those of
        `VerifyArguments` among them; with `SamplingParams` instead of `FlatParams`.
    pack : callable
        ``pack(**leaves)`` gives those arguments.
    unpack : callable
        Makes the definition of the op's arguments.
    """

    call: Callable[..., Any]
    pack: Callable[..., tuple[Any, ...]]
    unpack: Callable[..., A]

    def __init__(self, arguments: type[A]) -> None:
        self.alone: dict[str, str] = {}
        self.per_sequence: list[str] = []
        self.settings: list[str] = []
        leaves: dict[str, Any] = {}
        made = self._add(arguments, "", leaves)
        lists = {"per_sequence": "Tensor?[]?"} if self.per_sequence else {}
        lists |= {"settings": "float[]"} if self.settings else {}
        self.schema = ", ".join(f"{kind} {name}" for name, kind in (self.alone | lists).items())
        # Written for the definition, as `namedtuple` writes its methods: they are on the path of every call.
        given = {
            "per_sequence": _tensors_of([name for name, kind in leaves.items() if kind is FlatParams]),
            "settings": _settings_of({name: kind for name, kind in leaves.items() if name not in self.alone}),
        }
        packed = ", ".join([*self.alone, *(given[name] for name in lists)])
        self.call = _function(f"call(op, *, {', '.join(leaves)})", f"return op({packed})")
        self.pack = functools.partial(self.call, lambda *given: given)
        taken = ", ".join([*self.alone, *lists])
        self.unpack = _function(f"unpack({taken})", *map(self._check, lists), f"return {made}")

    def _add(self, group: Any, prefix: str, leaves: dict[str, Any]) -> str:
        """Take in the fields of `group`; the text that makes it of the op's arguments."""
        parts = []
        for name, kind in get_type_hints(group, include_extras=True).items():
            alone = str(get_args(kind)[1]) if get_origin(kind) is Annotated else TENSORS.get(kind)
            if not prefix and kind is not VerifyArguments:
                leaves[name] = kind
            if alone is not None and group is FlatParams:
                parts.append(f"per_sequence and per_sequence[{len(self.per_sequence)}]")
                self.per_sequence.append(prefix + name)
            elif alone is not None:
                parts.append(name)
                self.alone[name] = alone
            elif kind in GROUPS:
                parts.append(self._add(kind, "" if kind is VerifyArguments else f"{name}.", leaves))
            else:
                parts.append(f"{kind.__name__}(settings[{len(self.settings)}])")
                self.settings.append(prefix + name)
        return f"{group.__name__}({', '.join(parts)})"

    def _check(self, name: str) -> str:
        wanted = len(getattr(self, name))
        kind, given = ("tensors or None", f"{name} is not None and ") if name == "per_sequence" else ("numbers", "")
        message = f"specdec: {name} must hold {wanted} {kind}"
        return f"if {given}len({name}) != {wanted}: raise RuntimeError({message!r})"


def _tensors_of(params: list[str]) -> str:
    none = " is ".join(f"{name}._tensors" for name in params)
    return f"None if {none} is None else [{', '.join(f'*{name}._tensors_or_none' for name in params)}]"


def _settings_of(leaves: dict[str, Any]) -> str:
    forms = {FlatParams: "*{}._scalars", FlatLaw: "*{}"}
    return f"[{', '.join(forms.get(kind, '{}').format(name) for name, kind in leaves.items())}]"


def _function(head: str, *lines: str) -> Callable[..., Any]:
    made: dict[str, Any] = {}
    exec("\n    ".join([f"def {head}:", *lines]), globals(), made)
    function: Callable[..., Any] = made[head.partition("(")[0]]
    return function
