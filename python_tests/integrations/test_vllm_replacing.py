"""Where the plug-in for vLLM puts its functions, and what it hands on to vLLM's own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from specdec_kernels.integrations.vllm import replacing, v1, v2


def stock(*given: Any, **named: Any) -> Any:
    return given, named


def test_v2_replaces_a_function_where_it_is_and_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a module that is imported later has the replaced one."""
    modules = {name: ModuleType(name) for name in (*v2.VERIFY, *v2.DRAW_DRAFTS)}
    for name, module in modules.items():
        vars(module).update(rejection_sample=stock, gumbel_sample=stock)
        monkeypatch.setitem(sys.modules, f"{v2.FOLDER}.{name}", module)
    v2.patch()
    where_it_is, where_it_is_used = (modules[name] for name in v2.VERIFY)
    for module in (where_it_is, where_it_is_used):
        assert module.rejection_sample.__specdec__ and module.rejection_sample.__wrapped__ is stock
    vars(where_it_is_used).update(rejection_sample=where_it_is.rejection_sample)
    v2.patch()
    assert where_it_is_used.rejection_sample.__wrapped__ is stock


def test_arguments_that_are_not_known_are_handed_on() -> None:
    """By place as by name: a version may have more than these."""
    for make, known in ((v1.make_rejection_sample, 11), (v2.make_rejection_sample, 15)):
        for more, named in (
            ((0, 0.3), {}), ((), {"fly_window_size": 4, "fly_entropy_threshold": 0.3}), ((), {"num_rejected": 0}),
        ):  # fmt: skip
            given = [None] * known + list(more)
            assert make(stock)(*given, **named) == (tuple(given), named)


def test_options_that_ask_for_nothing_are_known() -> None:
    """So that a version that always names them is served."""
    off = {"fly_window_size": 0, "fly_entropy_threshold": 0.3, "watermarking_skip_mask": object(), "new": None}
    assert not replacing.is_unknown((None, False), {**off, "newer": False})
    assert replacing.is_unknown((), {**off, "new": 0}) and replacing.is_unknown((0,), {})


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="sampler must have rejection_sample, and has none in this version of vLLM"):
        replacing.replace(ModuleType("sampler"), "rejection_sample", lambda stock: stock)
