"""What works on host data (numpy arrays): compiled where the package was built with a compiler, else pure Python.

Both implementations have the same API, results and error messages; `specdec_kernels/_host_py.py` documents them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

__all__ = ["COMPILED", "NgramIndex", "gumbel_noise"]

if TYPE_CHECKING:
    from specdec_kernels._host import NgramIndex, gumbel_noise

    COMPILED: bool
else:
    try:
        from specdec_kernels._host import NgramIndex, gumbel_noise

        COMPILED = True
    except ImportError as error:
        # A module that was never built is a reduced install; one that exists but does not load deserves a warning.
        if not isinstance(error, ModuleNotFoundError):
            warnings.warn(
                f"specdec_kernels._host does not load ({error}); the slower pure-Python n-gram index is used",
                RuntimeWarning,
                stacklevel=2,
            )
        from specdec_kernels._host_py import NgramIndex, gumbel_noise

        COMPILED = False
