"""The count-based drafter: its counts, its law, and that it changes no token."""

from __future__ import annotations

import math
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, prompts
from python_tests.host.indexes import naive_match
from specdec_kernels import GenerationOutput, generate
from specdec_kernels.decoding import DecodingState
from specdec_kernels.decoding.costs import CostTable
from specdec_kernels.drafters import Drafter, NgramLMDrafter, NgramTable, NoDrafter

VOCAB = 23


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def decode(drafter: Drafter, acceptance: str, temperature: float = 1.0, spread: float = 2.0) -> GenerationOutput:
    input_ids, mask = prompts(3, 9, 5, 1, vocab=VOCAB)
    return generate(
        TableRunner.random(VOCAB, spread=spread), input_ids, attention_mask=mask, drafter=drafter,
        sampling=sk.SamplingParams(temperature=temperature), seeds=torch.arange(4), max_new_tokens=60,
        num_speculative_tokens=4, acceptance=acceptance, eos_token_id=[],
    )  # fmt: skip


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.integers(1, 3), st.integers(1, 3))
def test_counts_are_those_of_a_naive_count(tokens: list[int], order: int, min_count: int) -> None:
    table = NgramTable.from_tokens(ids(*tokens), order, min_count)
    for length in range(1, order + 1):
        wanted: dict[tuple[int, ...], Counter[int]] = {}
        for i in range(len(tokens) - length):
            wanted.setdefault(tuple(tokens[i : i + length]), Counter())[tokens[i + length]] += 1
        for context, followers in wanted.items():
            found = table.orders[length - 1]
            (at,) = [place for order, place in table.contexts(context) if order is found] or (-1,)
            if length > 1 and followers.total() < min_count:
                assert at == -1
                continue
            entries = slice(found.starts[at], found.starts[at + 1])
            got = dict(zip(found.ids[entries].tolist(), found.counts[entries].tolist(), strict=True))
            assert got == dict(followers)
            assert (found.totals[at], found.kinds[at]) == (followers.total(), len(followers))


def test_only_the_most_frequent_continuations_are_kept() -> None:
    """99 different tokens follow 0, tokens 90 and above twice: those are kept, and the totals still count all."""
    text = [token for t in range(1, 100) for token in (0, t) * (2 if t >= 90 else 1)]
    order = NgramTable.from_tokens(ids(*text), 1).orders[0]
    assert (order.totals[order.keys == order.keys[0]][0] > 0) and order.kinds.max() == 99
    at = int(order.kinds.argmax())
    kept = order.ids[order.starts[at] : order.starts[at + 1]]
    assert len(kept) == 64 and set(range(90, 100)) <= set(kept.tolist()) and order.totals[at] == 109


def test_saving_a_table_needs_no_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    NgramTable.from_tokens(ids(*range(9))).save(tmp_path / "t.npz")
    with pytest.raises(OSError, match="no-such-folder"):
        NgramTable.from_tokens(ids(*range(9))).save(tmp_path / "no-such-folder" / "t.npz")


def test_a_saved_table_is_the_same(tmp_path: Path) -> None:
    table = NgramTable.from_tokens(ids(*range(9), *range(9)))
    table.save(tmp_path / "t.npz")
    for before, after in zip(table.orders, NgramTable.load(tmp_path / "t.npz").orders, strict=True):
        for name in before.__dataclass_fields__:
            assert np.array_equal(getattr(before, name), getattr(after, name))
    np.savez(tmp_path / "other.npz", a=np.zeros(1), **{f"b{i}": np.zeros(1) for i in range(6)})
    with pytest.raises(ValueError, match="is not a table"):
        NgramTable.load(tmp_path / "other.npz")
    floats = {f"{name}0": np.zeros(2) for name in table.orders[0].__dataclass_fields__}
    np.savez(tmp_path / "floats.npz", **floats)
    with pytest.raises(
        ValueError, match=r"floats.npz is not a table: NgramTable: orders\[0\].keys must be contiguous uint64"
    ):
        NgramTable.load(tmp_path / "floats.npz")
    with zipfile.ZipFile(tmp_path / "strong.npz", "w", compression=zipfile.ZIP_STORED) as file:
        file.writestr("keys0.npy", b"")
    found = bytearray((tmp_path / "strong.npz").read_bytes())
    found[found.index(b"PK\x01\x02") + 6] = 99  # the version of the format that is needed
    (tmp_path / "strong.npz").write_bytes(found)
    with pytest.raises(ValueError, match="is not a table: zip file version"):
        NgramTable.load(tmp_path / "strong.npz")
    whole = (tmp_path / "t.npz").read_bytes()
    (tmp_path / "t.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a table"):
        NgramTable.load(tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.zeros(9, dtype=np.int32),), TypeError, "must be an int64 array, got int32"),
        (([1, 2, 3, 4, 5, 6],), TypeError, "must be an int64 array, got list"),
        ((ids(1, 2),), ValueError, r"must be \[n > order=4\], got \[2\]"),
        ((np.zeros((9, 9), dtype=np.int64),), ValueError, r"got \[9, 9\]"),
        ((ids(1, -2, 3, 4, 5, 6),), ValueError, "must be ids in .0, 2147483647., got -2"),
        ((ids(1, 2), 0), ValueError, "must be >= 1, got 0"),
    ],
)
def test_bad_tables_are_refused(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NgramTable.from_tokens(*arguments)  # type: ignore[arg-type]


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"order must be in \[1, 64\], got 0"):
        NgramLMDrafter(order=0)
    for sharpness in (-1, 0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"sharpness must be in .*, got {sharpness}"):
            NgramLMDrafter(sharpness=sharpness)
    with pytest.raises(ValueError, match="table must be of the target's tokenizer, but it has id 99 .* 23 ids"):
        decode(NgramLMDrafter(NgramTable.from_tokens(ids(*range(100)))), "greedy")


def test_the_law_backs_off_as_witten_and_bell_say() -> None:
    """Text 1 2 1 3 1: after 1 came 2 and 3; the table adds that 5 follows 1, three times out of four."""
    table = NgramTable.from_tokens(ids(1, 5, 1, 5, 1, 5, 1, 6), order=1)
    drafter = NgramLMDrafter(table, order=2)
    tokens, law = drafter.law_after([1, 2, 1, 3, 1])
    # own counts: 2 tokens, 2 kinds, so half the mass is left; of that 4 / 6 go to the table's counts
    assert tokens.tolist() == [2, 3, 5, 6] and law == pytest.approx([0.25, 0.25, 0.5 * 3 / 6, 0.5 * 1 / 6])


@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize(("acceptance", "temperature"), [("greedy", 0.0), ("match", 0.0), ("match", 1.0)])
def test_the_output_is_that_of_plain_decoding(with_table: bool, acceptance: str, temperature: float) -> None:
    text = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).numpy()
    table = NgramTable.from_tokens(text) if with_table else None
    plain, fast = (decode(d, acceptance, temperature) for d in (NoDrafter(), NgramLMDrafter(table)))
    assert torch.equal(plain.tokens, fast.tokens)
    assert fast.stats.num_accepted > 0 and fast.stats.num_rejected > 0


@pytest.mark.parametrize("acceptance", ["token", "block"])
def test_it_drafts_for_the_ratio_rules_too(acceptance: str) -> None:
    """One-hot, which every rule verifies exactly; the laws are tested with the rules."""
    stats = decode(NgramLMDrafter(), acceptance, spread=6.0).stats
    assert 0 < stats.num_accepted < stats.num_drafted


def test_sharing_the_verifier_s_noise_is_accepted_more_often_than_the_likeliest_token() -> None:
    """On laws that the table knows well; a drafter with the wrong noise would fall below the one-hot guess."""
    runner = TableRunner.random(VOCAB, spread=1.5)
    laws = sk.warp_probs(runner.table).reshape(-1, VOCAB)
    drawn = torch.multinomial(laws, 200, replacement=True, generator=torch.Generator().manual_seed(0))
    contexts = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    text = torch.cat([contexts[:, None].expand(-1, 200, -1), drawn[..., None]], dim=2).flatten().numpy()
    table = NgramTable.from_tokens(text, order=2)
    shared, guess = (decode(NgramLMDrafter(table, sharpness=s), "match", spread=1.5).stats.alpha for s in (1.0, 1000.0))
    assert shared > guess + 0.1


EACH = torch.tensor([0.0, 1.0, 0.5, 2.0])


class Alternating(sk.Grammar):
    """Odd and even ids take turns."""

    def __init__(self, prompts: torch.Tensor) -> None:
        self.last = prompts[:, -1].tolist()

    def fill(self, rows: torch.Tensor, drafts: list[np.ndarray | None]) -> None:
        for own, last, draft in zip(rows, self.last, drafts, strict=True):
            for i, token in enumerate([] if draft is None else [last, *draft.tolist()]):
                own[i] = sum(1 << v for v in range(VOCAB) if v % 2 != token % 2)

    def commit(self, tokens: list[np.ndarray]) -> None:
        self.last = [int(new[-1]) if len(new) else last for new, last in zip(tokens, self.last, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0, EACH], ids=["greedy", "1", "each"])
@pytest.mark.parametrize("bars", ["nothing", "processors", "grammar"])
def test_it_foresees_the_first_token_that_it_then_proposes(temperature: float | torch.Tensor, bars: str) -> None:
    """And how long a context stood in the text before; looking ahead changes no draft. A drafter serves call after
    call.
    """
    text = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(1)).numpy()
    table, seen = NgramTable.from_tokens(text, order=2), list[int]()

    class Looking(NgramLMDrafter):
        def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
            self._first = None
            blind = super().propose(state, num_tokens)
            self._first = None
            foresight = self.foresee(state)
            assert foresight.tokens.tolist() == foresight_of(blind, state)
            texts = [row[:n].tolist() for row, n in zip(state.tokens, state.lengths, strict=True)]
            matched = [naive_match(one, [], range(1, 4)) for one in texts]
            assert foresight.matched.tolist() == matched
            seen.extend(matched)
            assert torch.equal(super().propose(state, num_tokens).tokens, blind.tokens)
            return blind

    def foresight_of(draft: sk.Draft, state: DecodingState) -> list[int]:
        first = draft.tokens[:, 0].tolist() if draft.tokens.shape[1] else [-1] * state.batch_size
        return [token if limit > 0 else -1 for token, limit in zip(first, state.host_limits, strict=True)]

    input_ids, mask = prompts(3, 9, 5, 1, vocab=VOCAB)
    likely, drafter = text[:3].tolist(), Looking(table, order=3)
    for seed in range(2):
        out = generate(
            TableRunner.random(VOCAB, spread=4.0), input_ids, attention_mask=mask, drafter=drafter,
            sampling=sk.SamplingParams(temperature), seeds=torch.arange(4) + seed, max_new_tokens=40,
            num_speculative_tokens=3, acceptance="match", eos_token_id=[7],
            processors=barring(likely, input_ids, mask) if bars == "processors" else None,
            grammar=Alternating(input_ids) if bars == "grammar" else None,
        )  # fmt: skip
        assert out.stats.num_accepted > 0 and {0, 1} <= set(seen)
        assert not (bars == "processors" and np.isin(out.tokens.numpy(), likely).any())


def barring(banned: list[int], input_ids: torch.Tensor, mask: torch.Tensor) -> sk.Processors:
    counts = sk.TokenCounts(input_ids, 40, mask)
    return sk.Processors(
        banned_ids=[banned], logit_bias=[{5: 3.0}], stop_token_ids=[7], min_tokens=9, token_counts=counts
    )


@pytest.mark.parametrize("temperature", [1.0, EACH], ids=["1", "each"])
def test_auto_changes_no_token(temperature: float | torch.Tensor) -> None:
    costs = CostTable(np.zeros(1, np.int64), np.array([[1.0, 1.05, 1.1, 1.2]]))
    table = NgramTable.from_tokens(torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).numpy())
    input_ids, mask = prompts(3, 9, 5, 1, vocab=VOCAB)
    plain, fast = (
        generate(
            TableRunner.random(VOCAB, spread=4.0), input_ids, attention_mask=mask, drafter=drafter,
            sampling=sk.SamplingParams(temperature), seeds=torch.arange(4), max_new_tokens=80,
            num_speculative_tokens=costs, acceptance="match", eos_token_id=[],
        )
        for drafter in (NoDrafter(), NgramLMDrafter(table))
    )  # fmt: skip
    assert torch.equal(plain.tokens, fast.tokens) and 0 < fast.stats.num_accepted < fast.stats.num_drafted


def test_each_draft_token_is_drawn_with_the_noise_of_its_position() -> None:
    text = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1)).numpy()
    compared = 0

    class Drawn(NgramLMDrafter):
        def propose(self, state: DecodingState, num_tokens: int) -> sk.Draft:
            nonlocal compared
            draft = super().propose(state, num_tokens)
            for b, row in enumerate(draft.tokens.tolist()):
                for i, token in enumerate(row if state.host_active[b] else []):
                    at = int(state.lengths[b]) + i
                    tokens, law = self.law_after([*state.tokens[b, : at - i].tolist(), *row[:i]])
                    logits = torch.full((1, VOCAB), -torch.inf)
                    logits[0, tokens] = torch.from_numpy(law).log().float()
                    keys = sk.noise_keys(state.seeds[b : b + 1], torch.tensor([[at]]))[:, 0]
                    drawn = sk.sample(logits, sk.SamplingParams(1 / self.sharpness), noise_keys=keys).token
                    assert token == int(drawn)
                    compared += 1
            return draft

    out = decode(Drawn(NgramTable.from_tokens(text)), "match")
    assert compared > out.stats.num_accepted > 0


def test_plain_steps_judge_it() -> None:
    """Rows are dear at first, so that nothing is verified; that its guesses are right is known once they are not."""
    cycle = torch.arange(67).roll(-1)
    logits = torch.full((67, 67, 67), -30.0)
    logits[:, torch.arange(67), cycle] = 30.0
    table = NgramTable.from_tokens(torch.arange(67).repeat(3).numpy(), order=2)
    dear = CostTable(np.array([0, 25]), np.array([[1.0, 50, 50, 50], [1.0, 1.4, 50, 50]]))
    steps: list[int] = []
    generate(
        TableRunner(logits), torch.arange(5)[None], drafter=NgramLMDrafter(table), num_speculative_tokens=dear,
        max_new_tokens=60, acceptance="greedy", eos_token_id=[], streamer=lambda rows: steps.append(len(rows[0])),
    )  # fmt: skip
    assert steps[:26] == [1] * 25 + [2], "nothing stood in the text before, and a sixth were assumed to be right"
