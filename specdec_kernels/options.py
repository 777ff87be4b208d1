"""Argparse types of the commands' options: numbers within ranges, and existing paths."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

FAILED = 2
"""A command's exit status after an error, as in argparse, grep and diff; 1: what was checked is not as it should be."""


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, if it has one that the help does not name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        named = action.default is None or action.default is False or "(default" in (action.help or "")
        return action.help if named else super()._get_help_string(action)


def integer(lowest: int, highest: int) -> Callable[[str], int]:
    """An argparse type for an integer in ``[lowest, highest]``; any other text is refused in one sentence."""

    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) < 100 else highest + 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text[:30]!r}") from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be in [{lowest}, {highest}], got {text[:30]}")
        return value

    return parse


def number(lowest: float, highest: float) -> Callable[[str], float]:
    """An argparse type for a number in ``[lowest, highest]``; any other text is refused in one sentence."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text[:30]!r}") from None
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be in [{lowest:g}, {highest:g}], got {text[:30]}")
        return value

    return parse


COUNT = integer(0, 2**31 - 1)
POSITIVE = integer(1, 2**31 - 1)
LENGTH = integer(1, 64)
THREADS = integer(1, 1024)
SEED = integer(0, 2**63 - 1)
TEMPERATURE = number(0, 3.4e38)
SHARE = number(0, 1)
SECONDS = number(0, 1e12)


def existing(text: str) -> Path:
    """An argparse type for the path of an existing file or folder."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"must be a file or folder that is there, got {text}")
    return path


def device(text: str) -> str:
    """An argparse type for a device's name; whether the device exists shows when it is used."""
    try:
        torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be a device: cpu, cuda:0, …, got {text[:30]!r}") from None
    return text


def fill(
    parser: argparse.ArgumentParser, given: argparse.Namespace, usual: Mapping[str, Any], quick: Mapping[str, Any]
) -> None:
    """Give options that are None their `usual` values, with ``--quick`` those of `quick`; it refuses any that were
    given.
    """
    for name, value in (quick if given.quick else usual).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
        elif given.quick:
            parser.error(f"--quick chooses --{name} and must be given without it")


def draft_length(text: str) -> int | str:
    """An argparse type for draft tokens a step: an integer in [1, 64], or "auto"."""
    return text if text == "auto" else LENGTH(text)
