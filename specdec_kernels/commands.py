"""Shared by the commands: how they end, and how their model is loaded."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import assets
from .assets.model import lacks_memory
from .integrations.transformers.models import same_vocabulary
from .integrations.transformers.packing import has_onednn, pack_linear_weights
from .options import FAILED, THREADS, device, existing

__all__ = [
    "add_model_options", "add_target", "add_threads", "check_utf8", "ended", "load", "load_draft", "load_target",
    "model_name", "reach", "read_text",
]  # fmt: skip


def ended(name: str, run: Callable[[], int | None], extra: str | None = None) -> int:
    """Run a command to its end; what may be expected to go wrong is one sentence on stderr.

    Parameters
    ----------
    name : str
        The command's, which the sentence begins with.
    run : callable
        Returns the exit status, or None for 0.
    extra : str, optional
        Of the package, which installs what the command imports.

    Returns
    -------
    int
        What `run` returned: 1 is a verdict's "no". 2 after such an error, or where the reader of our output has gone;
        130 on Ctrl-C. Any other exception is a fault of ours, and raised: `_specdec.main` shows it and ends with 2.
    """
    try:
        status = run()
        sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `... | head`
        sys.stdout = None  # else the interpreter complains once more at exit
        return FAILED
    except ImportError as error:
        needs = f"needs the '{extra}' extra (pip install 'specdec_kernels[{extra}]'): "
        reason = f"{needs if extra else ''}{error}"
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else str(error)
    except (assets.AssetError, ValueError, MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error) or "out of memory"
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        reason = "out of memory"
    print(f"{name}: {reason.removeprefix(f'{name}: ')}", file=sys.stderr)
    return FAILED


def read_text(path: Path) -> str:
    """A file's text; ValueError, by its name, where that is not UTF-8, or the file is a folder."""
    if path.is_dir():
        raise ValueError(f"{path} must be a file, got a folder")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8: {error}") from error


def check_utf8(name: str, text: str) -> None:
    """ValueError, by its `name`, for a text that UTF-8 does not have and tokenizers do not take: half of a surrogate
    pair. Python reads bytes that are no UTF-8 as such, and JSON may have them.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{name} must be UTF-8, got other bytes")


def add_target(parser: argparse.ArgumentParser) -> None:
    """``--model``, which `load_target` and `model_name` read."""
    parser.add_argument(
        "--model", type=existing, help="a transformers folder of a decoder (default: the demo's SmolLM2-135M)"
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """``--threads``, which `load_target` reads."""
    parser.add_argument("--threads", type=THREADS, help="threads for torch (default: its own choice)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that `load` and `load_draft` read, and those of drafters."""
    add_target(parser)
    parser.add_argument("--draft-model", type=existing, help="a transformers folder: a smaller model that drafts")
    parser.add_argument("--heads", type=existing, help="Medusa heads, a file (for the demo's model: those shipped)")
    parser.add_argument("--device", type=device, default="cpu", help="where the model runs, as cpu or cuda:0")
    parser.add_argument(
        "--unpacked", action="store_true", help="leave the weights as they are (see pack_linear_weights)"
    )
    add_threads(parser)


def model_name(arguments: argparse.Namespace) -> str:
    """What reports and files call the model of ``--model``."""
    return assets.MODEL_NAME if arguments.model is None else arguments.model.resolve().name


def load_target(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer as they are; from here on torch has the threads that were asked for."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return assets.load_model() if arguments.model is None else assets.load_folder(arguments.model)


def load(arguments: argparse.Namespace) -> tuple[Any, Any, bool]:
    """The model on its device, its tokenizer, and whether its weights are packed, as the options say.

    Raises
    ------
    AssetError, ValueError
        A model that is not there or cannot be read; a device that is not there.
    """
    reach(arguments.device)
    model, tokenizer = load_target(arguments)
    model.to(arguments.device)
    packs = not arguments.unpacked and model.device.type == "cpu" and model.dtype == torch.float32 and has_onednn()
    if packs:
        pack_linear_weights(model)
    return model, tokenizer, packs


def load_draft(arguments: argparse.Namespace, target: Any, tokenizer: Any) -> Any:
    """The model of ``--draft-model`` on its device; None without one. Raises as `load` does.

    Where it pads the `target`'s vocabulary differently, it drafts the ids that both have.
    """
    if arguments.draft_model is None:
        return None
    model, own = assets.load_folder(arguments.draft_model)
    sizes = [each.config.get_text_config().vocab_size for each in (target, model)]
    if sizes[0] != sizes[1] and same_vocabulary(own, tokenizer):
        model.config.draft_token_ids = getattr(model.config, "draft_token_ids", None) or list(range(min(sizes)))
    return model.to(arguments.device)


def reach(device: str) -> None:
    """ValueError where nothing can be computed there."""
    try:
        reached = torch.zeros(1, device=device).tolist() == [0.0]
    except (ImportError, RuntimeError, AssertionError, NotImplementedError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"--device must be usable here, got {device}: {why}") from error
    if not reached:
        raise ValueError(f"--device must be usable here, got {device}")
