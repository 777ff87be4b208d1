"""Which releases of transformers the plug-in knows the inside of, and where they differ."""

from __future__ import annotations

import transformers

OLDEST, NEWEST = (5, 17), (5, 24)
"""The first and the last minor version whose assisted generation has been read and is tested."""


def found() -> tuple[int, ...]:
    """The minor version that is installed."""
    return tuple(int(part) for part in transformers.__version__.split(".")[:2])


CACHE = "cache" if found() >= (5, 24) else "past_key_values"
"""What models call the key-value cache among their arguments, and in what they return."""


def check_version(caller: str) -> None:
    """Raise for an unknown version of transformers.

    Raises
    ------
    ImportError
        Its version lies outside `OLDEST` … `NEWEST`; begins with `caller`.
    """
    if not OLDEST <= found() <= NEWEST:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ImportError(f"{caller}: transformers must be {oldest} … {newest}, got {transformers.__version__}")
