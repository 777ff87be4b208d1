"""The command ``specdec``, outside the package, whose import takes seconds: Ctrl-C is one line there too."""

from __future__ import annotations

import sys
import traceback


def main() -> int:
    """`specdec_kernels.cli.main`; 130 on Ctrl-C, during its import too, and 2 where torch cannot be imported."""
    try:
        from specdec_kernels.cli import main as run
    except KeyboardInterrupt:
        print("specdec: stopped", file=sys.stderr)
        return 130
    except (ImportError, OSError) as error:  # a torch that is gone, or lacks a library
        print(f"specdec: the package cannot be imported: {error}", file=sys.stderr)
        return 2
    try:
        return run()
    except Exception:  # a fault of ours, or of a verifier that is audited: Python's status 1 would be a verdict
        traceback.print_exc()
        return 2
