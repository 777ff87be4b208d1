"""With processors, too, the law that each backend really produces is the target's: every processor alone, all together,
on chains and trees; and the defects that engines have had, planted.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.cases import FOUND, check_law, problem
from python_tests.law.tree_cases import SHAPES, given, plain
from python_tests.ops.processing import EACH, Request, bits, holds_no_list, processors
from python_tests.support import ONE_TREE_KERNEL, Backend
from specdec_kernels import laws
from specdec_kernels.testing import ChainProblem, Float64, TreeProblem, Verify

EMULATED_CASES = 12
TRUE: Verify = partial(sk.verify_chain, backend="reference")
TRUE_TREE: Verify = partial(sk.verify_tree, backend="reference")


def contexts(tokens: Tensor, parents: list[int] | None) -> list[list[list[int]]]:
    """Of each sequence and row the draft tokens before it. `tokens` are a chain's, or with `parents` those of nodes."""
    if parents is None:
        return [[row[:i] for i in range(len(row) + 1)] for row in tokens.tolist()]
    out = []
    for row in tokens.tolist():
        before: list[list[int]] = [[]]
        for node in range(1, len(parents)):
            before.append([*before[parents[node]], row[node]])
        out.append(before)
    return out


def with_processors(verify: Verify, request: Request, parents: list[int] | None) -> Verify:
    """`verify`, called with the request's processors and the grammar's rows for the tokens drafted."""

    def run(target: Tensor, *rest: Any, **more: Any) -> Any:
        tokens, mask = rest[0] if parents is None else rest[1], None
        if request.grammar is not None:
            vocab = target.shape[-1]
            rows = [
                request.grammar(before, vocab)
                for each in contexts(tokens.clip(0, vocab - 1), parents)
                for before in each
            ]
            mask = bits(rows).view(*target.shape[:2], -1)
        return verify(target, *rest, processors=processors([request], mask, target.device.type), **more)

    return run


@dataclass
class Chain(ChainProblem):
    request: Request = field(default_factory=Request)

    def target_laws(self) -> list[Float64]:
        return ChainProblem.target_laws(replace(self, target=[self.request.table(t) for t in self.target]))

    def call(self, verify: Verify, *of: Any, **more: Any) -> Any:
        return super().call(with_processors(verify, self.request, None), *of, **more)


@dataclass
class Tree(TreeProblem):
    request: Request = field(default_factory=Request)

    def target_laws(self) -> list[Float64]:
        return TreeProblem.target_laws(replace(self, target=[self.request.table(t) for t in self.target]))

    def call(self, verify: Verify, *of: Any, **more: Any) -> Any:
        return super().call(with_processors(verify, self.request, self.parents), *of, **more)


def chain(kind: str, request: Request, size: tuple[int, int] = (3, 2), **fields: Any) -> Chain:
    case = problem(kind, *size)
    return Chain(**{**vars(case), **fields}, request=request)


def tree(shape: str, request: Request, vocab: int, drawn: bool, **fields: Any) -> Tree:
    case = plain(SHAPES[shape], vocab, torch.Generator().manual_seed(7))
    return Tree(**{**vars(case if drawn else given(case)), **fields}, request=request)


def chain_size(backend: Backend) -> tuple[int, int]:
    """(vocab, num_draft): smaller by Triton's interpreter."""
    return (2, 1) if backend.by_interpreter else (3, 2)


KINDS = {
    "token": ["full", "one_hot", "both_truncated", "greedy_target", "eos"],
    "block": ["full", "both_truncated"],
    "greedy": ["one_hot"],
}


@pytest.mark.short(cases=6, emulated=1, triton=1)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(("acceptance", "kind"), [(rule, kind) for rule, kinds in KINDS.items() for kind in kinds])
def test_law_of_chains(backend: Backend, acceptance: str, kind: str, name: str) -> None:
    case = chain(kind, EACH[name], chain_size(backend))
    if acceptance == "greedy":
        case.params = sk.SamplingParams(0.0)
    check_law(backend.verify_chain, case, acceptance, backend.device)


@pytest.mark.short(cases=3, emulated=1, triton=0)
@pytest.mark.parametrize("law", [laws.Chow(0.5, bonus="cascade"), laws.TokenV2(0.2), laws.Lossy(0.3)], ids=str)
def test_law_of_other_targets(backend: Backend, law: laws.TargetLaw) -> None:
    """A cascade looks at the target's logits as processors leave them."""
    case = chain("full", EACH["all"], chain_size(backend))
    if law.is_cascade and law.flat().cascade_bonus:
        assert case.draft is not None
        case.draft.append(torch.randn(case.target[-1].shape, generator=torch.Generator().manual_seed(1)))
    case = replace(case, law=law)
    check_law(backend.verify_chain, case, "token", backend.device)


@pytest.mark.short(cases=6, emulated=0, triton=0)  # in ops/test_processors.py their rows are held bit for bit
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_law_of_the_packed_form(backend: Backend, acceptance: str, name: str) -> None:
    def verify(target: Tensor, tokens: Tensor, *, processors: sk.Processors, **rest: Any) -> Any:
        batch, num_draft = tokens.shape
        mask = processors.token_bitmask
        for rows in ("draft_logits", "uniform_samples"):
            rest[rows] = rest[rows].flatten(0, 1)
        return backend.verify_packed(
            target.flatten(0, 1), tokens.flatten(),
            cu_num_draft_tokens=torch.arange(batch + 1, dtype=torch.int32, device=tokens.device) * num_draft,
            processors=processors.with_bitmask(None if mask is None else mask.flatten(0, 1)),
            max_num_draft_tokens=num_draft, **rest,
        )  # fmt: skip

    check_law(verify, chain("full", EACH[name], chain_size(backend)), acceptance, backend.device)


@pytest.mark.on_triton(shape="siblings")
@pytest.mark.short(cases=6, emulated=1, triton=0)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("shape", ["siblings", "fork", "bush"])
@pytest.mark.parametrize("acceptance", ["sample", "recursive", "traversal"])
def test_law_of_trees(backend: Backend, acceptance: str, shape: str, name: str) -> None:
    if backend.by_interpreter and shape != "siblings":
        pytest.skip("Triton's interpreter needs minutes for this: it walks two siblings")
    if backend.strategy == "split":
        pytest.skip(ONE_TREE_KERNEL)
    vocab = 2 if backend.by_interpreter or acceptance == "sample" else 3
    check_law(backend.verify_tree, tree(shape, EACH[name], vocab, acceptance != "sample"), acceptance, backend.device)


@pytest.mark.short(cases=4, emulated=3, triton=1)
@pytest.mark.parametrize("name", EACH)
def test_match_draws_what_plain_sampling_draws(backend: Backend, name: str) -> None:
    """Token by token, `sample` with the history so far: the same ids, whatever is drafted."""
    vocab, num_draft, request = 4, 3, EACH[name]
    rng = torch.Generator().manual_seed(11)
    params, n = sk.SamplingParams(0.9), 3 if backend.by_interpreter else 40
    rows = [torch.randn(*[vocab] * d, vocab, generator=rng) * 2 for d in range(num_draft + 1)]
    keys = torch.randint(0, 2**60, (n, num_draft + 1), generator=rng)
    drafted = torch.randint(0, vocab, (n, num_draft), generator=rng)
    drafted[: n // 2] = -1
    for i in range(num_draft):  # what plain sampling draws is drafted for these
        drafted[: n // 2, i] = plainly(rows, drafted[: n // 2, :i], keys[: n // 2, i], request, params)
    index = [drafted[:, :d].unbind(1) for d in range(num_draft + 1)]
    target = torch.stack([t[index[d]] if d else t.expand(n, -1) for d, t in enumerate(rows)], 1)
    out = with_processors(backend.verify_chain, request, None)(
        backend(target), backend(drafted), noise_keys=backend(keys), params=params, acceptance="match",
    )  # fmt: skip
    assert (out.num_accepted[: n // 2] == num_draft).all() and (out.num_accepted[n // 2 :] < num_draft).any()
    tokens = out.tokens.cpu()
    for i in range(num_draft + 1):
        has = out.num_tokens.cpu() > i
        assert torch.equal(tokens[has, i], plainly(rows, tokens[has, :i], keys[has, i], request, params))


def plainly(rows: list[Tensor], before: Tensor, keys: Tensor, request: Request, params: sk.SamplingParams) -> Tensor:
    """``[n]``: what plain sampling draws after the tokens `before` ``[n, i]``."""
    table = rows[before.shape[1]]
    made = torch.stack([torch.from_numpy(request.row(table[tuple(each)], each)).float() for each in before.tolist()])
    return sk.sample(made, params, noise_keys=keys.contiguous(), backend="reference").token


# --- defects that engines have had, planted ---------------------------------------------------------------------------


def next_mask(verify: Verify, *args: Any, processors: sk.Processors, **rest: Any) -> Any:
    """The grammar's row of the token after."""
    assert processors.token_bitmask is not None
    return verify(*args, processors=processors.with_bitmask(processors.token_bitmask.roll(-1, 1)), **rest)


def penalties_after_temperature(
    verify: Verify, target: Tensor, *args: Any, params: sk.SamplingParams, **rest: Any
) -> Any:
    return verify(target / params.temperature, *args, params=replace(params, temperature=1.0), **rest)


def bias_on_the_drafts_row(verify: Verify, *args: Any, draft_logits: Tensor, **rest: Any) -> Any:
    added = torch.zeros(draft_logits.shape[-1])
    for v, bias in EACH["logit_bias"].logit_bias.items():
        added[v] = bias
    return verify(*args, draft_logits=draft_logits + added.to(draft_logits.device), **rest)


@pytest.mark.short(cases=4, emulated=1)
@pytest.mark.parametrize(
    ("mutant", "name", "acceptance"),
    [
        (next_mask, "token_bitmask", "token"),
        (next_mask, "token_bitmask", "block"),
        (penalties_after_temperature, "frequency_penalty", "token"),
        (penalties_after_temperature, "presence_penalty", "block"),
        (bias_on_the_drafts_row, "logit_bias", "token"),
        (bias_on_the_drafts_row, "logit_bias", "block"),
    ],
)
def test_planted_input_defect_is_caught(backend: Backend, mutant: Any, name: str, acceptance: str) -> None:
    if backend.by_interpreter:
        pytest.skip("Triton's interpreter takes two ids, and a grammar allows both")
    case = chain("full", EACH[name], params=sk.SamplingParams(0.7))
    check_law(backend.verify_chain, case, acceptance, backend.device)
    with pytest.raises(AssertionError, match="law off by"):
        check_law(partial(mutant, backend.verify_chain), case, acceptance, backend.device)


def nothing_before(tokens: Tensor) -> Tensor:
    return torch.full((len(tokens), tokens.shape[1] + 1, 1), -1)


def itself_too(tokens: Tensor) -> Tensor:
    """Draft tokens up to a row's own, which is the one that the row judges."""
    before = draft_before(tokens)
    slots = torch.arange(tokens.shape[1])
    before[:, slots, slots] = tokens
    return before


def nothing_above(tree: Any) -> Tensor:
    return torch.full((*tree.tokens.shape, 1), -1)


def every_node(tree: Any) -> Tensor:
    """All nodes before a row's, siblings among them, and not its ancestors alone."""
    slots = torch.arange(tree.tokens.shape[1])
    return torch.where((slots <= slots[:, None]) & (slots > 0), tree.tokens[:, None], -1)


def the_root_too(tree: Any) -> Tensor:
    """The root's token, which the history has already."""
    return torch.cat([tree.tokens[:, :1, None].expand(-1, tree.tokens.shape[1], 1), above(tree)], -1)


reference = importlib.import_module("specdec_kernels.backends.reference.verify_chain")
reference_tree = importlib.import_module("specdec_kernels.backends.reference.verify_tree")
draft_before, above = reference.draft_before, reference_tree.Tree.draft_before
COUNTING = ["min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty"]


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("mutant", [nothing_before, itself_too])
def test_planted_defect_of_counting_is_caught(mutant: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = chain("full", replace(EACH[name], min_tokens=EACH[name].min_tokens and 3, prompt=[0], output=[1, 1][:1]))
    check_law(TRUE, case, "token")
    monkeypatch.setattr(reference, "draft_before", mutant)
    with pytest.raises(AssertionError, match=FOUND):
        check_law(TRUE, case, "token")


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("mutant", "shape", "names"),
    [
        (nothing_above, "fork", COUNTING),
        (every_node, "bush", COUNTING[1:]),
        (the_root_too, "siblings", ["frequency_penalty", "presence_penalty"]),
    ],
)
def test_planted_defect_of_counting_on_trees_is_caught(
    mutant: Any, shape: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        request = replace(EACH[name], min_tokens=EACH[name].min_tokens and 2, prompt=[], output=[1])
        case = tree(shape, request, 2, drawn=True)
        check_law(TRUE_TREE, case, "recursive")
        with monkeypatch.context() as planted:
            planted.setattr(reference_tree.Tree, "draft_before", mutant)
            with pytest.raises(AssertionError, match=FOUND):
                check_law(TRUE_TREE, case, "recursive")


@pytest.mark.parametrize("name", ["bias_ids", "count_ids"])
def test_lists_taken_as_they_are_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_lists = partial(holds_no_list, Backend("reference", "cpu"), name)
    check_lists()
    module = importlib.import_module("specdec_kernels.backends.reference.processors")
    unseen = {"bias_ids": 0, "count_ids": 1}[name]
    true, calls = module.flagged_lists, iter(range(10**6))

    def trusting(ids: Tensor) -> tuple[Tensor, Tensor]:
        return (ids, torch.zeros(len(ids), dtype=torch.int32)) if next(calls) % 2 == unseen else true(ids)

    monkeypatch.setattr(module, "flagged_lists", trusting)
    with pytest.raises(AssertionError, match="a list in no order"):
        check_lists()
