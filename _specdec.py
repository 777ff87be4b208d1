"""The command ``specdec``, outside the package, whose import takes seconds: Ctrl-C gives one line even then."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import traceback
from pathlib import Path


def main() -> int:
    """`specdec_kernels.cli.main`; 130 on Ctrl-C, during its import too, and 2 where the package cannot be imported.

    Even then ``specdec env`` reports, from its file alone.
    """
    try:
        try:
            from specdec_kernels.cli import main as run
        except Exception as error:  # most often a torch that is gone, or that lacks a library
            return _without_the_package(error)
    except KeyboardInterrupt:
        print("specdec: stopped", file=sys.stderr)
        return 130
    try:
        return run()
    except Exception:  # our fault, or that of a verifier being audited: Python's status 1 would be a verdict
        traceback.print_exc()
        return 2


def _without_the_package(error: Exception) -> int:
    command, *arguments = sys.argv[1:] or [""]
    spec = importlib.util.find_spec("specdec_kernels") if command == "env" else None
    for folder in (spec and spec.submodule_search_locations) or ():
        return subprocess.run([sys.executable, str(Path(folder, "collect_env.py")), *arguments]).returncode
    if isinstance(error, (ImportError, OSError)):
        print(f"specdec: the package cannot be imported: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 2


if __name__ == "__main__":
    sys.exit(main())
