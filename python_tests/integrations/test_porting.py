"""What docs/porting.md says of another package's functions: what each becomes here, and what differs on purpose."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.integrations import flashinfer, sglang
from specdec_kernels.integrations.transformers import speculative_sampling

BATCH, VOCAB = 64, 23
SEEDS, OFFSETS = torch.arange(BATCH), torch.arange(BATCH) * 3
LOGITS = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
PROBS = LOGITS.softmax(-1)
SEEDED: dict[str, Any] = {"seed": SEEDS, "offset": OFFSETS}


def uniforms(num: int = 1) -> Tensor:
    return sk.uniform_samples(SEEDS, OFFSETS, num, "sample")


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("sampling_from_logits", {}),
        ("sampling_from_probs", {}),
        ("top_k_sampling_from_probs", {"top_k": 5}),
        ("top_p_sampling_from_probs", {"top_p": 0.7}),
        ("min_p_sampling_from_probs", {"min_p": 0.2}),
        ("top_k_top_p_sampling_from_logits", {"top_k": 5, "top_p": 0.7}),
        ("top_k_top_p_sampling_from_probs", {"top_k": 5, "top_p": 0.7}),
    ],
)
def test_flashinfer_s_draws_are_sample(name: str, cuts: dict[str, Any]) -> None:
    """With these uniforms the same tokens; `indices` are its rows."""
    draw, given = getattr(flashinfer, name), LOGITS if name.endswith("logits") else PROBS
    params, u = sk.SamplingParams(**cuts), uniforms()[:, 0]
    assert torch.equal(draw(given, *cuts.values(), **SEEDED), sk.sample(LOGITS, params, uniform_samples=u).token.int())
    rows = torch.arange(BATCH) % 3
    expected = sk.sample(LOGITS, params, row_index=rows, uniform_samples=u).token
    assert torch.equal(draw(given, *cuts.values(), indices=rows, **SEEDED), expected)


def test_flashinfer_s_other_functions() -> None:
    for temperature in (0.0, 0.6, torch.rand(BATCH) + 0.1):
        expected = sk.warp_probs(LOGITS, sk.SamplingParams(temperature))
        assert torch.equal(flashinfer.softmax(LOGITS, temperature), expected)
    masked = LOGITS.clone()
    sk.mask_logits_(masked, sk.SamplingParams(top_k=5))
    assert torch.equal(flashinfer.top_k_mask_logits(LOGITS, 5), masked)
    joint, cut = flashinfer.top_k_top_p_sampling_from_logits, LOGITS.clone()
    sk.mask_logits_(cut, sk.SamplingParams(top_p=0.6))
    expected = sk.sample(cut, sk.SamplingParams(top_k=3), uniform_samples=uniforms()[:, 0]).token
    assert torch.equal(joint(LOGITS, 3, 0.6, filter_apply_order="joint", **SEEDED), expected.int())
    target, draft = PROBS.repeat_interleave(4, 0).view(BATCH, 4, VOCAB).roll(1, 0), PROBS[:, None].expand(-1, 3, -1)
    drafted = draft[:, 0].multinomial(3, generator=torch.Generator().manual_seed(1))
    tokens, _, emitted = flashinfer.chain_speculative_sampling(draft, drafted, target, **SEEDED)
    out = sk.verify_chain(target.log(), drafted, draft.log(), uniform_samples=uniforms(4))
    assert torch.equal(tokens, out.tokens.int()) and torch.equal(emitted, out.num_accepted)


def test_temperatures_of_flashinfer_s_softmax() -> None:
    """At 0 the likeliest id, of ties the first; integers are numbers like others."""
    logits = torch.tensor([[1.0, 3.0, 3.0]] * 2)
    for none in (0, 0.0, torch.zeros(2), torch.zeros(2, dtype=torch.int64)):
        assert flashinfer.softmax(logits, none).tolist() == [[0.0, 1.0, 0.0]] * 2
    two = flashinfer.softmax(logits, torch.tensor([2, 1]))
    assert torch.equal(two, flashinfer.softmax(logits, torch.tensor([2.0, 1.0])))
    with pytest.raises(ValueError, match=r"^softmax: temperature must be finite and >= 0, got -1"):
        flashinfer.softmax(logits, -1.0)


def test_every_tie_at_a_border_is_kept() -> None:
    probs = torch.tensor([[0.1, 0.3, 0.3, 0.3]])
    assert flashinfer.top_k_mask_logits(probs, 1).isfinite().tolist() == [[False, True, True, True]]
    for cut in (flashinfer.top_k_renorm_probs(probs, 2), flashinfer.top_p_renorm_probs(probs, 0.5)):
        torch.testing.assert_close(cut, torch.tensor([[0.0, 1 / 3, 1 / 3, 1 / 3]]))
    rows = torch.zeros(300, dtype=torch.int64)
    for draw, cuts in (
        (flashinfer.top_k_sampling_from_probs, (1,)), (flashinfer.top_p_sampling_from_probs, (0.2,)),
        (flashinfer.top_k_top_p_sampling_from_probs, (2, 0.2)),
    ):  # fmt: skip
        assert draw(probs, *cuts, indices=rows).unique().tolist() == [1, 2, 3]


def test_what_flashinfer_s_newer_tests_expect_otherwise() -> None:
    """Top-p is reached with 4e-6 of it less; of two logits of 1e30 both are drawn."""
    for less, kept in ((3e-6, 2), (5e-6, 3)):
        probs = torch.tensor([[0.5 - less / 2, 0.3 - less / 2, 0.2 + less]], dtype=torch.float64)
        assert int((flashinfer.top_p_renorm_probs(probs, 0.8) > 0).sum()) == kept
    two, rows = torch.tensor([[1e30, 0.0, 1e30]]), torch.zeros(2000, dtype=torch.int64)
    drawn = flashinfer.sampling_from_logits(two, rows, generator=torch.Generator().manual_seed(0))
    assert torch.bincount(drawn, minlength=3)[1] == 0 and 900 < int((drawn == 0).sum()) < 1100


def outputs(batch: int, nodes: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((batch * nodes,), -1, dtype=torch.int32),
        torch.full((batch, room), -1, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
    )


def chain(draft: Tensor, token: int, target: Tensor, **options: Any) -> tuple[int, int]:
    """How many of one drafted token SGLang's function accepts with coins of 0.5, and the first token after it."""
    made, index = outputs(1, 2, 2), torch.arange(2)[None]
    sglang.chain_speculative_sampling_triton(
        *made, torch.tensor([[9, token]]), index, index, index, torch.full((1, 1), 0.5), torch.full((1,), 0.5),
        target.expand(1, 2, -1), draft.expand(1, 1, -1), **options,
    )  # fmt: skip
    return int(made[2]), int(made[0][0])


def test_a_draft_token_that_cannot_have_been_drawn_ends_the_draft() -> None:
    """In the functions of every package; what comes then has the target's distribution."""
    target = torch.tensor([0.2, 0.7, 0.1])
    for draft in (torch.tensor([0.5, 0.0, 0.5]), torch.tensor([0.2, 0.2, 0.2])):  # of the token 0; of 0.6 in all
        for block in (False, True):
            assert chain(draft, 1, target, block_verification=block) == (0, 1)
        batch = 4000
        ids, q = torch.ones(batch, 1, dtype=torch.int64), draft.expand(batch, 1, -1)
        tokens, _, emitted = flashinfer.chain_speculative_sampling(
            q, ids, target.expand(batch, 2, -1), generator=torch.Generator().manual_seed(0)
        )
        assert not emitted.any() and tokens[:, 1].eq(-1).all()
        shares = torch.bincount(tokens[:, 0], minlength=3) / batch
        torch.testing.assert_close(shares, target, atol=0.04, rtol=0)
    # here a draft is logits, of which no row sums to anything but 1
    q = torch.tensor([[[0.0, -torch.inf, 0.0]]])
    assert int(speculative_sampling(torch.tensor([[0, 1]]), q, 1, target.log().expand(1, 2, -1))[1]) == 0


def test_a_draft_s_probability_that_rounds_above_1_is_1() -> None:
    draft = torch.tensor([0.0, 1.0 + 2.0**-22, 0.0])
    for block in (False, True):
        assert chain(draft, 1, torch.tensor([0.2, 0.7, 0.1]), block_verification=block)[0] == 1


def test_where_sglang_s_functions_have_nothing_left_to_draw_from() -> None:
    """The target's own distribution, or what is usable in a row that is none: not the vocabulary's end."""
    for block in (False, True):
        options = {"block_verification": block}
        assert chain(torch.tensor([0.5, 0.5, 0.0]), 2, torch.tensor([0.6, 0.4, 0.0]), **options) == (0, 0)
        for broken in ([0.0, torch.nan, 0.0], [0.0, 1.0, torch.nan], [-1.0, 1.0, 0.0]):
            _, token = chain(torch.tensor([1.0, 0.0, 0.0]), 0, torch.tensor(broken), **options)
            assert token != 2 and 0 <= token


def test_sglang_s_functions_of_trees() -> None:
    """The greedy one is `verify_tree`; links are a `DraftTree`'s."""
    rng, batch, nodes, vocab = random.Random(0), 60, 7, 3
    parents = [[-1, *(rng.randrange(max(0, n - 3), n) for n in range(1, nodes))] for _ in range(batch)]
    tree = sk.DraftTree(torch.tensor(parents), 6)
    first, sibling = tree.first_child, tree.next_sibling
    tokens = torch.randint(vocab, (batch, nodes), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(batch, nodes, vocab, generator=torch.Generator().manual_seed(1))
    index = torch.arange(batch * nodes).view(batch, nodes)
    predicts, accept_index, accept_token_num = outputs(batch, nodes, nodes)
    sglang.verify_tree_greedy(
        predicts, accept_index, accept_token_num, tokens, index, first, sibling, logits.argmax(-1)
    )
    out = sk.verify_tree(logits, tree, tokens, acceptance="greedy")
    assert torch.equal(accept_token_num, out.num_accepted) and len(out.num_accepted.unique()) > 2
    assert out.accepted_nodes is not None
    for b, num in enumerate(out.num_accepted.tolist()):
        path = [0, *out.accepted_nodes[b, :num].tolist()]
        assert accept_index[b, : num + 1].tolist() == index[b, path].tolist()
        assert predicts[index[b, path]].tolist() == out.tokens[b, : num + 1].tolist()
    assert torch.equal(sk.DraftTree.from_links(first, sibling, 6).parents, tree.parents)
    masks = sk.DraftTree.from_mask(tree.ancestors(), 6)
    assert torch.equal(masks.first_child, first) and torch.equal(masks.next_sibling, sibling)


def test_how_large_sglang_s_trees_may_be() -> None:
    """Chains of so many nodes, all right: 64 of them are accepted."""
    for nodes in (1024, 1025):
        tokens, index = torch.zeros(1, nodes, dtype=torch.int64), torch.arange(nodes)[None]
        links, none = torch.cat([index[:, 1:], torch.tensor([[-1]])], 1), torch.full_like(index, -1)
        made = outputs(1, nodes, 80)
        verify = functools.partial(sglang.verify_tree_greedy, *made, tokens, index, links, none, tokens)
        if nodes == 1024:
            verify()
            assert made[2].tolist() == [64] and made[1][0, :66].tolist() == [*range(65), -1]
        else:
            with pytest.raises(ValueError, match="1 <= num_nodes <= 1024"):
                verify()


@pytest.mark.parametrize("weight", [None, 0.7])
def test_transformers_s_function_is_verify_chain(weight: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, num = torch.Generator().manual_seed(3), 3
    for _ in range(40):
        drafted, u = torch.randint(5, (1, num), generator=rng), torch.rand(1, num + 1, generator=rng).double()
        p, q = (torch.randn(1, n, 5, generator=rng) for n in (num + 1, num))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *_, u=u, **__: u)
            valid, matches = speculative_sampling(drafted, q, num, p, assistant_ensemble_weight=weight)
        verify = functools.partial(sk.verify_chain, uniform_samples=u)
        if weight is None:
            out = verify(p, drafted, q)
        else:
            rows = p.softmax(-1)
            mixed = torch.cat([weight * rows[:, :-1] + (1 - weight) * q.softmax(-1), rows[:, -1:]], 1)
            out = verify(None, drafted, target_probs=mixed, draft_probs=q.softmax(-1))
        assert valid[0].tolist() == out.tokens[0, : int(out.num_tokens[0])].tolist()
        assert int(matches) == int(out.num_accepted[0])
