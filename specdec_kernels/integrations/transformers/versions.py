"""Which releases of transformers the plug-in knows the inside of."""

from __future__ import annotations

import transformers

OLDEST, NEWEST = (5, 17), (5, 23)
"""The first and the last minor version whose assisted generation has been read and is tested."""


def check_version(caller: str) -> None:
    """Raise for a transformers that is not known.

    Raises
    ------
    ImportError
        Its version lies outside `OLDEST` … `NEWEST`; begins with `caller`.
    """
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ImportError(f"{caller}: transformers must be {oldest} … {newest}, got {transformers.__version__}")
