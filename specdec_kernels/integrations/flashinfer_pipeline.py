"""FlashInfer's pipelines of logits processors by their own names, of the functions of `flashinfer`: change the import.

    # was: from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopP
    from specdec_kernels.integrations.flashinfer_pipeline import LogitsPipe, Sample, Softmax, Temperature, TopP

    pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])
    tokens = pipe(logits, temperature=0.8, top_p=0.9)

Names are those of FlashInfer 0.7.4's ``flashinfer.logits_processor``. Each processor takes logits, probabilities or
either, which is checked when a pipe is made; it does what `flashinfer` says of its function, ties and rows without a
distribution included. Different on purpose:

- Processors, operators and rules of one's own are not served, nor are tensors with a type of their own.
- Parameters are given when the pipe is called, not when a processor is made; one of another name is refused.
- Temperatures are one number or one a row; 0 is refused as a number, and in a tensor leaves a row's likeliest id alone.
  Numbers may be integers, and a `top_k` or `top_p` of 0 means what it does in `flashinfer`.
- Errors when a pipe is called are those that the function raises, including TypeError, and in its name.
- A compiled pipe makes fewer tensors in between, and draws from the same distribution (up to the rounding of rows in
  half precision, which one that is not compiled cuts filter by filter), except for `TopK` with ``joint_topk_topp`` and
  `TopP` and `Sample` right after it: there from that of "joint" in `flashinfer`. With `indices` the filter before
  `Sample` may there have one value per output instead of one per row, see `flashinfer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_flag, check_instance, check_sequence
from ..sampling import SMALLEST_TEMPERATURE
from . import flashinfer
from .flashinfer import checked_params, checked_rows, renormalised

__all__ = [
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Sample",
    "Softmax",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
]


class TensorType(Enum):
    """What the numbers of a tensor are: LOGITS, PROBS (probabilities, of any positive sum) or INDICES (ids)."""

    LOGITS = 1
    PROBS = 2
    INDICES = 3

    def __str__(self) -> str:
        return self.name


LOGITS, PROBS, INDICES = TensorType


class LogitsProcessor:
    """The base class of a `LogitsPipe`'s processors; it serves those of this module alone."""

    makes: ClassVar[dict[TensorType, TensorType]] = {}
    """What it makes, by what it takes."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Temperature(LogitsProcessor):
    """Divide logits by `temperature`, a number above 0 or ``[batch]`` or ``[batch, 1]`` of any floating dtype.

    They become float32, or stay float64. The values of a tensor are read as in `flashinfer.softmax`: at 0 the likeliest
    id alone is left, and what is below 0 or not finite counts as 1.
    """

    makes: ClassVar = {LOGITS: LOGITS}


class Softmax(LogitsProcessor):
    """Make probabilities, float32, of logits: `flashinfer.softmax`; `enable_pdl` changes nothing."""

    makes: ClassVar = {LOGITS: PROBS}

    def __init__(self, enable_pdl: bool | None = None) -> None:
        pass


class TopK(LogitsProcessor):
    """Keep the `top_k` largest of logits, `flashinfer.top_k_mask_logits`, or probabilities, `top_k_renorm_probs`.

    Parameters
    ----------
    joint_topk_topp : bool
        True: where `TopP` and `Sample` come next in a compiled pipe, both filters look at the whole row.

    Raises
    ------
    TypeError
        `joint_topk_topp` is no bool.
    """

    makes: ClassVar = {LOGITS: LOGITS, PROBS: PROBS}

    def __init__(self, joint_topk_topp: bool = False) -> None:
        check_flag("TopK", "joint_topk_topp", joint_topk_topp)
        self.joint_topk_topp = joint_topk_topp


class TopP(LogitsProcessor):
    """Keep the likeliest ids whose probabilities reach `top_p`: `flashinfer.top_p_renorm_probs`."""

    makes: ClassVar = {PROBS: PROBS}


class MinP(LogitsProcessor):
    """Keep ids of `min_p` times the largest probability or more, renormalised, as float32."""

    makes: ClassVar = {PROBS: PROBS}


class Sample(LogitsProcessor):
    """Draw a token of each row, or of those that `indices` names; `deterministic` changes nothing."""

    makes: ClassVar = {LOGITS: INDICES, PROBS: INDICES}

    def __init__(self, deterministic: bool = True) -> None:
        pass


def _temperature(logits: Tensor, temperature: Tensor | float) -> Tensor | float:
    """A number above 0, or ``[batch]``: what a pipe refuses must not depend on whether it is compiled."""
    _, rows = checked_rows("Temperature", "logits", logits)
    if isinstance(temperature, Tensor) and temperature.dim() == 2 and temperature.shape[1] == 1:
        temperature = temperature[:, 0]
    checked_params("Temperature", rows, temperature=temperature)
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"Temperature: temperature must be > 0, got {temperature}")
    return temperature


def _scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """The quotients, whose softmax is what `_scaled_softmax` gives."""
    temperature = _temperature(logits, temperature)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float16 would overflow
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype)[:, None]
        divisor = torch.where((temperature >= 0) & temperature.float().isfinite(), temperature, 1.0)
    else:
        divisor = torch.full((1, 1), float(temperature), dtype=logits.dtype, device=logits.device)
    largest, likeliest = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).max(1, keepdim=True)
    # where float32 does not hold the largest quotient; a shift changes no softmax
    shift = torch.where(largest.isfinite() & ~(largest / divisor).float().isfinite(), largest, 0.0)
    greedy = torch.full_like(logits, -torch.inf).scatter_(1, likeliest, 0.0)
    return torch.where(divisor < SMALLEST_TEMPERATURE, greedy, (logits - shift) / divisor)


def _scaled_softmax(logits: Tensor, temperature: Tensor | float) -> Tensor:
    return flashinfer.softmax(logits, _temperature(logits, temperature))


def _cut_by_top_k(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Of float64, too, as those that draw right away."""
    double = isinstance(probs, Tensor) and probs.dtype == torch.float64
    return flashinfer.top_k_renorm_probs(probs.float() if double else probs, top_k)


def _cut_by_min_p(probs: Tensor, min_p: Tensor | float) -> Tensor:
    vocab, rows = checked_rows("MinP", "probs", probs)
    return renormalised(rows, checked_params("MinP", rows, min_p=min_p))[:, :vocab]


_PROCESSORS = (Temperature, Softmax, TopK, TopP, MinP, Sample)
_JOINT = functools.partial(flashinfer.top_k_top_p_sampling_from_probs, filter_apply_order="joint")
_RUNS: dict[tuple[Any, ...], tuple[Callable[..., Any], tuple[str, ...]]] = {
    (LOGITS, Temperature): (_scaled, ("temperature",)),
    (LOGITS, Softmax): (flashinfer.softmax, ()),
    (LOGITS, TopK): (flashinfer.top_k_mask_logits, ("top_k",)),
    (LOGITS, Sample): (flashinfer.sampling_from_logits, ()),
    (PROBS, TopK): (_cut_by_top_k, ("top_k",)),
    (PROBS, TopP): (flashinfer.top_p_renorm_probs, ("top_p",)),
    (PROBS, MinP): (_cut_by_min_p, ("min_p",)),
    (PROBS, Sample): (flashinfer.sampling_from_probs, ()),
    # by a compiled pipe
    (LOGITS, Temperature, Softmax): (_scaled_softmax, ("temperature",)),
    (PROBS, TopK, Sample): (flashinfer.top_k_sampling_from_probs, ("top_k",)),
    (PROBS, TopP, Sample): (flashinfer.top_p_sampling_from_probs, ("top_p",)),
    (PROBS, MinP, Sample): (flashinfer.min_p_sampling_from_probs, ("min_p",)),
    (PROBS, TopK, TopP, Sample): (_JOINT, ("top_k", "top_p")),  # not without `joint_topk_topp`
}
"""What is given, and processors in a row: the function that does it, and its parameters after the rows."""


class LogitsPipe:
    """Processors in their order, as one function.

    Parameters
    ----------
    processors : sequence of LogitsProcessor
        At least one; each takes what the one before it makes. After `Sample` comes none.
    compile : bool
        Draw from uncut rows where a filter of probabilities stands right before `Sample`, and divide by the temperature
        within the softmax. The distribution stays, except with ``TopK(joint_topk_topp=True)``.
    input_type : TensorType, optional
        LOGITS or PROBS; needed where the first processor takes both.
    custom_fusion_rules, custom_validity_checks : None
        Not served.

    Raises
    ------
    TypeError
        Something else among `processors`, or a wrong type of an option.
    ValueError
        No processors, one that cannot take what it is given, or no `input_type` where it is needed.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: None = None,
        custom_validity_checks: None = None,
    ) -> None:
        check_sequence("LogitsPipe", "processors", processors, LogitsProcessor, "Temperature(), Softmax(), TopK(), …")
        for processor in processors:
            if type(processor) not in _PROCESSORS:
                raise TypeError(f"LogitsPipe: processors must be those of its module, got {processor}")
        check_flag("LogitsPipe", "compile", compile)
        check_instance("LogitsPipe", "input_type", input_type, (TensorType, type(None)), "a TensorType or None")
        self.processors = list(processors)
        first = self.processors[0].makes
        if input_type is None and len(first) > 1:
            raise ValueError(
                f"LogitsPipe: input_type must be given where the first of processors takes both, "
                f"as {self.processors[0]} does, got None"
            )
        self._initial_type = kind = next(iter(first)) if input_type is None else input_type
        for place, processor in enumerate(self.processors):
            if kind not in processor.makes:
                takes = " or ".join(map(str, processor.makes))
                raise ValueError(f"LogitsPipe: processors[{place}] must take {kind}, got {processor}: it takes {takes}")
            kind = processor.makes[kind]
        self._runs = self._planned(1)
        if compile:
            self.compile(custom_fusion_rules, custom_validity_checks)
        else:
            _check_none(custom_fusion_rules, custom_validity_checks)

    @property
    def initial_type(self) -> TensorType:
        """What it takes."""
        return self._initial_type

    def compile(self, custom_fusion_rules: None = None, custom_validity_checks: None = None) -> None:
        """Do from now on what the option `compile` says.

        Raises
        ------
        TypeError
            A rule or a check, of which there are none.
        """
        _check_none(custom_fusion_rules, custom_validity_checks)
        self._runs = self._planned(3)

    def __call__(
        self,
        x: Tensor,
        *,
        temperature: Tensor | float | None = None,
        top_k: Tensor | int | None = None,
        top_p: Tensor | float | None = None,
        min_p: Tensor | float | None = None,
        indices: Tensor | None = None,
        generator: torch.Generator | None = None,
        is_deterministic: bool = False,
    ) -> Tensor:
        """Apply the processors to `x`, ``[rows, vocab]``; returns such a tensor again, or ``[batch]`` ids.

        Parameters that no processor needs are not looked at, and `is_deterministic` never is. `indices` and `generator`
        are `Sample`'s, see `flashinfer.sampling_from_logits`. Parameters that are
        tensors have one value per row; with `indices`, see this module's notes.

        Raises
        ------
        TypeError, ValueError
            A parameter that is missing, or what the functions raise.
        """
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for run, call, names in self._runs:
            for name in names:
                if given[name] is None:
                    raise ValueError(f"LogitsPipe: {name} must be given, as {run} needs it, got None")
            drawing = {"indices": indices, "generator": generator} if isinstance(run[-1], Sample) else {}
            x = call(x, *(given[name] for name in names), **drawing)
        return x

    def __repr__(self) -> str:
        return f"LogitsPipe({self.processors})"

    def _planned(self, longest: int) -> list[tuple[list[LogitsProcessor], Callable[..., Any], tuple[str, ...]]]:
        """The processors, as many together as `longest` allows."""
        planned, place, kind = [], 0, self._initial_type
        while place < len(self.processors):
            for width in range(longest, 0, -1):
                run = self.processors[place : place + width]
                known = _RUNS.get((kind, *map(type, run)))
                if known and (known[0] is not _JOINT or getattr(run[0], "joint_topk_topp", False)):
                    break
            assert known
            planned.append((run, *known))
            place += len(run)
            for processor in run:
                kind = processor.makes[kind]
        return planned


def _check_none(custom_fusion_rules: object, custom_validity_checks: object) -> None:
    for name, value in (
        ("custom_fusion_rules", custom_fusion_rules),
        ("custom_validity_checks", custom_validity_checks),
    ):
        check_instance("LogitsPipe", name, value, type(None), "None: there are no operators to write any for")
