"""The command ``specdec`` (or ``python -m specdec_kernels``, where Ctrl-C during imports ends in a traceback)."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__
from .commands import ended, reach
from .config import settings
from .options import FAILED, device

__all__ = ["main"]


class _Command(NamedTuple):
    run: Callable[[list[str]], int | None]
    help: str
    extra: str | None = None  # installs what it imports


def _backends(arguments: list[str]) -> None:
    from .backends import backends

    parser = argparse.ArgumentParser(prog="specdec backends", description=_COMMANDS["backends"].help)
    parser.add_argument("--device", type=device, default="cpu", help="where the tensors would be (default: cpu)")
    parser.add_argument(
        "--json", action="store_true", help='print {op: {backend: "yes" or the reason why not}} instead'
    )
    given = parser.parse_args(arguments)
    table = backends(given.device)
    print(json.dumps(table, indent=1) if given.json else table)


def _check(arguments: list[str]) -> int:
    from .audit import own
    from .backends import backends
    from .ops.verify_chain import verify_chain
    from .ops.verify_tree import verify_tree

    parser = argparse.ArgumentParser(prog="specdec check", description=_COMMANDS["check"].help)
    parser.add_argument("--device", type=device, default="cpu", help="where the tensors are (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print the distances as one JSON document instead")
    given = parser.parse_args(arguments)
    reach(given.device)
    table = backends(given.device)
    verifiers: dict[str, Callable[..., Any]] = {"verify_chain": verify_chain, "verify_tree": verify_tree}
    found = []
    slow = "triton" if given.device.startswith("cpu") else ""  # its interpreter: hours
    able = {op: [name for name, answer in table[op].items() if answer == "yes" and name != slow] for op in verifiers}
    if not any(able.values()):
        raise ValueError(f"--device must be one that a backend runs on, got {given.device}")
    told = sys.stderr if given.json else sys.stdout
    for row in own.check(verifiers, able, given.device):
        found.append(row)
        if not given.json or sys.stderr.isatty():
            why = f", which emits what the target cannot give (p = {row.impossible:.1e})" if row.impossible else ""
            verdict = "exact" if row.exact else f"FAILED in {row.case}" if row.failed else f"WRONG in {row.case!r}{why}"
            where = f"{row.backend:10}{row.op:14}{row.rule:11}"
            off = "" if row.failed else f", off by {row.distance:.1e}"
            print(f"{where}{row.cases:3} cases{off}: {verdict}", file=told, flush=True)
    if given.json:
        distances = [None if row.failed else row.distance for row in found]
        rows = [asdict(row) | {"distance": d, "exact": row.exact} for row, d in zip(found, distances, strict=True)]
        print(json.dumps(rows, indent=1))
    failed = sum(row.failed for row in found)
    wrong = sum(not row.exact for row in found) - failed
    if not given.json:
        print(_verdict(wrong, len(found) - failed, some_failed=failed > 0))
    return 1 if wrong else FAILED if failed else 0


def _verdict(wrong: int, computed: int, some_failed: bool) -> str:
    """The last line of ``specdec check``."""
    if not computed:
        return "none could be computed"
    those = f"the {computed} that could be computed" if some_failed else str(computed)
    if wrong:
        return f"{wrong} of {those} {'is' if wrong == 1 else 'are'} not the target's"
    return "every distribution is the target's" + (f", of {those}" if some_failed else "")


def _bench(arguments: list[str]) -> None:
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "bench/run.py").is_file():
        raise ValueError("the benchmarks are in the package's sources and are not installed; run it in a checkout")
    import torch

    sys.path.insert(0, str(checkout))
    with torch.inference_mode():
        importlib.import_module("bench.run").main(arguments)


def _of(module: str, *first: str) -> Callable[[list[str]], int | None]:
    """A command in a module that is imported when it is run; `first` are the leading arguments of its own `main`."""

    def run(arguments: list[str]) -> int | None:
        status: int | None = importlib.import_module(f".{module}", __package__).main([*first, *arguments])
        return status

    return run


_COMMANDS: dict[str, _Command] = {
    "env": _Command(_of("collect_env"), "a report on this machine and installation, to paste into a bug report"),
    "backends": _Command(_backends, "which backend runs which op, and why the others do not"),
    "check": _Command(_check, "whether every backend here gives the target's distribution, exactly; a minute", "audit"),
    "demo": _Command(_of("demo"), "a real language model with and without speculation, side by side", "transformers"),
    "generate": _Command(
        _of("demo.answer"), "a model answers a prompt, its tokens coloured by who wrote them", "transformers"
    ),
    "plan": _Command(
        _of("analysis.command", "plan"),
        "what speculation gains on a model and prompts, with which drafter and how many tokens",
        "analysis",
    ),
    "plot": _Command(_of("analysis.command", "plot"), "figures of theory, of a plan and of results", "analysis"),
    "audit": _Command(_of("audit.command"), "whether a verifier of yours is lossless, and if not, why", "audit"),
    "medusa": _Command(
        _of("medusa.command"), "train and calibrate heads that draft, or a small draft model", "transformers"
    ),
    "bench": _Command(_bench, "the ops against their peers on this machine (in a checkout)", "bench"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the command's name; those of the process by default.

    Returns
    -------
    int
        The exit status: 0 on success; 1 where `audit` or `check` found something that is not lossless; 2 where `audit`
        could run none of the cases or `check` not all of them, and after an expected error, which is one sentence on
        stderr; 130 on Ctrl-C. Bad options end the process with status 2, and so does any other exception, after its
        traceback, where `_specdec.main` catches it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the process that started us
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that it cannot encode must not lose an answer
        narrow = not sys.stdout.encoding.lower().startswith("utf")
        if sys.stdout.errors == "strict" or (narrow and sys.stdout.errors == "surrogateescape"):
            sys.stdout.reconfigure(errors="replace")
    listing = "\n".join(f"  {name:10}{command.help}" for name, command in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="specdec",
        description="Speculative decoding for PyTorch.",
        epilog=f"commands (each knows --help):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"specdec_kernels {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="command", nargs="?", help=", ".join(_COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="that command's own arguments")
    given = sys.argv[1:] if argv is None else list(argv)
    # This parser must not see the command's own arguments: it would take a "--" among them for its own.
    own = next((at for at, word in enumerate(given, 1) if not word.startswith("-")), len(given))
    chosen = parser.parse_args(given[:own])
    if chosen.command is None:
        parser.print_help(sys.stderr)
        parser.exit(FAILED)
    command = _COMMANDS[chosen.command]
    try:
        settings()
    except ValueError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return FAILED
    return ended(chosen.command, partial(command.run, given[own:]), command.extra)
