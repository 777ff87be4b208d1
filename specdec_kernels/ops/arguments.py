"""What each op takes: one typed definition, from which come the schema, the order and the way back to names.

Few arguments cross torch's dispatcher, because each costs a tenth of a microsecond or more. In the order of a
definition's fields, groups taken apart: every tensor alone, and whatever is annotated with a schema type of its own
(numbers that give a size, or need all 64 bits); then, where there are `FlatParams`, ``per_sequence``, their tensors in
one list (None: no group has any); then ``settings``, all other numbers in one list of floats, which hold them exactly.
``csrc/bind_arguments.h`` has the same order for C++, and python_tests/ops/test_arguments.py compares the two.

A backend in Python takes an op's definition itself. This file imports no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from ..laws import FlatLaw
from ..sampling import FlatParams

Int = Annotated[int, "int"]
Ints = Annotated[list[int], "int[]"]
Written = Annotated[list[Tensor], "Tensor(a!)[]"]
TENSORS = {Tensor: "Tensor", Tensor | None: "Tensor?"}


class RowStatsArguments(NamedTuple):
    """Of `row_stats`."""

    logits: Tensor
    raw: bool
    params: FlatParams


class WarpProbsArguments(NamedTuple):
    """Of `warp_probs`."""

    logits: Tensor
    params: FlatParams


class UniformSamplesArguments(NamedTuple):
    """Of `uniform_samples`; `step` counts where there are no `steps`."""

    seeds: Tensor
    steps: Tensor | None
    step: Int
    num: Int
    purpose: Int


class NoiseKeysArguments(NamedTuple):
    """Of `noise_keys`; `step` counts where there are no `steps`."""

    seeds: Tensor
    positions: Tensor
    steps: Tensor | None
    step: Int
    purpose: Int


class SampleArguments(NamedTuple):
    """Of `sample`."""

    logits: Tensor
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    draft_to_target: Tensor | None
    num_samples: Int
    params: FlatParams


class VerifyArguments(NamedTuple):
    """What chains and trees share. Kept stats have all three tensors or none."""

    target_logits: Tensor
    draft_logits: Tensor | None
    draft_probs: Tensor | None
    draft_values: Tensor | None
    draft_argmax: Tensor | None
    draft_status: Tensor | None
    target_to_draft: Tensor | None
    uniform_samples: Tensor | None
    noise_keys: Tensor | None
    eos_token_ids: Tensor | None
    law: FlatLaw
    params: FlatParams
    draft_params: FlatParams


class VerifyChainArguments(NamedTuple):
    """Of `verify_chain`: padded drafts, or with `cu_num_draft_tokens` ragged ones laid end to end.

    `num_draft` is the width of the result less one.
    """

    shared: VerifyArguments
    draft_tokens: Tensor
    num_draft_tokens: Tensor | None
    cu_num_draft_tokens: Tensor | None
    num_draft: Int
    acceptance: int
    return_acceptance: bool


class VerifyTreeArguments(NamedTuple):
    """Of `verify_tree`."""

    shared: VerifyArguments
    node_tokens: Tensor
    parents: Tensor
    first_child: Tensor
    next_sibling: Tensor
    tree_status: Tensor
    max_depth: Int
    acceptance: int
    epsilon: float
    delta: float


class GatherKVArguments(NamedTuple):
    """Of `gather_kv_`; layouts are numbers of `CACHE_DIMS`."""

    cache: Written
    key_layout: Ints
    value_layout: Ints
    accepted_nodes: Tensor
    context_lengths: Tensor
    block_table: Tensor | None


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
    pack : callable
        ``pack(**leaves)`` makes the op's arguments of them. A leaf is a field, those of `VerifyArguments` among them;
        of `FlatParams` it is the `SamplingParams`.
    """

    def __init__(self, arguments: type[A]) -> None:
        self.arguments = arguments
        self.alone: dict[str, str] = {}
        self.per_sequence: list[str] = []
        self.settings: list[str] = []
        self._parameters: list[str] = []
        self._settings: list[str] = []
        self._params: list[str] = []
        self._add(arguments)
        lists = {"per_sequence": "Tensor?[]?"} if self._params else {}
        lists |= {"settings": "float[]"} if self._settings else {}
        self.schema = ", ".join(f"{kind} {name}" for name, kind in (self.alone | lists).items())
        self.pack = self._packer(lists)

    def _add(self, group: Any) -> None:
        for name, kind in _fields(group):
            alone = _schema_type(kind)
            if kind is VerifyArguments:
                self._add(kind)
                continue
            self._parameters.append(name)
            if alone is not None:
                self.alone[name] = alone
            elif kind is FlatParams:
                self._params.append(name)
                self._settings.append(f"*{name}._scalars")
                for field, inner in _fields(kind):
                    (self.per_sequence if inner in TENSORS else self.settings).append(f"{name}.{field}")
            elif kind is FlatLaw:
                self._settings.append(f"*{name}")
                self.settings += [f"{name}.{field}" for field in kind._fields]
            else:
                self._settings.append(name)
                self.settings.append(name)

    def _packer(self, lists: dict[str, str]) -> Callable[..., tuple[Any, ...]]:
        """A function written for the definition, as `namedtuple` writes its own: packing is on the path of each call."""
        parts = [*self.alone]
        if "per_sequence" in lists:
            none = " is ".join(f"{name}._tensors" for name in self._params)
            each = ", ".join(f"*{name}._tensors_or_none" for name in self._params)
            parts.append(f"None if {none} is None else [{each}]")
        if "settings" in lists:
            parts.append(f"[{', '.join(self._settings)}]")
        text = f"def pack(*, {', '.join(self._parameters)}):\n    return {', '.join(parts)}\n"
        made: dict[str, Any] = {"__name__": __name__}
        exec(text, made)
        packer: Callable[..., tuple[Any, ...]] = made["pack"]
        return packer

    def unpack(self, *given: Any) -> A:
        """The definition of what the op was given."""
        alone = dict(zip(self.alone, given, strict=False))
        rest = [*given[len(alone) :]]
        each = (rest.pop(0) or [None] * len(self.per_sequence)) if self.per_sequence else []
        numbers = rest.pop(0) if self.settings else []
        if rest or len(each) != len(self.per_sequence) or len(numbers) != len(self.settings):
            raise RuntimeError(f"specdec: {self.arguments.__name__} takes {self.schema}")
        return _made(self.arguments, alone, iter(each), iter(numbers))


def _fields(group: Any) -> list[tuple[str, Any]]:
    return list(get_type_hints(group, include_extras=True).items())


def _schema_type(kind: Any) -> str | None:
    """The type under which a field crosses alone; None where it does not."""
    if get_origin(kind) is Annotated:
        return str(get_args(kind)[1])
    return TENSORS.get(kind)


def _made(group: Any, alone: dict[str, Any], each: Iterator[Tensor | None], numbers: Iterator[float]) -> Any:
    values = []
    for name, kind in _fields(group):
        if group is FlatParams and kind in TENSORS:
            values.append(next(each))
        elif _schema_type(kind) is not None:
            values.append(alone[name])
        elif hasattr(kind, "_fields"):
            values.append(_made(kind, alone, each, numbers))
        else:
            values.append(kind(next(numbers)))
    return group(*values)
