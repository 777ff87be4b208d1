"""Distributions and random numbers in float64, independent of the code they judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import laws
from ..checks import FLOAT_DTYPES, check_array, check_instance, check_int, check_tensor
from ..sampling import SMALLEST_TEMPERATURE, SamplingParams

Float64 = NDArray[np.float64]
"""An array of distributions."""
Int64 = NDArray[np.int64]
"""An array of tokens or counts."""
Bool = NDArray[np.bool_]


def _check_values(caller: str, name: str, value: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    check_tensor(caller, name, value, dtypes, None)
    if value.is_meta:
        raise ValueError(f"{caller}: {name} must have values, got a tensor on meta")


def float64_law(logits: Tensor, params: SamplingParams | None = None) -> Float64:
    """Each row's distribution after temperature → top-k → top-p → min-p → renormalise (or min-p first), in float64.

    Parameters
    ----------
    logits : Tensor
        ``[..., vocab]`` float16, bfloat16, float32 or float64; NaN is read as −inf.
    params : SamplingParams, optional
        Tensors in it hold one value for each index of the first dimension; one out of its range is read as 1
        (temperature) or as off.

    Returns
    -------
    ndarray
        ``[..., vocab]`` float64.

    Raises
    ------
    TypeError, ValueError
        A wrong type, dtype or shape, or logits without values.
    """
    _check_values("float64_law", "logits", logits, FLOAT_DTYPES)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"float64_law: logits must be [..., vocab], got {list(logits.shape)}")
    check_instance("float64_law", "params", params, (SamplingParams, type(None)), "a SamplingParams or None")
    batch = logits.shape[0] if logits.dim() > 1 else 1
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = getattr(params, name, None)
        if isinstance(value, Tensor) and len(value) != batch:
            raise ValueError(f"float64_law: params.{name} must be [batch={batch}], got {list(value.shape)}")
    x = logits.detach().double().cpu().numpy()
    params = params or SamplingParams()
    out = np.empty_like(x)
    for index in np.ndindex(x.shape[:-1]):
        batch = index[0] if index else 0
        t, k, p, m = (_value(v, batch) for v in (params.temperature, params.top_k, params.top_p, params.min_p))
        t = t if 0 <= t <= np.finfo(np.float32).max else 1.0
        p, m = (p if p >= 0 else 1.0), (m if 0 <= m <= 1 else 0.0)
        out[index] = _row_law(x[index], t, int(k), p, m, params.min_p_first)
    return out


def _value(value: float | Tensor, index: int) -> float:
    return float(value[index]) if isinstance(value, Tensor) else float(value)


def _row_law(x: Float64, temperature: float, top_k: int, top_p: float, min_p: float, min_p_first: bool) -> Float64:
    x = np.where(np.isnan(x), -np.inf, x)
    top = x.max()
    # greedy, a +inf, or nothing possible: np.argmax takes the lowest id
    if temperature < SMALLEST_TEMPERATURE or np.isinf(top):
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
        kept &= x >= values[::-1][above < top_p * (1 - 2.0**-18) * mass.sum()][-1]
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

    Raises
    ------
    TypeError, ValueError
        No array, or one of another dtype or width; leading dimensions that do not broadcast.
    """
    check_array("philox4x32", "key", key, "u", "[..., 2] uint64", 2)
    check_array("philox4x32", "counter", counter, "u", "[..., 4] uint64", 4)
    try:
        np.broadcast_shapes(key.shape[:-1], counter.shape[:-1])
    except ValueError:
        wanted = f"[..., 4] that broadcasts with a key {list(key.shape)}"
        raise ValueError(f"philox4x32: counter must be {wanted}, got {list(counter.shape)}") from None
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
    """``[...]`` int64 to ``[..., 2]``: the low and the high 32-bit word.

    Raises
    ------
    TypeError, ValueError
        No array, or one of another dtype.
    """
    check_array("words32", "values", values, "i", "int64")
    bits = np.asarray(values, np.int64).view(np.uint64)
    return np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], -1)


def float64_gumbel(keys: Tensor, vocab: int) -> Float64:
    """The Gumbel noise ``[..., vocab]`` of each key ``[...]`` int64 and target id, in float64 on the contract's bits.

    Raises
    ------
    TypeError, ValueError
        Keys of another dtype or without values; `vocab` outside 1 … 2**30.
    """
    _check_values("float64_gumbel", "keys", keys, (torch.int64,))
    check_int("float64_gumbel", "vocab", vocab, 1, 2**30)
    key = words32(keys.cpu().numpy())[..., None, :]
    counter = np.zeros((2, (vocab + 3) // 4, 4), np.uint64)
    counter[..., 0], counter[..., 3] = np.arange(counter.shape[1]), 0x47554D42
    counter[1, :, 2] = 1
    bits, further = (
        philox4x32(key, c).reshape(*keys.shape, 4 * len(c))[..., :vocab].astype(np.float64) + 0.5 for c in counter
    )
    t = np.where(bits < 1 << 16, np.floor(bits) * 2.0**-32 + further * 2.0**-64, bits * 2.0**-32)
    noise: Float64 = -np.log(-np.log1p(-t))
    return noise


# --- target laws ------------------------------------------------------------------------------------------------------


class Position(NamedTuple):
    """What a cascade may look at, row by row: ``[..., vocab]`` each."""

    P: Float64  # distributions of target and draft after the sampling transform
    Q: Float64
    p: Float64  # the raw ones
    q: Float64

    @property
    def max_p(self) -> Float64:
        top: Float64 = self.p.max(-1, keepdims=True)
        return top

    @property
    def max_q(self) -> Float64:
        top: Float64 = self.q.max(-1, keepdims=True)
        return top

    @property
    def surprise(self) -> Float64:
        """−log p."""
        return np.where(self.p > 0, -np.log(np.where(self.p > 0, self.p, 1)), np.inf)


Defers = Callable[[Any, Position], Bool]
LAW_EXAMPLES: list[laws.TargetLaw] = [laws.Lossy(0.3), laws.Lossy(0.2, beta=0.9), laws.Lossy(0.4, beta="exact")]
"""Of every law, what the tests try."""
_defers: dict[type[laws.TargetLaw], Defers] = {}


def cascade(*examples: laws.TargetLaw) -> Callable[[Defers], Defers]:
    """Registers where the law of these examples defers to the target: rows ``[..., 1]`` or ids ``[..., vocab]``."""

    def register(defers: Defers) -> Defers:
        LAW_EXAMPLES.extend(examples)
        _defers[type(examples[0])] = defers
        return defers

    return register


@cascade(laws.Chow(0.6), laws.Chow(1.2, loss="log", bonus="cascade"))
def _chow(law: laws.Chow, x: Position) -> Bool:
    return _entropy(x.q) > law.alpha if law.loss == "log" else x.max_q < 1 - law.alpha


@cascade(laws.Diff(0.05), laws.Diff(0.1, loss="log", bonus="cascade"))
def _diff(law: laws.Diff, x: Position) -> Bool:
    if law.loss == "log":
        return _entropy(x.q) > _entropy(x.p) + law.alpha
    return x.max_q < x.max_p - law.alpha


@cascade(laws.Opt(0.3, bonus="cascade"), laws.Opt(0.6, loss="log"))
def _opt(law: laws.Opt, x: Position) -> Bool:
    price = law.alpha * np.maximum(x.P - x.Q, 0).sum(-1, keepdims=True)
    return _entropy(x.q) > _entropy(x.p) + price if law.loss == "log" else x.max_q < x.max_p - price


@cascade(laws.TokenV1(0.1), laws.TokenV1(0.3, bonus="cascade"))
def _token_v1(law: laws.TokenV1, x: Position) -> Bool:
    return x.q < x.max_p - law.alpha


@cascade(laws.TokenV2(0.1, bonus="cascade"), laws.TokenV2(0.3))
def _token_v2(law: laws.TokenV2, x: Position) -> Bool:
    return x.p < x.max_p - law.alpha


@cascade(laws.TokenV3(0.7), laws.TokenV3(0.9, bonus="cascade"))
def _token_v3(law: laws.TokenV3, x: Position) -> Bool:
    return x.p < (1 - law.alpha) * x.max_p


@cascade(laws.BiLD(1.5), laws.BiLD(1.0, distance="argmax", bonus="cascade"))
def _bild(law: laws.BiLD, x: Position) -> Bool:
    if law.distance == "argmax":
        return np.take_along_axis(x.surprise, x.q.argmax(-1)[..., None], -1) > law.alpha
    cross_entropy = np.where(x.q > 0, x.q * np.where(x.q > 0, x.surprise, 0), 0).sum(-1, keepdims=True)
    above: Bool = cross_entropy > law.alpha
    return above


def float64_target_law(law: laws.TargetLaw, P: Float64, Q: Float64, p: Float64, q: Float64) -> Float64:
    """The distribution that verification actually produces with one of `sk.laws`, row by row, in float64.

    Parameters
    ----------
    law : TargetLaw
        For a `Lossy` whose β is a number, what comes out is ``min(Q, P / (1 − α)) + (1 − A) norm((P / β − Q)+)`` with
        ``A = Σ min(Q, P / (1 − α))``; for the others it is π.
    P, Q : ndarray
        ``[..., vocab]`` distributions of target and draft after the sampling transform.
    p, q : ndarray
        The raw ones.

    Returns
    -------
    ndarray
        ``[..., vocab]`` float64.

    Raises
    ------
    TypeError, ValueError
        Another law, or arrays of another dtype or of several shapes, or without ids.
    """
    name = "float64_target_law"
    if type(law) not in (laws.Lossy, *_defers):
        raise TypeError(f"{name}: law must be one of sk.laws, got {type(law).__name__}")
    for argument, rows in (("P", P), ("Q", Q), ("p", p), ("q", q)):
        check_array(name, argument, rows, "f", "[..., vocab] float64")
        if rows.shape != P.shape:
            raise ValueError(f"{name}: {argument} must be {list(P.shape)}, got {list(rows.shape)}")
    if P.ndim < 1 or P.shape[-1] < 1:
        raise ValueError(f"{name}: P must be [..., vocab], got {list(P.shape)}")
    if isinstance(law, laws.Lossy):
        return _lossy(law, P, Q)
    defers = _defers[type(law)](law, Position(P, Q, p, q))
    if defers.shape[-1] == 1:
        made = np.where(defers, P, Q)
    else:
        made = np.where(defers, 0, Q) + P * np.where(defers, Q, 0).sum(-1, keepdims=True)
    return np.where(Q.sum(-1, keepdims=True) > 0, made, P)  # where Q is no distribution P takes the law's place


def _lossy(law: laws.Lossy, P: Float64, Q: Float64) -> Float64:
    taken = np.minimum(Q, P / (1 - law.alpha))
    rest = 1 - taken.sum(-1, keepdims=True)
    inverse_beta: Any = _exact_inverse_beta(P, Q, rest) if isinstance(law.beta, str) else 1 / law.beta
    left = np.maximum(P * inverse_beta - Q, 0)
    mass = left.sum(-1, keepdims=True)
    recovered: Float64 = np.where(mass > 0, left / np.where(mass > 0, mass, 1), P)
    return taken + rest * recovered


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
