"""Atomic writes: a file is either complete or unchanged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file that replaces `path` once it is complete.

    Raises
    ------
    OSError
        It could not be written: a full disk, no such folder. What was at `path` is as it was.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        safetensors = sys.modules.get("safetensors")  # loaded if `write` uses it
        refused = (RuntimeError, *([safetensors.SafetensorError] if safetensors else []))
        if isinstance(error, refused):  # what they raise when the system refuses the write
            raise OSError(f"{path} could not be written: {str(error).partition(chr(10))[0]}") from error
        raise
