"""Linear weights laid out in advance, which makes verifying several tokens on a CPU nearly as cheap as one.

Plain float32 `torch.nn.Linear` on a CPU is bound by memory for one row, but re-arranges its weights at every call with
more than one. oneDNN can do that once, into a blocked layout that serves every row count; each row of a layer's
result has the same bits whatever rows stand beside it, so that these layers do not make decoding with
and without speculation differ. (MKL's packed weights need a copy for each row count and round differently for
each.)
"""

from __future__ import annotations

import weakref
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

_MIN_ROWS = 4  # oneDNN multiplies 1 or 2 rows by another kernel: slower than 4 rows, and with other rounding

_packed: weakref.WeakSet[Any] = weakref.WeakSet()


class PackedWeights:
    """The packed layers of a model; a context manager that puts them back on leaving. Made by `pack_linear_weights`.

    Attributes
    ----------
    num_layers : int
        Linear layers packed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[nn.Module] = []
        self._undone = False

    @property
    def num_layers(self) -> int:
        """Linear layers packed."""
        return len(self._layers)

    def undo(self) -> None:
        """Restore the layers and free the packed copies. May be called again."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._layers = []
        if not self._undone:  # it may have been packed anew since
            _packed.discard(self._model)
        self._undone = True

    def __enter__(self) -> PackedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def has_onednn() -> bool:
    """Whether this build of torch has what packs weights."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linear_weights(model: nn.Module) -> PackedWeights:
    """Pack the weights of every plain `torch.nn.Linear` of `model`, for calls with any number of rows.

    Layers whose ``forward`` someone has replaced (hooks of accelerate, quantisers) stay as they are.

    Takes the memory of those weights a second time. The result differs from the plain layer's by rounding. The
    parameters and the state dict stay as they are; a weight changed afterwards is not seen until the layers are packed
    again. A copy of the model is not packed, and a packed model cannot be pickled. Inputs that are not float32, and
    calls under autocast, go to the plain layer.

    Parameters
    ----------
    model : nn.Module
        On the CPU, float32; no gradient flows through a packed layer. Changed in place until
        `PackedWeights.undo` or the end of the ``with`` block.

    Returns
    -------
    PackedWeights
        Puts the layers back: at the end of a ``with`` block, or by its ``undo()``.

    Raises
    ------
    TypeError
        Not a model.
    ValueError
        A model elsewhere than on the CPU or not float32, one that is packed already, or a torch without oneDNN.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"pack_linear_weights: model must be an nn.Module, got {type(model).__name__}")
    if not has_onednn():
        raise ValueError("pack_linear_weights: this build of torch has no oneDNN, which does the packing")
    if model in _packed:
        raise ValueError(f"pack_linear_weights: this {type(model).__name__} is packed already; undo that first")
    layers = [m for m in model.modules() if type(m) is nn.Linear and _is_plain(m)]
    for layer in layers:
        weight = layer.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(
                f"pack_linear_weights: weights must be float32 on the CPU, got {weight.dtype} on {weight.device}; "
                "elsewhere packing gains nothing"
            )
    packed = PackedWeights(model)
    _packed.add(model)
    try:
        for layer in layers:
            layer.__dict__["forward"] = _PackedForward(layer)
            packed._layers.append(layer)
    except BaseException:  # memory ran out, or Ctrl-C: leave no half-packed model behind
        packed.undo()
        raise
    return packed


def _is_plain(layer: nn.Linear) -> bool:
    """Whether nobody has replaced its method; a copy of a packed layer has the method itself in that place."""
    forward = layer.__dict__.get("forward")
    own = getattr(forward, "__func__", None) is nn.Linear.forward and getattr(forward, "__self__", None) is layer
    return forward is None or own


def is_packed(model: Any) -> bool:
    """True between `pack_linear_weights` and its undoing."""
    return model in _packed


class _PackedForward:
    """Takes the place of a layer's method; in a copy of the layer (a deep copy of a model) it becomes the method
    itself.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer, self._features = id(layer), layer.in_features
        self._bias = None if layer.bias is None else layer.bias.detach()
        self._plain = layer.weight, layer.bias  # which follow a conversion of the model
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return nn.functional.linear(x, *self._plain)
        rows = x.reshape(-1, self._features)
        missing = _MIN_ROWS - rows.shape[0]
        if missing > 0:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        y = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        if missing > 0:
            y = y[:-missing]
        return y.view(*x.shape[:-1], y.shape[-1])

    def __reduce__(self) -> Any:
        raise TypeError("pack_linear_weights: layers must be put back (PackedWeights.undo) before a model is pickled")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        layer = memo.get(self._layer)
        return self if layer is None else MethodType(nn.Linear.forward, layer)
