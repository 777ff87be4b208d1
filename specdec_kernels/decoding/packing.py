"""Linear layers with weights packed once for oneDNN: the forward of a few rows on a CPU in much less time.

``nn.Linear`` re-reads its weight in an order that suits one row or hundreds, not the 4 to 32 rows that verify a draft.
A weight reordered once into oneDNN's blocked layout serves every row count, and each row's result has the same bits
whatever rows stand beside it, which makes decoding with and without speculation agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["pack_linear_weights"]

_MIN_ROWS = 4  # oneDNN multiplies 1 or 2 rows by another kernel: slower than 4 rows, and with other rounding


@contextmanager
def pack_linear_weights(model: nn.Module) -> Iterator[None]:
    """Run the model's float32 ``nn.Linear`` layers from packed weights while the context lasts.

    The modules, their parameters and the state dict stay as they are; only each layer's `forward` is set, and unset on
    leaving, also by an exception. Costs the memory of the weights once more. Change no weight inside the context: the
    packed copy would not follow. Inputs that need a gradient take the layer's own forward.

    Parameters
    ----------
    model : nn.Module
        On the CPU. Layers of another class (GPT-2's Conv1D, quantised ones) are left alone.

    Raises
    ------
    ValueError
        This torch has no oneDNN, or the model has no float32 ``nn.Linear`` on the CPU.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("pack_linear_weights: this build of torch has no oneDNN")
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and _packable(module)]
    if not layers:
        raise ValueError(
            f"pack_linear_weights: model must have float32 nn.Linear layers on the CPU, {type(model).__name__} has none"
        )
    packed: list[nn.Linear] = []
    try:
        for layer in layers:
            layer.forward = _packed_forward(layer)  # type: ignore[method-assign]
            packed.append(layer)
        yield
    finally:
        for layer in packed:
            del layer.forward


def _packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and "forward" not in vars(module)  # somebody else's hook, or packed already
    )


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    out_features, in_features, bias = layer.out_features, layer.in_features, layer.bias
    with torch.no_grad():
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
    linear = torch.ops.mkldnn._linear_pointwise

    def forward(input: Tensor) -> Tensor:
        if input.requires_grad or input.dtype != torch.float32:
            return nn.Linear.forward(layer, input)
        rows = input.reshape(-1, in_features)
        missing = _MIN_ROWS - rows.shape[0]
        if missing > 0:
            rows = nn.functional.pad(rows, (0, 0, 0, missing))
        output = linear(rows, weight, bias, "none", [], "")
        if missing > 0:
            output = output[:-missing]
        return output.view(*input.shape[:-1], out_features)

    return forward
