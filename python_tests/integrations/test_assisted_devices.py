"""What is made within transformers lies on the model's device: on a GPU what lay on the CPU would end in an error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import specdec_kernels as sk
from python_tests.decoding.models import near, prompts, tiny
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.integrations.transformers import assisted, assisted_generation, generate

OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_new_tokens": {"min_new_tokens": 6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 9]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda b, ids: list(range(2, 40))},
    "sampled": {"repetition_penalty": 1.2, "do_sample": True, "temperature": 0.8, "top_k": 20},
    "scores": {"repetition_penalty": 1.2, "return_dict_in_generate": True, "output_scores": True},
}
PACKAGE = Path(sk.__file__).parent
WAYS = ("assistant", "lookup", "tree")


class Elsewhere(TorchFunctionMode):
    """What the package makes without a word on where lies on meta, as beside a model on a GPU it would on the CPU."""

    made = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = Path(sys._getframe(1).f_code.co_filename).is_relative_to(PACKAGE)
        if func in _device_constructors() and ours and kwargs.get("device") is None:
            self.made += 1
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def test_the_mode_sees_what_the_package_makes() -> None:
    with Elsewhere() as mode:
        torch.arange(3)
        sk.TokenMap(torch.tensor([1, 2]))
        assert mode.made == 0
        exec(compile("import torch\nmade = torch.arange(3)", str(PACKAGE / "y.py"), "exec"), found := {})
        assert mode.made == 1 and found["made"].device.type == "meta"


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_processors_are_asked_on_the_models_device(way: str, name: str) -> None:
    model, (ids, _) = tiny("llama"), prompts(7)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **OPTIONS[name]}
    if way == "assistant":
        options["assistant_model"] = near("llama", 1, 0.05)
    else:
        drafter = sk.NgramDrafter() if way == "lookup" else sk.NgramTreeDrafter(num_nodes=6)
        options |= {"custom_generate": generate, "drafter": drafter}

    def generated() -> torch.Tensor:
        torch.manual_seed(3)
        with assisted_generation() if way == "assistant" else contextlib.nullcontext():
            out = model.generate(ids, **options)
        return out if isinstance(out, torch.Tensor) else out.sequences

    expected = generated()
    with Elsewhere():
        assert torch.equal(generated(), expected)


def test_ids_elsewhere_than_the_model_are_refused_beside_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain generation moves logits to the ids' device before processors see them; here they would see the model's."""
    runner = as_runner(tiny("llama"), "test")
    runner.device = torch.device("cuda:0")
    monkeypatch.setattr(assisted, "as_runner", lambda *given, **more: runner)
    with pytest.raises(ValueError, match="input_ids must be on cuda:0 beside processors, got cpu"):
        tiny("llama").generate(
            prompts(7)[0], custom_generate=generate, drafter=sk.NgramDrafter(), repetition_penalty=1.2, max_new_tokens=3
        )
