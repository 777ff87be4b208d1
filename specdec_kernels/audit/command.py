"""``specdec audit``: a verifier of the user's own, by its name."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from ..options import FAILED, POSITIVE
from .run import SAMPLES, audit
from .signatures import SIGNATURES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the audit and print its report.

    Returns
    -------
    int
        0 where the verifier is lossless, 1 where it is not, 2 where it served none of the cases.
    """
    parser = argparse.ArgumentParser(
        prog="specdec audit",
        description="Find out whether a verifier is lossless: its exact distribution in hard cases, and what is wrong.",
        epilog="\n\n".join(f"{name}\n{indent(inspect.getdoc(kind) or '', '  ')}" for name, kind in SIGNATURES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verifier", metavar="module:function", help="what to audit; a module beside you is found too")
    parser.add_argument("--signature", choices=SIGNATURES, default="plain", help="how it is called (default: plain)")
    parser.add_argument(
        "--drafter",
        metavar="module:function",
        help="the drafter that goes with it, for several steps: of chains alone, and not with --no-steps",
    )
    parser.add_argument("--cases", nargs="+", metavar="PART", help="only the cases whose name contains one of these")
    parser.add_argument(
        "--samples", type=POSITIVE, default=SAMPLES, help="where something is sampled (default: %(default)s)"
    )
    parser.add_argument("--no-steps", action="store_true", help="no loop of several steps")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(argv)
    if given.drafter is not None and (given.no_steps or SIGNATURES[given.signature].trees):
        beside = "--no-steps" if given.no_steps else f"--signature {given.signature}"
        parser.error(f"--drafter must be left out with {beside}: only several steps of chains call it")

    def progress(case: str) -> None:
        print(f"\r{case:60}", end="", file=sys.stderr, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # what the audited code prints is no part of the report
        try:
            verifier = _named(given.verifier)
            draft = None if given.drafter is None else _named(given.drafter)
        except (Exception, SystemExit) as error:  # whatever the module raises when it is imported
            parser.error(f"{type(error).__name__}: {error}")
        try:
            report = audit(
                verifier, given.signature, draft=draft, cases=given.cases, steps=not given.no_steps,
                samples=given.samples, progress=progress if sys.stderr.isatty() else None,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            parser.error(str(error))
        except SystemExit as error:  # of the audited code: its status would be a verdict
            audited = " or ".join(filter(None, (given.verifier, given.drafter)))
            parser.error(f"{audited} must return, and ended the process (SystemExit: {error})")
    if sys.stderr.isatty():
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    print(report.json() if given.json else report)
    return FAILED if not report.ran else 0 if report.lossless else 1


def _named(text: str) -> Callable[..., Any]:
    """What ``module:function`` names; of a class's method ``module:Class.method``."""
    module, colon, path = text.partition(":")
    if not colon:
        raise ValueError(f"a verifier is named module:function, got {text}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    made: Callable[..., Any] = found
    return made
