"""Logits processors: what turns the target's logits into those that sampling parameters act on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import MAX_VOCAB, check_id_tensor, check_instance, check_int, check_is_number
from .flat import FlatProcessors
from .types import NO_ID, TokenCounts

TokenIds = Sequence[int] | Sequence[Sequence[int] | None] | Tensor
Bias = Mapping[int, float] | Sequence[Mapping[int, float] | None] | tuple[Tensor, Tensor]

INTEGERS = (torch.int32, torch.int64)
MOST_ID = MAX_VOCAB - 1
_MOST_BIAS = torch.finfo(torch.float32).max
_ROUNDS_TO_0 = 2.0**-150  # in float32, as does anything smaller


class Lists(NamedTuple):
    """All of `FlatProcessors` except the bitmask, which belongs to a step."""

    flat: tuple[Tensor | None, ...]
    any: bool  # whether any tensor is there
    num: int  # of sequences, or 1
    elsewhere: torch.device | None  # the counts' device if it is another one: they are never moved


@dataclass(frozen=True, eq=False)
class Processors:
    """Grammar masks, allowed and banned ids, biases and penalties, with vLLM's and transformers' meanings and order.

    A logit x of an id becomes, one after the other,

    1. −inf where `token_bitmask` or `allowed_ids` exclude the id;
    2. x + bias of `logit_bias`; −inf for `banned_ids`, and for `stop_token_ids` while the output has fewer than
       `min_tokens` tokens (one that is NaN or +inf there sets `Status.NAN`);
    3. x / r where x > 0, else x · r, for an id in the prompt or the output, with r = `repetition_penalty` (as
       transformers has it; Keskar et al., arXiv 1909.05858, section 4.1, divide negative logits too);
    4. x − `frequency_penalty` · (how often the id is in the output);
    5. x − `presence_penalty` for an id in the output;

    in float32, and only then come `SamplingParams`. At a row of a verify step, the output is the tokens of
    `token_counts` and the draft tokens before that position: on a tree those of the row's node and of its ancestors,
    except for the root's, which was emitted before.

    A number or a list is for all sequences; a ``[batch]`` tensor, or a sequence of lists, has one for each. Ids beyond
    the vocabulary do nothing. Tensors are copied at construction: changing one later has no effect, not even in a
    captured graph. Only `token_bitmask` and `token_counts` are read at each call, and must be on the device of the
    logits; the rest is moved there.

    A verify step applies them to the target's logits alone: with a cascade as `target_law`, what they bar can be
    emitted where the draft's token is kept.

    Parameters
    ----------
    logit_bias : mapping, sequence of mappings, or (ids, values), optional
        ``{id: bias}``, one for each sequence (or None), or integer ids and real values ``[n]`` or ``[batch, n]``, −1
        where there is no entry; what is given for one id several times adds up. A bias is a number or −inf.
    banned_ids, allowed_ids : sequence of int, sequence of sequences, or Tensor, optional
        The ids that cannot be drawn, and the only ones that can: ids, a list for each sequence (None: nothing is
        excluded), or an int32 or int64 tensor ``[n]`` or ``[batch, n]``, −1 where there is no entry.
    stop_token_ids : as banned_ids, optional
        Ids, mostly those that end a sequence, that cannot be drawn before the output has `min_tokens` tokens.
    min_tokens : int or Tensor
        Tokens that the output has before one of `stop_token_ids`; 0: off.
    token_bitmask : Tensor, optional
        int32, one row for each row of target logits: of their shape, but ``ceil(vocab / 32)`` wide. Bit ``v % 32`` of
        word ``v // 32`` is 1 where id v is allowed, as grammar engines (XGrammar, llguidance) have it.
    repetition_penalty : float or Tensor
        > 0 and finite; 1: off.
    frequency_penalty, presence_penalty : float or Tensor
        Finite; 0: off.
    token_counts : TokenCounts, optional
        What prompt and output contain. Needed by `min_tokens` and the penalties.

    Raises
    ------
    ValueError
        A number or id out of its range, fields that disagree on the number of sequences, no `token_counts` where they
        are needed, or `min_tokens` without `stop_token_ids`. Values inside tensors are not checked here: a penalty out
        of its range is off, and sets ``Status.BAD_PARAM``.
    TypeError
        A field of another type; a tensor of another dtype or number of dimensions.
    """

    logit_bias: Bias | None = None
    banned_ids: TokenIds | None = None
    allowed_ids: TokenIds | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | Tensor = 0
    token_bitmask: Tensor | None = None
    repetition_penalty: float | Tensor = 1.0
    frequency_penalty: float | Tensor = 0.0
    presence_penalty: float | Tensor = 0.0
    token_counts: TokenCounts | None = None
    # Built once for each device and vocabulary: building them costs more than an op does.
    _lists: Callable[[torch.device, int], Lists] = field(init=False, repr=False)
    _made: Callable[[torch.device, int], Lists] = field(init=False, repr=False)
    """The same, with the counts that these processors, or those that they were derived from, were built with."""

    def __post_init__(self) -> None:
        counts, bitmask = self.token_counts, self.token_bitmask
        if counts is not None:
            check_instance("Processors", "token_counts", counts, TokenCounts, "a TokenCounts")
        if bitmask is not None:
            check_id_tensor("Processors", "token_bitmask", bitmask, (torch.int32,))
        allowed = None if self.allowed_ids is None else _ids("allowed_ids", self.allowed_ids)
        bias = self._bias()
        penalties = self._penalties()
        needs = "min_tokens" if bias is not None and bias[2] is not None else "penalty" if penalties is not None else ""
        if needs and counts is None:
            raise ValueError(f"Processors: token_counts must be given where there is a {needs}, got None")
        lists = {len(x) for x in (*(allowed or ()), *(bias or ()), penalties) if x is not None}
        lists = (lists | ({len(counts.ids)} if counts is not None else set())) - {1}
        if len(lists) > 1:
            raise ValueError(f"Processors: all fields must agree on the number of sequences, got {sorted(lists)}")
        made: dict[tuple[torch.device, int], Lists] = {}

        def of(device: torch.device, vocab: int) -> Lists:
            if (device, vocab) not in made:
                ids, values, until = (None if x is None else x.to(device) for x in bias or (None,) * 3)
                words = None if allowed is None else _bitmask(*allowed, vocab).to(device)
                penalty = None if penalties is None else penalties.to(device)
                count_ids = known = num_output = None
                if counts is not None:
                    count_ids, known = (None, None) if penalty is None else (counts.ids, counts.counts)
                    num_output = None if until is None else counts.num_output
                flat = FlatProcessors(None, words, ids, values, until, penalty, count_ids, known, num_output)[1:]
                elsewhere = None if counts is None or counts.ids.device == device else counts.ids.device
                found = Lists(flat, any(x is not None for x in flat), max(lists, default=1), elsewhere)
                if any(x is not None and type(x) is not Tensor for x in flat):
                    return found  # from a traced call: its tensors must not be shared
                if (
                    device.type == "cuda"
                    and not torch.compiler.is_compiling()  # which cannot trace the question
                    and torch.cuda.is_current_stream_capturing()
                ):
                    return found  # the work that makes them is recorded but has not run
                made[device, vocab] = found
            return made[device, vocab]

        object.__setattr__(self, "_made", of)
        object.__setattr__(self, "_lists", of)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are rebuilt from their fields, because the lists of this one hold its own counts."""
        return _made_of, ({f.name: getattr(self, f.name) for f in fields(self) if f.init},)

    def with_bitmask(self, token_bitmask: Tensor | None) -> Processors:
        """The same with another `token_bitmask`, that of a step. Nothing else is rebuilt.

        Raises
        ------
        TypeError
            Not an int32 tensor.
        """
        if token_bitmask is not None:
            check_id_tensor("with_bitmask", "token_bitmask", token_bitmask, (torch.int32,))
        other = object.__new__(Processors)
        other.__dict__.update(self.__dict__)
        object.__setattr__(other, "token_bitmask", token_bitmask)
        return other

    def with_counts(self, token_counts: TokenCounts) -> Processors:
        """The same with other `token_counts`, of as many sequences and on the same device, in place of the present
        ones. Nothing else is rebuilt.

        Raises
        ------
        TypeError, ValueError
            Not a `TokenCounts`, one of another number of sequences or device, or there were no counts before.
        """
        check_instance("with_counts", "token_counts", token_counts, TokenCounts, "a TokenCounts")
        before = self.token_counts
        if before is None:
            raise ValueError("with_counts: token_counts must replace existing ones, and these processors have none")
        if len(token_counts) != len(before) or token_counts.ids.device != before.ids.device:
            raise ValueError(
                f"with_counts: token_counts must be of {len(before)} sequences on {before.ids.device}, got "
                f"{len(token_counts)} on {token_counts.ids.device}"
            )
        lists_made, other = self._made, self.with_bitmask(self.token_bitmask)

        def of(device: torch.device, vocab: int) -> Lists:
            lists = lists_made(device, vocab)
            flat = FlatProcessors(None, *lists.flat)
            counted = {
                "count_ids": token_counts.ids, "counts": token_counts.counts, "num_output": token_counts.num_output,
            }  # fmt: skip
            kept = {name: new for name, new in counted.items() if getattr(flat, name) is not None}
            return lists._replace(flat=tuple(flat._replace(**kept))[1:])

        object.__setattr__(other, "token_counts", token_counts)
        object.__setattr__(other, "_lists", of)
        return other

    def _bias(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """What is added to logits: distinct ids in order, values, and until when an id is barred."""
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        if self.logit_bias is not None:
            parts.append((*_bias(self.logit_bias), None))
        if self.banned_ids is not None:
            ids, _ = _ids("banned_ids", self.banned_ids)
            parts.append((ids, torch.where(ids == NO_ID, 0.0, -math.inf).to(torch.float32), None))
        minimum = self.min_tokens
        if isinstance(minimum, Tensor):
            check_id_tensor("Processors", "min_tokens", minimum, INTEGERS)
            if minimum.dim() != 1:
                raise TypeError(f"Processors: min_tokens must be an integer or a [batch] tensor, got {_form(minimum)}")
        else:
            check_int("Processors", "min_tokens", minimum, 0, NO_ID)
        barring = isinstance(minimum, Tensor) or minimum > 0
        if barring and self.stop_token_ids is None:
            raise ValueError("Processors: stop_token_ids must be given where there are min_tokens, got None")
        if self.stop_token_ids is not None:
            ids, _ = _ids("stop_token_ids", self.stop_token_ids)
            until = minimum[:, None] if isinstance(minimum, Tensor) else torch.tensor([[minimum]], device="cpu")
            if 1 not in (len(ids), len(until)) and len(ids) != len(until):
                raise ValueError(
                    "Processors: min_tokens and stop_token_ids must agree on the number of sequences, got "
                    f"{len(until)} and {len(ids)}"
                )
            ids = ids.to(until.device).expand(len(until) if len(ids) == 1 else len(ids), -1)
            if barring:
                until = until.clamp(0, NO_ID).to(torch.int32).expand(ids.shape)
                parts.append((ids, torch.zeros(ids.shape, dtype=torch.float32, device=ids.device), until))
        rows = next((len(ids) for ids, _, _ in parts if len(ids) != 1), 1)
        if any(len(ids) not in (1, rows) for ids, _, _ in parts):
            got = [len(ids) for ids, _, _ in parts]
            raise ValueError(
                "Processors: logit_bias, banned_ids and stop_token_ids must agree on the number of sequences, "
                f"got {got}"
            )
        parts = [part for part in parts if part[0].shape[1] > 0]
        if not parts:
            return None
        device, barring = parts[0][0].device, any(until is not None for _, _, until in parts)
        ids, values, until = (
            torch.cat([part.to(device).expand(rows, -1) for part in each], 1)
            for each in (
                [ids for ids, _, _ in parts], [values for _, values, _ in parts],
                [torch.zeros_like(ids) if until is None else until for ids, _, until in parts],
            )
        )  # fmt: skip
        ids, order = ids.sort(stable=True)
        slot = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0)).cumsum(1)
        merged = torch.zeros_like(values).scatter_add(1, slot, values.gather(1, order))
        barred = torch.zeros_like(until).scatter_reduce(1, slot, until.gather(1, order), "amax")
        distinct = torch.full_like(ids, NO_ID).scatter(1, slot, ids)
        return distinct, merged, barred if barring else None

    def _penalties(self) -> Tensor | None:
        """``[lists, 3]`` float32."""
        columns = []
        for name, lowest in (
            ("repetition_penalty", _ROUNDS_TO_0),
            ("frequency_penalty", None),
            ("presence_penalty", None),
        ):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                odd = value.dtype == torch.bool or value.dtype.is_complex
                if odd or value.dim() != 1 or value.layout is not torch.strided:
                    raise TypeError(f"Processors: {name} must be a number or a [batch] real tensor, got {_form(value)}")
                columns.append(value.to(torch.float32))
                continue
            check_is_number("Processors", name, value, "a number or a [batch] tensor")
            if not abs(value) <= torch.finfo(torch.float32).max or (lowest is not None and not value > lowest):
                wanted = "finite" if lowest is None else "finite and > 0 in float32"
                raise ValueError(f"Processors: {name} must be {wanted}, got {value}")
            columns.append(torch.tensor([value], dtype=torch.float32, device="cpu"))
        given = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        if not any(isinstance(x, Tensor) for x in given) and given == (1, 0, 0):
            return None
        device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
        rows = next((len(c) for c in columns if len(c) != 1), 1)
        if any(len(c) not in (1, rows) for c in columns):
            raise ValueError(
                f"Processors: the penalties must agree on the number of sequences, got {[len(c) for c in columns]}"
            )
        return torch.stack([c.to(device).expand(rows) for c in columns], 1).contiguous()


def _made_of(given: dict[str, Any]) -> Processors:
    return Processors(**given)


def _form(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}" + (f" {x.layout}" if x.layout is not torch.strided else "")


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows), default=0)
    filled = [[*row, *[NO_ID] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int32, device="cpu").view(len(rows), width)


def _ids(name: str, value: object) -> tuple[Tensor, Tensor]:
    """``[lists, n]`` int32, and which lists there are ``[lists]`` bool."""
    if isinstance(value, Tensor):
        check_id_tensor("Processors", name, value, INTEGERS)
        if value.dim() not in (1, 2):
            raise TypeError(f"Processors: {name} must be a tensor [n] or [batch, n], got {_form(value)}")
        ids = value if value.dim() == 2 else value[None]
        ids = torch.where((ids < 0) | (ids > MOST_ID), NO_ID, ids).to(torch.int32)
        return ids, torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"Processors: {name} must be ids, lists of ids or a tensor, got {type(value).__name__}")
    nested = any(row is None or isinstance(row, Sequence) for row in value)
    rows = list(value) if nested else [value]
    for row in rows:
        if row is not None and (not isinstance(row, Sequence) or isinstance(row, (str, bytes))):
            raise TypeError(f"Processors: {name} must be ids or lists of ids, got {type(row).__name__} among lists")
        for one in row or ():
            check_int("Processors", name, one, 0, MOST_ID)
    return _padded([row or () for row in rows]), torch.tensor([row is not None for row in rows], device="cpu")


def _bias(value: object) -> tuple[Tensor, Tensor]:
    """Ids ``[lists, n]`` int32 and what is added ``[lists, n]`` float32."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, Tensor) for x in value):
        (ids, _), values = _ids("logit_bias", value[0]), value[1]
        odd = values.dtype == torch.bool or values.dtype.is_complex or values.layout is not torch.strided
        if odd or values.shape != value[0].shape:
            raise TypeError(
                f"Processors: logit_bias must hold as many real values as ids, got {_form(values)} beside "
                f"{_form(value[0])}"
            )
        return ids, torch.where(ids == NO_ID, 0.0, values.to(ids.device, torch.float32).view(ids.shape))
    rows = [value] if isinstance(value, Mapping) else value
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise TypeError(f"Processors: logit_bias must be a mapping, mappings or tensors, got {type(value).__name__}")
    for row in rows:
        if row is not None and not isinstance(row, Mapping):
            raise TypeError(f"Processors: logit_bias must hold mappings or None, got {type(row).__name__}")
        for one, added in (row or {}).items():
            check_int("Processors", "logit_bias", one, 0, MOST_ID)
            if isinstance(added, bool) or not isinstance(added, (int, float)):
                raise TypeError(f"Processors: logit_bias must map ids to numbers, got {type(added).__name__}")
            if not (-_MOST_BIAS <= added <= _MOST_BIAS or added == -math.inf):  # nor NaN
                raise ValueError(f"Processors: logit_bias must map ids to float32 numbers or -inf, got {added}")
    ids = _padded([list(row or ()) for row in rows])
    values = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for i, row in enumerate(rows):
        values[i, : len(row or ())] = torch.tensor(list((row or {}).values()), dtype=torch.float32, device="cpu")
    return ids, values


def _bitmask(ids: Tensor, given: Tensor, vocab: int) -> Tensor:
    """The ids of each list as bits ``[lists, ceil(vocab / 32)]`` int32; all of them where no list is given."""
    words = (vocab + 31) // 32
    bits = torch.zeros(len(ids), 32 * words + 1, dtype=torch.bool, device=ids.device)
    bits.scatter_(1, ids.clamp_max(32 * words).long(), True)
    bits |= ~given[:, None]
    values = bits[:, :-1].view(len(ids), words, 32).long() << torch.arange(32, device=ids.device)
    total = values.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)
