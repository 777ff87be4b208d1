"""The command ``specdec`` (or ``python -m specdec_kernels``)."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from .config import settings

__all__ = ["main"]


def _env(arguments: list[str]) -> int:
    from . import collect_env

    argparse.ArgumentParser(prog="specdec env", description=_COMMANDS["env"][1]).parse_args(arguments)
    return collect_env.main()


def _backends(arguments: list[str]) -> int:
    from .backends import backends

    parser = argparse.ArgumentParser(prog="specdec backends", description=_COMMANDS["backends"][1])
    parser.add_argument("--device", default="cpu", help="where the tensors would be, as cpu or cuda:0 (default: cpu)")
    device = parser.parse_args(arguments).device
    try:
        table = backends(device)
    except ValueError as error:
        parser.error(str(error).splitlines()[0])
    print(table)
    return 0


def _demo(arguments: list[str]) -> int:
    from . import demo

    return demo.main(arguments)


def _of_extra(extra: str, *command: str) -> Callable[[list[str]], int]:
    """A command of a folder whose needs only an extra installs: the folder, and what its own `main` is told first."""

    def run(arguments: list[str]) -> int:
        folder, *first = command
        try:
            module = importlib.import_module(f".{folder}.command", __package__)
        except ImportError as error:
            name = first[0] if first else folder
            install = f"the '{extra}' extra (pip install 'specdec_kernels[{extra}]')"
            print(f"{name} needs {install}: {error}", file=sys.stderr)
            return 1
        return int(module.main([*first, *arguments]))

    return run


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "env": (_env, "a report on this machine and installation, to paste into a bug report"),
    "backends": (_backends, "which backend runs which op, and why the others do not"),
    "demo": (_demo, "a real language model with and without speculation, side by side"),
    "plan": (
        _of_extra("analysis", "analysis", "plan"),
        "what speculation gains on a model and prompts, with which drafter and how many tokens",
    ),
    "plot": (_of_extra("analysis", "analysis", "plot"), "figures of theory, of a plan and of results"),
    "audit": (_of_extra("audit", "audit"), "whether a verifier of yours is lossless, and if not, why"),
    "medusa": (_of_extra("transformers", "medusa"), "train and calibrate heads that draft"),
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
        The exit status: 0 on success, 2 for a bad environment variable, 130 on Ctrl-C.
    """
    listing = "\n".join(f"  {name:10}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="specdec",
        description="Speculative decoding for PyTorch.",
        epilog=f"commands (each knows --help):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="command", help=", ".join(_COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="that command's own arguments")
    chosen = parser.parse_args(argv)
    run, _ = _COMMANDS[chosen.command]
    try:
        settings()
    except ValueError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return 2
    try:
        return run(chosen.arguments)
    except KeyboardInterrupt:
        print("specdec: stopped", file=sys.stderr)
        return 130
