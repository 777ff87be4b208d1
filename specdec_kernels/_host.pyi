"""Types of the compiled module; what is in it is said in `specdec_kernels/_host_py.py` and, of the functions, in
`specdec_kernels/backends/direct.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray

def set_torch(
    tensor: type[torch.Tensor],
    exchange: object,
    *,
    wrap: int,
    free: int,
    busy: Sequence[Callable[[], object]],
    grad_enabled: Callable[[], bool],
    out_of_memory: type[Exception],
    dtypes: Sequence[torch.dtype],
) -> bool: ...
def direct(op: Callable[..., Any], name: str, *, cpu: int, cuda: int) -> Callable[..., Any]: ...
def all_fit(like: torch.Tensor, expected: list[Any], /) -> bool: ...

class NgramIndex:
    def __init__(
        self, num_sequences: SupportsIndex, max_ngram: SupportsIndex = 4, min_ngram: SupportsIndex = 1
    ) -> None: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_ngram(self) -> int: ...
    @property
    def min_ngram(self) -> int: ...
    def append(self, sequence: SupportsIndex, tokens: NDArray[np.int64]) -> None: ...
    def append_batch(self, tokens: NDArray[np.int64], counts: NDArray[Any] | None = None) -> None: ...
    def add_corpus(self, tokens: NDArray[np.int64]) -> None: ...
    def truncate(self, sequence: SupportsIndex, length: SupportsIndex) -> None: ...
    def reset(self, sequence: SupportsIndex) -> None: ...
    def length(self, sequence: SupportsIndex) -> int: ...
    def propose(
        self,
        num_tokens: SupportsIndex,
        *,
        limits: NDArray[Any] | None = None,
        out: tuple[NDArray[np.int64], NDArray[np.int32]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
