"""Sampling parameters: what turns a row of logits into the distribution that tokens are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .checks import integer_kind
from .flat import FlatParams

SMALLEST_TEMPERATURE = 2.0**-126
"""Below it, decoding is greedy: float32 holds no smaller number with all its digits."""


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """Temperature and truncation, applied in the order temperature, top-k, top-p, min-p, then renormalised.

    Every field but `min_p_first` is a number, or a ``[batch]`` tensor with one value per sequence. A contiguous float32
    tensor (`top_k`: int64) is read at each call, so that its values may be changed, as a captured graph needs; others
    are copied.

    Parameters
    ----------
    temperature : float or Tensor
        Divides the logits; 0 (or less than 2**-126) means greedy: all mass on the argmax, lowest id on ties. >= 0,
        finite in float32.
    top_k : int or Tensor
        Keep every logit >= the k-th largest (ties survive); <= 0, or >= vocab: off.
    top_p : float or Tensor
        Of the ids left by top-k, keep the smallest set whose renormalised mass reaches ``top_p * (1 - 2**-18)``, with
        every tie of its last id; 0, or >= 1: off. >= 0. The slack of 4e-6 lets 0.5 and 0.3 reach 0.8 on every backend,
        although float32 holds neither 0.3 nor 0.8 exactly and each backend adds in its own order.
    min_p : float or Tensor
        Keep ids with probability >= ``min_p`` times the largest; 0: off. In [0, 1].
    min_p_first : bool
        Apply min-p before top-k and top-p (vLLM's order) instead of after them (the Hugging Face order).

    Raises
    ------
    ValueError
        A number out of its range. Values inside tensors are not checked here: where they are used, bad ones are read as
        1 (temperature) or as off, and set ``Status.BAD_PARAM`` in functions that return a status.
    TypeError
        A field of another type; a tensor that is not 1-d of a real (`top_k`: integer) dtype.
    """

    temperature: float | Tensor = 1.0
    top_k: int | Tensor = 0
    top_p: float | Tensor = 1.0
    min_p: float | Tensor = 0.0
    min_p_first: bool = False
    # Made once: building them at every op call would cost more than some ops do.
    _flat: FlatParams = field(init=False, repr=False, compare=False)
    _scalars: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _tensors: tuple[Tensor | None, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        temperature, temperatures = _split("temperature", self.temperature, 1.0)
        top_k, top_ks = _split("top_k", self.top_k, 0)
        top_p, top_ps = _split("top_p", self.top_p, 1.0)
        min_p, min_ps = _split("min_p", self.min_p, 0.0)
        if not 0 <= temperature <= torch.finfo(torch.float32).max:
            raise ValueError(f"SamplingParams: temperature must be finite and >= 0, got {temperature}")
        if temperature < SMALLEST_TEMPERATURE:  # float32 might round it up
            temperature = 0.0
        if 0 < top_p < SMALLEST_TEMPERATURE:  # float32 may have no such number, and 0 is off
            top_p = SMALLEST_TEMPERATURE
        if not top_p >= 0:
            raise ValueError(f"SamplingParams: top_p must be >= 0, got {top_p}")
        if not 0 <= min_p <= 1:
            raise ValueError(f"SamplingParams: min_p must be in [0, 1], got {min_p}")
        if not isinstance(self.min_p_first, bool):
            raise TypeError(f"SamplingParams: min_p_first must be a bool, got {type(self.min_p_first).__name__}")
        # "Off" stays off whatever the number, although kernels take 32-bit ids and float32.
        scalars = (temperature, min(max(int(top_k), 0), 2**31 - 1), min(top_p, 1.0), min_p, self.min_p_first)
        tensors = (temperatures, top_ks, top_ps, min_ps)
        object.__setattr__(self, "_flat", FlatParams(*scalars, *tensors))
        object.__setattr__(self, "_scalars", tuple(map(float, scalars)))
        object.__setattr__(self, "_tensors", None if all(tensor is None for tensor in tensors) else tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        pairs = zip(self._given(), other._given(), strict=True)
        return all(
            isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device and torch.equal(a, b)
            if isinstance(a, Tensor) or isinstance(b, Tensor)
            else a == b
            for a, b in pairs
        )

    def __hash__(self) -> int:
        return hash(tuple(None if isinstance(value, Tensor) else value for value in self._given()))

    def _given(self) -> tuple[float | Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.min_p_first

    @property
    def _tensors_or_none(self) -> tuple[Tensor | None, ...]:
        return self._tensors or (None,) * 4

    @property
    def is_greedy(self) -> bool:
        """True where every sequence is known to be greedy without looking at a tensor."""
        return not isinstance(self.temperature, Tensor) and self.temperature < SMALLEST_TEMPERATURE


def _split(name: str, value: object, default: float) -> tuple[float, Tensor | None]:
    integer = name == "top_k"
    if isinstance(value, Tensor):
        if (
            value.dim() != 1
            or value.layout is not torch.strided
            or value.dtype == torch.bool
            or value.dtype.is_complex
            or (integer and value.is_floating_point())
        ):
            kind = "integer" if integer else "real"
            raise TypeError(
                f"SamplingParams: {name} must be a number or a [batch] {kind} tensor, "
                f"got {value.dtype} {list(value.shape)}"
                + (f" {value.layout}" if value.layout is not torch.strided else "")
            )
        if name in ("top_p", "temperature") and value.dtype == torch.float64:
            instead = SMALLEST_TEMPERATURE if name == "top_p" else 0.0
            value = torch.where((value > 0) & (value < SMALLEST_TEMPERATURE), instead, value)
        return default, value.to(torch.int64 if integer else torch.float32).contiguous()
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        kind = "an integer" if integer else "a number"
        raise TypeError(f"SamplingParams: {name} must be {kind} or a [batch] tensor, got {integer_kind(value)}")
    try:
        return (value if integer else float(value)), None
    except OverflowError:
        raise ValueError(f"SamplingParams: {name} must fit in float64, got a larger integer") from None


DEFAULT_PARAMS = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
