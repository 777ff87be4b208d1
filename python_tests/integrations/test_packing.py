"""Packed linear layers: the plain result up to rounding, the same bits at every row count, and no trace afterwards."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import specdec_kernels as sk
from python_tests.decoding.models import prompts, tiny
from specdec_kernels.integrations.transformers import packing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 160), nn.Linear(160, 33, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


@torch.inference_mode()
def test_the_plain_result_and_the_same_bits_at_every_row_count() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 20, 96)
    plain, rows = net(x), x.flatten(0, 1)
    with sk.pack_linear_weights(net) as packed:
        assert packed.num_layers == 2 and packing.is_packed(net)
        whole = net(x)
        torch.testing.assert_close(whole, plain, atol=1e-5, rtol=1e-5)
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 24):
            assert torch.equal(net(rows[:count]), whole.flatten(0, 1)[:count]), count
    assert torch.equal(net(x), plain)
    assert not packing.is_packed(net) and all("forward" not in vars(m) for m in net.modules())
    packed.undo()


@torch.inference_mode()
def test_other_inputs_and_autocast_are_the_plain_layers() -> None:
    net, x = Net(), torch.randn(3, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = net(x)
    with sk.pack_linear_weights(net), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(net(x), cast) and cast.dtype == torch.bfloat16
    with sk.pack_linear_weights(net), pytest.raises(RuntimeError, match="dtype"):
        net(x.double())
    plain = copy.deepcopy(net).bfloat16()(x.bfloat16())
    with sk.pack_linear_weights(net):
        assert torch.equal(net.bfloat16()(x.bfloat16()), plain)  # also of layers with a bias


def test_a_packed_model_is_not_pickled() -> None:
    net = Net()
    with (
        sk.pack_linear_weights(net),
        pytest.raises(TypeError, match="layers must be put back .PackedWeights.undo. before a model is pickled"),
    ):
        pickle.dumps(net)
    assert pickle.loads(pickle.dumps(net)).second.weight.equal(net.second.weight)


def test_what_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="weights must be float32 on the CPU, got torch.bfloat16 on cpu"):
        sk.pack_linear_weights(Net().bfloat16())
    net = Net()
    with sk.pack_linear_weights(net), pytest.raises(ValueError, match="this Net is packed already; undo that first"):
        sk.pack_linear_weights(net)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this build of torch has no oneDNN"):
        sk.pack_linear_weights(net)


def test_leaving_a_block_after_packing_anew_leaves_the_new_packing_alone() -> None:
    net = Net()
    with sk.pack_linear_weights(net) as first:
        first.undo()
        second = sk.pack_linear_weights(net)
    assert packing.is_packed(net)
    second.undo()
    assert not packing.is_packed(net)


@torch.inference_mode()
def test_a_forward_that_someone_replaced_stays() -> None:
    net, x = Net(), torch.ones(2, 96)
    net.second.forward = lambda hidden: hidden[..., :1] * 0 + 7  # type: ignore[method-assign]
    with sk.pack_linear_weights(net) as packed:
        assert packed.num_layers == 1 and (net(x) == 7).all()
    assert (net(x) == 7).all()


def test_an_interrupt_leaves_no_half_packed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    net, real, calls = Net(), packing._PackedForward, []

    def second_fails(layer: nn.Linear) -> object:
        calls.append(layer)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(layer)

    monkeypatch.setattr(packing, "_PackedForward", second_fails)
    with pytest.raises(KeyboardInterrupt):
        sk.pack_linear_weights(net)
    assert not packing.is_packed(net) and all("forward" not in vars(m) for m in net.modules())


def test_generate_with_packed_weights() -> None:
    target, draft = tiny("llama", 1), tiny("llama", 2)
    ids, mask = prompts(3, 9, 6)
    kw = {"attention_mask": mask, "acceptance": "match", "seeds": torch.arange(3), "max_new_tokens": 30}
    with sk.pack_linear_weights(target):
        plain = sk.generate(target, ids, drafter=sk.NoDrafter(), **kw)
        for drafter in (sk.NgramDrafter(2), sk.ModelDrafter(draft)):
            assert torch.equal(sk.generate(target, ids, drafter=drafter, **kw).tokens, plain.tokens)


@torch.inference_mode()
def test_a_copy_has_its_own_weights() -> None:
    net, x = Net(), torch.randn(3, 96)
    with sk.pack_linear_weights(net):
        other = copy.deepcopy(net)
        other.second.weight.mul_(-1)
        assert not packing.is_packed(other)
        plain = other.second(net.first(x).relu())
    assert torch.equal(
        other(x),
        nn.functional.linear(
            nn.functional.linear(x, other.first.weight, other.first.bias).relu(), other.second.weight, other.second.bias
        ),
    )
    torch.testing.assert_close(other(x), plain, atol=1e-5, rtol=1e-5)
    with sk.pack_linear_weights(other) as packed:
        assert packed.num_layers == 2
        torch.testing.assert_close(other(x), plain, atol=1e-5, rtol=1e-5)
        packed.undo()
