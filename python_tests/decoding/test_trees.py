"""Decoding with trees of drafts: the tokens and the law of plain decoding, and trees that are what they should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.fake_cuda import both, same
from python_tests.decoding.models import VOCAB, TableRunner, near, prompts, tiny
from python_tests.decoding.tree_models import (
    TOKENS,
    TREE,
    Fixed,
    TreeTable,
    decode,
    exact_law,
    frequencies,
    medusa,
    target,
)
from specdec_kernels.analysis.measured import watch
from specdec_kernels.decoding import DecodingState, Provenance
from specdec_kernels.decoding.request import Request
from specdec_kernels.decoding.state import Speculation
from specdec_kernels.decoding.step import verify_step
from specdec_kernels.drafters import Draft, Drafter, TreeDrafter
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.integrations.transformers.versions import CACHE
from specdec_kernels.medusa import MedusaHeads
from specdec_kernels.ops.arguments import ACCEPTANCES

FAMILIES = ("llama", "gpt2", "gemma2", "mistral")  # gemma2's and, here, mistral's attention sees a window


WRONG_TREES: dict[str, tuple[Any, str]] = {
    "wide": (lambda x, h: (torch.nn.functional.pad(x, (0, 9)), h), r"logits must be \[batch=3, n=\d+, vocab_size=23\]"),
    "logits alone": (lambda x, h: x, r"logits must come with hidden states or None, as a pair, got \[3, \d+, 23\]"),
    "nothing": (lambda x, h: None, "logits must come with hidden states or None, as a pair, got NoneType"),
    "hidden": (lambda x, h: (x, h[..., 1:]), r"hidden must be \[batch=3, num_nodes=\d+, hidden_size=5\]"),
    "no hidden": (lambda x, h: (x, None), "hidden must be a tensor, got NoneType"),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@pytest.mark.parametrize("whose", ["the target's", "the draft's"])
def test_what_a_runner_gives_for_a_tree_is_checked(whose: str, wrong: str) -> None:
    change, message = WRONG_TREES[wrong]

    class Wrong(TreeTable):
        name, hidden_size = "Wrong", 5

        def forward_tree(self, tokens: Tensor, *more: Any) -> Any:
            logits, _ = super().forward_tree(tokens, *more)
            return change(logits, logits.new_zeros(*tokens.shape, 5))

    table, ids = TableRunner.random().table, torch.tensor([[3, 4, 5]] * 3)
    runner: TreeTable = Wrong(table)
    drafter: TreeDrafter = Fixed(TREE, TOKENS)
    if whose == "the draft's":
        runner, drafter = TreeTable(table), sk.ModelTreeDrafter(Wrong(table), 5, 3, 2)
    with pytest.raises((TypeError, ValueError), match=rf"^Wrong\.forward_tree: {message}"):
        sk.generate(runner, ids, drafter=drafter, num_speculative_tokens=3, max_new_tokens=9)


class Oracle(TreeDrafter):
    """Drafts what the target will say on one path of a random tree, a different path and node order at each step."""

    num_nodes, max_depth = 14, 5

    def __init__(self, answers: Tensor, prompt_lengths: list[int]) -> None:
        self.answers, self.prompt_lengths = answers.tolist(), prompt_lengths

    def start(self, state: DecodingState) -> None:
        self.random = np.random.default_rng(1)

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        tokens = np.full((state.batch_size, self.num_nodes), -1)
        parents = np.zeros((state.batch_size, self.num_nodes), dtype=np.int64)
        for row, answer in enumerate(self.answers):
            coming = answer[int(state.host_lengths[row]) - self.prompt_lengths[row] :]
            depth, on_path = [0], [0]
            parents[row, 0] = -1
            for node in range(1, self.num_nodes):
                right = len(on_path) <= min(self.max_depth, len(coming)) and self.random.random() < 0.6
                parent = on_path[-1] if right else int(self.random.integers(node))
                if depth[parent] == self.max_depth:
                    parent, right = 0, False
                used = tokens[row, :node][parents[row, :node] == parent].tolist()
                due = coming[depth[parent]] if depth[parent] < len(coming) else -1
                wrong = next(t for t in self.random.permutation(VOCAB).tolist() if t not in used and t != due)
                tokens[row, node], parents[row, node] = due if right else wrong, parent
                depth.append(depth[parent] + 1)
                if right:
                    on_path.append(node)
        tree = sk.DraftTree.from_parents(torch.from_numpy(parents), self.max_depth)
        return Draft(torch.from_numpy(tokens[:, 1:]), tree=tree)

    def commit(self, state: DecodingState, result: Any) -> None: ...


# --- the tokens of plain decoding -------------------------------------------------------------------------------------


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("acceptance", ["greedy", "match"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_plain_decoding(family: str, acceptance: str) -> None:
    model = target(family)
    ids, mask = prompts(5, 9, 1)
    sampling = sk.SamplingParams(0.0 if acceptance == "greedy" else 0.9, top_k=30)
    kw: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 25, "acceptance": acceptance, "seeds": torch.arange(3),
        "sampling": sampling, "eos_token_id": [],
    }  # fmt: skip
    plain = decode(model, ids, drafter=sk.NoDrafter(), **kw)
    oracle = Oracle(plain.tokens, [5, 9, 1])
    itself, some = sk.ModelTreeDrafter(model, 16, 4, 4), sk.TokenMap(torch.arange(50, 2, -1))
    for drafter in (
        oracle, medusa(model), sk.NgramTreeDrafter(num_nodes=24), sk.NgramTreeDrafter(num_nodes=3), itself,
        sk.ModelTreeDrafter(near(family, 0, 0.1), 6, 4, 8), sk.ModelTreeDrafter(model, token_map=some),
        sk.ModelTreeDrafter(tiny(family, 5), 2, 1, 1),
    ):  # fmt: skip
        out = decode(model, ids, drafter=drafter, **kw)
        assert torch.equal(out.tokens, plain.tokens), type(drafter).__name__
        assert not out.status.any() and out.stats.num_tokens == out.stats.num_steps + out.stats.num_accepted
        if drafter is oracle:  # paths scattered over the tree: whatever is moved to the wrong place shows
            assert out.stats.mean_acceptance_length > 3
        if drafter is itself and acceptance == "greedy":  # nearly all is accepted, unless the draft's cache is wrong
            assert out.stats.num_accepted > 0.9 * out.stats.num_drafted > 40


def test_ends_and_limits_are_kept() -> None:
    model = tiny("llama")
    ids, mask = prompts(6, 3, 8, 4)
    kw: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "acceptance": "greedy"}
    free = decode(model, ids, drafter=sk.NoDrafter(), eos_token_id=[], **kw).tokens
    ends = [int(free[0, 9]), int(free[2, 17])]
    plain = decode(model, ids, drafter=sk.NoDrafter(), eos_token_id=ends, **kw)
    assert plain.num_tokens.unique().numel() > 1
    out = decode(model, ids, drafter=Oracle(free, [6, 3, 8, 4]), eos_token_id=ends, **kw)
    assert torch.equal(out.tokens, plain.tokens) and torch.equal(out.num_tokens, plain.num_tokens)
    for few in (1, 2, 3):
        kw["max_new_tokens"] = few
        out = decode(model, ids, drafter=Oracle(free, [6, 3, 8, 4]), eos_token_id=[], **kw)
        assert torch.equal(out.tokens, free[:, :few]) and out.stats.num_steps < 4 * few + (few == 1)


def test_a_step_leaves_the_rows_and_the_state_that_feeding_the_text_leaves() -> None:
    """Keys, values and the hidden state, against a forward of the text itself."""
    model = tiny("llama")
    ids, mask = prompts(7, 4)
    answers = decode(model, ids, attention_mask=mask, drafter=sk.NoDrafter(), sampling=sk.SamplingParams(0.0), max_new_tokens=12, eos_token_id=[]).tokens  # noqa: E501  # fmt: skip
    runner = as_runner(model, "test")
    prompt = Request(ids, mask, sk.SamplingParams(0.0), None, 12, []).prompt(runner)
    drafter = Oracle(answers, [7, 4])
    with torch.inference_mode():
        how = Speculation("greedy", 13, hidden_size=32)
        state = DecodingState.begin(prompt, runner, sk.SamplingParams(0.0), torch.arange(2), 12, how)
        runner.start(prompt, state.capacity)
        runner.prefill(prompt)
        drafter.start(state)
        verify_step(state, runner, drafter.propose(state, 5), state.longest, None, None)
        assert int((state.lengths - prompt.lengths).max()) > 2
        layers = runner.cache.layers
        for row, length in enumerate(state.lengths.tolist()):
            text = state.tokens[row : row + 1, : length - 1]
            assert text[0].tolist() == (prompt.host_tokens[row].tolist() + answers[row].tolist())[: length - 1]
            full = model(text, output_hidden_states=True, use_cache=True)
            torch.testing.assert_close(state.hidden[row], full.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)
            for layer, want in zip(layers, full[CACHE].layers, strict=True):
                for got, rows in ((layer.key_rows, want.keys), (layer.value_rows, want.values)):
                    kept = got.unflatten(0, (2, -1))[row, : length - 1]
                    torch.testing.assert_close(kept, rows[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
        runner.finish()
    assert not model.get_output_embeddings()._forward_pre_hooks


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["token", "block", "match"])
def test_texts_have_the_targets_law(acceptance: str) -> None:
    runner, batch, length = TreeTable(TableRunner.random(4, seed=2, spread=1.2).table), 40_000, 4
    out = decode(
        runner, torch.tensor([[1, 3]]).expand(batch, -1), drafter=Fixed(TREE, TOKENS), seeds=torch.arange(batch),
        max_new_tokens=length, acceptance=acceptance, eos_token_id=[],
    )  # fmt: skip
    law = exact_law(runner.table, [1, 3], length)
    seen = frequencies(out.tokens, 4)
    assert out.stats.mean_acceptance_length > 1.1
    # The largest |seen − law| in standard deviations, of 256 cells.
    assert float((np.abs(seen - law) / np.sqrt(law / batch)).max()) < 4.5


def test_typical_acceptance_is_another_law_and_accepts_more() -> None:
    runner, batch = TreeTable(TableRunner.random(4, seed=2, spread=1.2).table), 4000
    kw: dict[str, Any] = {"seeds": torch.arange(batch), "max_new_tokens": 4, "eos_token_id": []}
    ids = torch.tensor([[1, 3]]).expand(batch, -1)
    lossless = decode(runner, ids, drafter=Fixed(TREE, TOKENS), acceptance="token", **kw)
    typical = decode(runner, ids, drafter=Fixed(TREE, TOKENS), acceptance="typical", **kw)
    assert typical.stats.mean_acceptance_length > 1.2 * lossless.stats.mean_acceptance_length
    law = exact_law(runner.table, [1, 3], 4)
    assert np.abs(frequencies(typical.tokens, 4) - law).sum() > 3 * np.abs(frequencies(lossless.tokens, 4) - law).sum()
    lengths = [
        decode(
            runner, ids, drafter=Fixed(TREE, TOKENS), acceptance="typical", epsilon=epsilon, delta=epsilon**0.5, **kw
        ).stats.mean_acceptance_length
        for epsilon in (0.0, 0.09, 0.5, 2.0)
    ]  # fmt: skip
    assert lengths[1] == typical.stats.mean_acceptance_length  # the defaults
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 4 and lengths[3] < 1.2


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_medusa_drafts_its_heads_best_tokens() -> None:
    model = tiny("llama")
    tree = sk.DraftTree.from_choices([[0], [2], [0, 1], [2, 0], [0, 1, 3]])
    drafter = medusa(model, tree)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    propose = drafter.propose

    def spy(state: DecodingState, num_tokens: int) -> Draft:
        draft = propose(state, num_tokens)
        assert state.hidden is not None
        seen.append((state.hidden.clone(), draft.tokens, state.tokens[0, : int(state.lengths[0])].clone()))
        return draft

    drafter.propose = spy  # type: ignore[method-assign]
    decode(model, torch.tensor([[4, 9, 30]]), drafter=drafter, max_new_tokens=12, eos_token_id=[], seeds=torch.tensor([3]))  # noqa: E501  # fmt: skip
    assert len(seen[0][2]) == 4  # no hidden state before the first step, which asks for no draft
    for hidden, tokens, text in seen:
        with torch.inference_mode():
            states = model(text[None], output_hidden_states=True).hidden_states[-1][0]
        # of the token before the last one: head 0 then predicts the one after the last
        torch.testing.assert_close(hidden[0], states[-2], rtol=1e-4, atol=1e-4)
        best = drafter.heads.top_tokens(hidden, 4)[0]
        assert tokens[0].tolist() == [int(best[k, rank]) for k, rank in ((0, 0), (0, 2), (1, 1), (1, 0), (2, 3))]


def test_an_ngram_tree_holds_every_continuation() -> None:
    drafter = sk.NgramTreeDrafter(n=2, num_nodes=8, max_depth=3)
    text = np.array([7, 8, 1, 2, 5, 8, 1, 3, 9, 9, 8, 4, 6, 7, 8], dtype=np.int64)
    tokens, parents = np.full(8, -1), np.zeros(8, dtype=np.int64)
    drafter._grow(0, text, 3, tokens, parents)
    # after "7 8": 1 2 5; after "8", the later ones first: 4 6 7, then 1 3 9, of which 1 is there and 9 finds no room
    assert tokens.tolist() == [-1, 1, 2, 5, 4, 6, 7, 3]
    assert parents.tolist() == [0, 0, 1, 2, 0, 4, 5, 1]
    tokens[:] = -1
    drafter._grow(0, np.array([1, 2, 3]), 3, tokens, parents)
    assert tokens.tolist() == [-1] * 8


def test_an_ngram_tree_accepts_what_one_continuation_misses() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 20, 5, 6, 9, 10, 21, 5, 6]])
    table = torch.zeros(23, 23, 23)
    for before, last, after in ((5, 6, 7), (6, 7, 8), (7, 8, 11)):
        table[before, last, after] = 9.0
    kw: dict[str, Any] = {"acceptance": "greedy", "max_new_tokens": 3, "eos_token_id": []}
    one = decode(TreeTable(table), ids, drafter=sk.NgramDrafter(2), num_speculative_tokens=3, **kw)
    several = decode(TreeTable(table), ids, drafter=sk.NgramTreeDrafter(2), **kw)
    assert one.tokens.tolist() == several.tokens.tolist() == [[7, 8, 11]]
    assert (one.stats.num_steps, several.stats.num_steps) == (2, 1)


def test_a_leaf_that_is_accepted_rejects_nothing() -> None:
    """Beside a longer branch that is wrong: the token after it replaces no draft token."""
    table = TableRunner.random(23, spread=9.0).table
    ids, kw = torch.tensor([[5, 6]]), {"acceptance": "greedy", "max_new_tokens": 20, "eos_token_id": []}
    text = [5, 6, *decode(TreeTable(table), ids, drafter=sk.NoDrafter(), **kw).tokens[0].tolist()]

    class RightLeaf(TreeDrafter):
        num_nodes, max_depth = 5, 3

        def start(self, state: DecodingState) -> None: ...

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            right = text[int(state.lengths[0])]
            wrong = (right + 1) % 23
            tree = sk.DraftTree.from_parents([-1, 0, 1, 2, 0])
            return Draft(torch.tensor([[wrong, wrong, wrong, right]]), tree=tree)

        def commit(self, state: DecodingState, result: Any) -> None: ...

    seen = watch(TreeTable(table), ids, drafter=RightLeaf(), **kw)
    stats = seen.output.stats
    assert seen.output.tokens[0].tolist() == text[2:]
    assert (stats.num_accepted, stats.num_rejected, stats.num_drafted) == (10, 0, 10) and stats.alpha == 1.0
    assert set(seen.output.provenance[0].tolist()) == {Provenance.ACCEPTED, Provenance.BONUS}
    rooms = [min(3, 19 - 2 * i) for i in range(10)]
    expected = [[1.0, -1.0, np.nan][:room] + [np.nan] * (3 - room) for room in rooms]
    np.testing.assert_array_equal(seen.acceptance, expected)


def test_a_branch_that_goes_on_counts_as_far_as_it_goes() -> None:
    """Of a chain beside a leaf the second token is wrong; then, of two branches, both are wrong from the start."""
    table = TableRunner.random(23, spread=9.0).table
    ids, kw = torch.tensor([[5, 6]]), {"acceptance": "greedy", "eos_token_id": []}
    text = [
        5,
        6,
        *decode(TreeTable(table), ids, drafter=sk.NoDrafter(), max_new_tokens=20, **kw).tokens[0].tolist(),
    ]

    class Branches(TreeDrafter):
        num_nodes, max_depth = 6, 4

        def __init__(self, right: bool) -> None:
            self.right = right

        def start(self, state: DecodingState) -> None: ...

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            after = text[int(state.lengths[0]) :]
            first = after[0] if self.right else (after[0] + 1) % 23
            tokens = [first, (after[1] + 1) % 23, 0, 0, (after[0] + 2) % 23]
            return Draft(torch.tensor([tokens]), tree=sk.DraftTree.from_parents([-1, 0, 1, 2, 3, 0]))

        def commit(self, state: DecodingState, result: Any) -> None: ...

    counts = []
    for right in (True, False):
        stats = decode(TreeTable(table), ids, drafter=Branches(right), max_new_tokens=14, **kw).stats
        counts.append((stats.num_steps, stats.num_drafted, stats.num_accepted, stats.num_rejected))
    # near the end there is room for fewer: 3 and 1 of the chain; 3, 2, 1 and none
    assert counts == [(7, 5 * 4 + 3 + 1, 7, 6), (14, 10 * 4 + 3 + 2 + 1, 0, 13)]


class Around(torch.nn.Module):
    """Calls a model, and has its attributes."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("inner", "training") else getattr(self.inner, name)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inner(*given, **named)


def compiled(kind: str) -> Any:
    model = tiny("llama", 1)
    if kind == "wrapped":
        return torch.compile(model, backend="eager")
    if kind == "within":
        return Around(torch.compile(model, backend="eager")).eval()
    if kind == "in place":
        model.compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("kind", ["wrapped", "within", "in place", "forward"])
def test_trees_of_a_compiled_target(kind: str) -> None:
    """Whatever was compiled before; drafters that read its hidden states are refused."""
    torch.compiler.reset()
    model, ids = compiled(kind), torch.tensor([[5, 6, 7, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": 16, "sampling": sk.SamplingParams(0.0), "num_speculative_tokens": 3}
    drafters = (sk.NoDrafter(), sk.NgramDrafter(), sk.NgramTreeDrafter(num_nodes=4))
    first, *others = (decode(model, ids, drafter=drafter, **options).tokens for drafter in drafters)
    assert all(torch.equal(first, other) for other in others)
    with pytest.raises(ValueError, match="MedusaDrafter needs the target's hidden states, .* nor any compiled model"):
        decode(model, ids, drafter=medusa(tiny("llama", 1)), **options)
    torch.compiler.reset()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused() -> None:
    model, ids = tiny("llama"), torch.tensor([[4, 9]])
    drafter = medusa(model)
    with pytest.raises(ValueError, match="target_law must be None"):
        decode(model, ids, drafter=drafter, target_law=sk.laws.Lossy(0.1))
    with pytest.raises(ValueError, match=f"one of {', '.join(ACCEPTANCES)}, got 'typical'"):
        decode(model, ids, drafter=sk.NgramDrafter(), acceptance="typical")
    with pytest.raises(ValueError, match="one of token, block, match, greedy, typical, got 'traversal'"):
        decode(model, ids, drafter=drafter, acceptance="traversal")
    with pytest.raises(ValueError, match="decoder-only target that takes trees, got T5"):
        decode(tiny("t5"), ids, drafter=sk.NgramTreeDrafter())
    with pytest.raises(ValueError, match="hidden states, which table does not give"):
        decode(TreeTable(TableRunner.random().table), ids, drafter=drafter)
    with pytest.raises(ValueError, match="hidden=16 and ids < vocab=61, got hidden=32"):
        decode(tiny("llama", hidden_size=16), ids, drafter=drafter)
    with pytest.raises(ValueError, match=r"at most heads=3 deep, got 4"):
        medusa(model, sk.DraftTree.cartesian([1, 1, 1, 1]))
    with pytest.raises(ValueError, match="tree must have ranks"):
        medusa(model, sk.DraftTree.from_parents([-1, 0]))
    with pytest.raises(ValueError, match="vocab_draft=47, got 47"):
        medusa(model, sk.DraftTree.cartesian([48]))
    with pytest.raises(ValueError, match="model must have a language-model head, LlamaModel has none"):
        MedusaHeads.of_model(model.model, 3, sk.TokenMap(torch.arange(3, 50)))
    with pytest.raises(ValueError, match="were not calibrated"):
        sk.MedusaDrafter(drafter.heads)
    with pytest.raises(ValueError, match=r"num_nodes must be in \[2, 1024\], got 1"):
        sk.NgramTreeDrafter(num_nodes=1)


@pytest.mark.parametrize(
    ("tree", "tokens", "message"),
    [
        ([-1, *range(9)], 9, "a tree of at most num_nodes=7, max_depth=3 deep, got 10 nodes, 9 deep"),
        ([-1, *[0] * 199], 199, "a tree of at most num_nodes=7, max_depth=3 deep, got 200 nodes, 1 deep"),
        ([-1, 0, 1, 2, 3], 4, "a tree of at most num_nodes=7, max_depth=3 deep, got 5 nodes, 4 deep"),
        ([-1, 0, 1], 3, r"\[batch=2, num_nodes - 1=2\] tokens, got \[2, 3\]"),
    ],
)
def test_a_tree_larger_than_said_is_refused(tree: list[int], tokens: int, message: str) -> None:
    """The cache has no room for it: its rows would lie where other sequences' are."""

    class Liar(Fixed):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            return Draft(torch.arange(tokens).expand(2, -1), tree=sk.DraftTree.from_parents(tree))

    target, ids = TreeTable(TableRunner.random().table), torch.tensor([[4, 9], [3, 8]])
    with pytest.raises(ValueError, match=f"^generate: Liar.propose must give {message}"):
        decode(target, ids, drafter=Liar(TREE, TOKENS), max_new_tokens=8, eos_token_id=[])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_draft_tokens": torch.tensor([1, -1])}, "a tree without num_draft_tokens"),
        ({"tree": sk.DraftTree.from_parents([-1, 0, 1]).to("meta")}, "its tree on cpu, got meta"),
        ({"tree": None}, "a tree with its tokens, as it is a TreeDrafter, got a chain"),
        ({"tree": sk.DraftTree.from_parents(torch.tensor([[-1, 0, 1]] * 3), 2)}, "one tree or batch=2, got 3"),
    ],
)  # fmt: skip
def test_what_is_no_tree_for_the_batch_is_refused(change: dict[str, Any], message: str) -> None:
    """Depths by sequence would take the grammar's masks off rows that are verified all the same."""

    class Odd(Fixed):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            tree = sk.DraftTree.from_parents([-1, 0, 1])
            return replace(Draft(torch.ones(2, 2, dtype=torch.int64), tree=tree), **change)

    target, ids = TreeTable(TableRunner.random().table), torch.tensor([[4, 9], [3, 8]])
    with pytest.raises(ValueError, match=f"^generate: Odd.propose must give {message}"):
        decode(target, ids, drafter=Odd(TREE, TOKENS), max_new_tokens=8, eos_token_id=[])


def test_a_drafter_that_reads_hidden_states_gives_a_tree_at_every_step() -> None:
    """Only the verification of a tree keeps them: after a step without one it would read those of an older token."""

    class Silent(Fixed):
        reads_hidden = False

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            return Draft(state.tokens[:, :0])

    target, ids = TreeTable(TableRunner.random().table), torch.tensor([[4, 9], [3, 8]])
    kw: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": []}
    assert decode(target, ids, drafter=Silent(TREE, TOKENS), **kw).tokens.shape == (2, 8)

    class Hidden(TreeTable):
        hidden_size = 3

        def forward_tree(self, tokens: Tensor, starts: Tensor, tree: sk.DraftTree, bound: int) -> Any:
            logits, _ = super().forward_tree(tokens, starts, tree, bound)
            return logits, logits[..., :3]

    target, Silent.reads_hidden = Hidden(target.table), True
    with pytest.raises(ValueError, match="Silent.propose must give a tree, of the root alone at least"):
        decode(target, ids, drafter=Silent(TREE, TOKENS), **kw)


def test_nothing_is_drafted_behind_a_node_that_is_missing() -> None:
    """Of a chain whose first token is missing the second was not put to the test, and so not rejected."""

    class Gap(Fixed):
        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            tree = sk.DraftTree.from_parents([-1, 0, 1])
            return Draft(torch.tensor([[-1, 5]]), tree=tree)

    target, ids = TreeTable(TableRunner.random().table), torch.tensor([[4, 9]])
    stats = decode(target, ids, drafter=Gap(TREE, TOKENS), max_new_tokens=8, eos_token_id=[]).stats
    assert (stats.num_drafted, stats.num_rejected, stats.num_tokens) == (0, 0, 8)


def test_a_tree_of_no_tree_drafter_is_refused() -> None:
    class Chain(Drafter):
        def start(self, state: DecodingState) -> None: ...

        def propose(self, state: DecodingState, num_tokens: int) -> Draft:
            return Draft(torch.zeros(1, 6, dtype=torch.int64), tree=TREE)

        def commit(self, state: DecodingState, result: Any) -> None: ...

    target, ids = TreeTable(TableRunner.random().table), torch.tensor([[4, 9]])
    with pytest.raises(
        ValueError, match="Chain.propose must give no tree, as it is no TreeDrafter, got one of 7 nodes"
    ):
        decode(target, ids, drafter=Chain(), num_speculative_tokens=3, eos_token_id=[])


# --- as on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("acceptance", ["token", "match", "greedy", "typical"])
def test_steps_with_trees_can_be_captured(cuda: Any, acceptance: str) -> None:
    model = tiny("llama")
    ids, mask = prompts(5, 9, 1)
    kw: dict[str, Any] = {
        "attention_mask": mask, "max_new_tokens": 30, "acceptance": acceptance, "seeds": torch.arange(3),
        "eos_token_id": 7, "sampling": sk.SamplingParams(0.9, top_k=20), "num_speculative_tokens": 1,
    }  # fmt: skip
    same(*both(model, ids, drafter=medusa(model), **kw))
    assert cuda.captures() > 0
    same(*both(model, ids, drafter=sk.NgramTreeDrafter(), **kw))
    same(*both(model, ids, drafter=sk.ModelTreeDrafter(near("llama", 0, 0.1)), **kw))
