"""The command ``specdec``, outside the package, whose import takes seconds: Ctrl-C is one line there too."""

from __future__ import annotations

import sys


def main() -> int:
    """`specdec_kernels.cli.main`; 130 on Ctrl-C, during its import too."""
    try:
        from specdec_kernels.cli import main as run
    except KeyboardInterrupt:
        print("specdec: stopped", file=sys.stderr)
        return 130
    return run()
