"""verify_chain over a sharded vocabulary, on every backend: every rank has the op's own output on the whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels as sk
from python_tests.distributed.cases import RULES, S, make
from python_tests.distributed.ranks import columns, on_every_rank, same, sharded
from python_tests.ops import chains
from python_tests.ops.inputs import refuses, seeded
from python_tests.support import Backend, environment

OP = "verify_chain"
EMULATED_CASES = 12
TILE = 1024
WIDTHS = {  # borders at tiles, inside tiles, several in one tile, at a tile's last id, a rank without a tile
    "whole tiles": (2048, 1024),
    "inside": (1300, 1500),
    "tiny": (1100, 7, 3, 1900),
    "one off": (1023, 1, 1025, 1),
    "last alone": (1024, 1025, 1),
}


def check(backend: Backend, arguments: chains.Arguments, widths: tuple[int, ...]) -> sk.VerifyOutput:
    arguments = chains.on(backend, arguments)
    whole: sk.VerifyOutput = backend.verify_chain(**arguments)
    same(whole, sharded(arguments, widths, backend.name)[0])
    return whole


@pytest.mark.short(cases=6, emulated=3, triton=1)
@pytest.mark.parametrize("layout", WIDTHS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_have_the_ops_output(backend: Backend, name: str, layout: str, dtype: torch.dtype) -> None:
    widths = WIDTHS[layout]
    for seed in range(1 if backend.interpreted else 4):
        check(backend, make(name, sum(widths), dtype, seed), widths)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["block", "top-k, top-p, block", "top-p", "each its own", "draft cut", "match top-p"])
def test_the_default_dtype_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """One rank, or several of which one has no tile."""
    for widths, more in (((1030, 10, 1960), {}), ((3000,), {"params": S(1.3, top_p=0.97)} if "top-p" in name else {})):
        arguments = make(name, sum(widths)) | more
        whole = sk.verify_chain(**arguments)
        torch.set_default_dtype(dtype)
        try:
            same(whole, sharded(arguments, widths, "cpu")[0])
        finally:
            torch.set_default_dtype(torch.float32)


def test_checks_look_at_the_outcome_alone() -> None:
    """SPECDEC_CHECK=1 raises where the op's status is set, not for a row that nobody came to."""
    arguments = make("draft cut", 3000)
    arguments["draft_logits"][1, 2, 7] = torch.nan
    arguments["num_draft_tokens"] = torch.tensor([3, 1, 3, 3])
    clean = sk.verify_chain(**arguments)
    assert (clean.status == 0).all()
    with environment(SPECDEC_CHECK="1"):
        same(clean, sharded(arguments, (1500, 1500), "cpu")[0])
        arguments["target_logits"][2, 0, 5] = torch.nan
        with pytest.raises(RuntimeError, match="verify_chain: row 2 set"):
            sharded(arguments, (1500, 1500), "cpu")


def test_the_cases_accept_and_reject() -> None:
    """In each of them: else nothing of the masses would be seen."""
    for name in RULES:
        counts = [sk.verify_chain(**make(name, 3072, seed=seed)).num_accepted for seed in range(6)]
        assert 0 < torch.stack(counts).float().mean() < 3, name


@pytest.mark.short(cases=4, emulated=2, triton=1)
@pytest.mark.parametrize(
    "name", ["token", "block", "token one-hot", "token probs", "match", "top-k", "draft cut", "top-p", "match top-p"]
)
def test_bad_values_have_the_same_flags(backend: Backend, name: str) -> None:
    """NaN, infinities and empty rows at either side of a border, tokens that are none, coins out of range."""
    widths = (1300, 1500)
    arguments = make(name, sum(widths))
    for which in ("target_logits", "draft_logits"):
        if which in arguments:
            rows = arguments[which]
            rows[0, 0, 1299], rows[0, 1, 1300], rows[1, 0, 2700], rows[1, 1, 5] = (
                torch.nan,
                torch.nan,
                torch.inf,
                torch.inf,
            )
            rows[2, 0] = -torch.inf
            rows[2, 2, 7] = torch.nan  # a row that no rule comes to
            rows[3, 1, 1:] = -torch.inf
    if "draft_probs" in arguments:
        arguments["draft_probs"][0, 0, 1400], arguments["draft_probs"][1, 0, 3] = torch.nan, -1.0
        arguments["draft_probs"][2, 0] = 0.5
    arguments["draft_tokens"][3, 2] = 5000
    if "uniform_samples" in arguments:
        arguments["uniform_samples"][0, 1], arguments["uniform_samples"][3, 0] = 1.0, torch.nan
    bad = check(backend, arguments, widths)
    assert bad.status.ne(0).sum() >= 2


@pytest.mark.short(cases=4, emulated=1, triton=1)
@pytest.mark.parametrize("name", ["top-k, top-p, block", "top-k probs", "top-p, block", "top-p probs", "block"])
def test_empty_rows_weigh_the_draft_s_first_id(backend: Backend, name: str) -> None:
    """The op makes id 0 certain there, so the block rule looks at what the draft gives it."""
    widths = (1300, 1500)
    arguments = make(name, sum(widths), batch=32)
    arguments["target_logits"][:, 1] = -torch.inf
    if "draft_logits" in arguments:
        arguments["draft_logits"][:, 1, 0] = arguments["draft_logits"][:, 1].amax(-1)
    else:
        arguments["draft_probs"][:, 1] *= 0.7
        arguments["draft_probs"][:, 1, 0] += 0.3
    assert check(backend, arguments, widths).num_accepted.float().mean() > 0.2


@pytest.mark.short(cases=6, emulated=1, triton=1)
@pytest.mark.parametrize("name", ["token", "block", "flat", "greedy", "top-k", "top-p"])
def test_lengths_ends_and_seeds(backend: Backend, name: str) -> None:
    arguments, widths = make(name, 2800), (1300, 1500)
    arguments["num_draft_tokens"] = torch.tensor([3, 0, -1, 7])
    arguments["eos_token_ids"] = arguments["draft_tokens"][0, 1:2].clone()
    check(backend, arguments, widths)
    if arguments.pop("uniform_samples", None) is not None:
        check(backend, {**arguments, "seeds": torch.arange(4), "step": torch.arange(4)}, widths)


@pytest.mark.parametrize("name", ["token", "flat"])
def test_a_draft_token_that_its_distribution_cannot_give(backend: Backend, name: str) -> None:
    arguments = make(name, 2800)
    token = arguments["draft_tokens"][:, 0]
    arguments["draft_logits"][torch.arange(4), 0, token] = -torch.inf
    assert (check(backend, arguments, (1300, 1500)).status & sk.Status.BAD_DRAFT).ne(0).any()


def test_bad_parameters_are_read_as_off(backend: Backend) -> None:
    bad = S(
        torch.tensor([torch.nan, -1.0, 1.0, 0.8]), top_k=torch.tensor([0, 9, -3, 5000]),
        top_p=torch.tensor([1.0, torch.nan, 1.0, 2.0]), min_p=torch.tensor([0.1, 0.1, 2.0, torch.nan]),
    )  # fmt: skip
    arguments = make("token", 2800)
    out = check(backend, {**arguments, "params": bad, "draft_params": bad}, (1300, 1500))
    assert (out.status & sk.Status.BAD_PARAM != 0).all()


@pytest.mark.parametrize("name", ["token probs", "block probs"])
def test_nothing_left_after_a_rejection(backend: Backend, name: str) -> None:
    """Q above P everywhere, as far as a draft may be off: the token is drawn from P."""
    arguments = make(name, 2800)
    arguments["draft_probs"] = arguments["target_logits"][:, :3].softmax(-1) * 1.008
    arguments["uniform_samples"][:, 1:] = 1 - 2.0**-24
    out = check(backend, arguments, (1300, 1500))
    assert (out.num_accepted == 0).all() and (out.num_tokens == 1).all()


@pytest.mark.parametrize(("batch", "num_draft"), [(3, 0), (0, 2)])
def test_no_draft_tokens_and_no_sequences(backend: Backend, batch: int, num_draft: int) -> None:
    for params in (S(), S(top_k=5), S(top_p=0.9)):
        arguments = chains.make(seeded(), batch, num_draft, 2800, kind="one_hot", params=params)
        check(backend, arguments, (1300, 1500))


@pytest.mark.parametrize("layout", WIDTHS)
def test_bytes_are_as_many_as_the_formula_says(layout: str) -> None:
    """None of them grows with the vocabulary but by its tiles."""
    widths = WIDTHS[layout]
    arguments, world = make("block", sum(widths)), len(widths)
    batch, num_draft, starts = 4, 3, [sum(widths[:r]) for r in range(world + 1)]
    first = [-(-s // TILE) for s in starts]
    tiles = max(b - a for a, b in zip(first, first[1:], strict=False))
    strays = max(min(starts[r + 1], first[r] * TILE) - starts[r] for r in range(world))
    rows = 2 * num_draft + 1
    expected = {
        "widths": 8,
        "ids of tiles that shards share": batch * rows * strays * 4,
        "stats and largest logits": batch * rows * (2 * 4 * tiles + 8 + 4 + 4),
        "masses of what the block rule leaves": batch * (num_draft + 1) * tiles * 4,
        "drawn tokens": batch * 8,
    }
    for sent in sharded(arguments, widths, None)[1].sent:
        assert sent == {name: size for name, size in expected.items() if size}
    assert tiles * TILE > max(widths) - TILE


@pytest.mark.parametrize("kind", ["one_hot", "full"])
def test_bytes_of_a_cut_row_are_those_of_the_ids_that_may_be_kept(kind: str) -> None:
    widths, k, batch, rows, tiles = (2048, 1024), 20, 4, 4, 2
    arguments = chains.make(seeded(), batch, rows - 1, 3072, kind=kind, params=S(top_k=k))
    size = batch * rows * (8 + (k + 1) * (4 + 4))
    if kind == "full":  # the draft's stats, and what it has at the target's ids
        size += batch * (rows - 1) * (2 * 4 * tiles + 8 + 4 + 4 + (k + 1) * 4)
    for sent in sharded(arguments, widths, None)[1].sent:
        assert sent == {"widths": 8, "stats and largest logits": size}


def test_bytes_of_a_cut_sequence_are_sent_of_no_other() -> None:
    """What one of a batch asks for is not sent of those beside it, of the draft's rows neither."""
    widths, batch, num_draft, tiles, k, draft_k = (2048, 1024), 4, 3, 2, 400, 700
    params = S(top_k=torch.tensor([0, k, 0, 0]))
    arguments = chains.make(seeded(), batch, num_draft, 3072, kind="full", params=params)
    arguments["draft_params"] = S(top_k=torch.tensor([0, 0, draft_k, 9]))
    arguments |= {name: arguments[name].bfloat16() for name in ("target_logits", "draft_logits")}
    outs, ranks = sharded(arguments, widths, None)
    same(sk.verify_chain(**arguments), outs)
    size = batch * (2 * num_draft + 1) * (2 * 4 * tiles + 8 + 4 + 4)  # all rows' stats
    size += (num_draft + 1) * (8 + (k + 1) * (4 + 2)) + num_draft * (k + 1) * 2
    size += 2 * num_draft * (8 + (draft_k + 1) * (4 + 2))
    for sent in ranks.sent:
        assert sent["stats and largest logits"] == size


LAUNCHES = {  # where shards begin at tiles, and their widths are told
    **dict.fromkeys(RULES, 1 + 1),  # what rows hold: all that rows that are cut, and greedy ones, need
    **dict.fromkeys(["token", "token one-hot", "token probs", "draft cut", "each its own"], 1 + 3),  # masses, token
    **dict.fromkeys(["block", "block probs", "temperatures", "flat", "some drafts greedy", "draft cut, block"], 1 + 3),
    "match": 1 + 2,
    "top-p, flat": 1 + 1 + 4,  # more than is listed: ranges, twice, numbers, candidates
    "each its top-p": 1 + 1 + 4,  # one that is all but 1: ranges, numbers, candidates, and a row that is told whole
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_collectives(name: str) -> None:
    arguments = make(name, 3072)
    outs, ranks = sharded(arguments, (2048, 1024), None)
    same(sk.verify_chain(**arguments), outs)
    assert {launches.total() for launches in ranks.launches} == {LAUNCHES[name]}


@pytest.mark.parametrize(
    ("acceptance", "kind"), [("token", "full"), ("match", "one_hot"), ("block", "one_hot"), ("block", "full")]
)
def test_nothing_is_drawn_of_greedy_rows(acceptance: str, kind: str) -> None:
    """No rank has to be asked for masses, scores or a token, but by the block rule for what it weighs of a draft's."""
    arguments = chains.make(seeded(), 4, 3, 3072, acceptance=acceptance, kind=kind, spread=5.0, params=S(0.0))
    outs, ranks = sharded(arguments, (2048, 1024), None)
    same(sk.verify_chain(**arguments), outs)
    masses = {"masses of what the block rule leaves"} if (acceptance, kind) == ("block", "full") else set()
    assert ranks.launches[0].keys() == {"widths", "stats and largest logits"} | masses


@pytest.mark.parametrize("ties", [False, True])
def test_ties_at_the_end_of_a_list_are_seen(backend: Backend, ties: bool) -> None:
    """A rank that has all of a row's top-k may have more that are as large: then it is asked again."""
    arguments, k = chains.make(seeded(), 3, 2, 3072, params=S(top_k=5), kind="full"), 5
    logits = arguments["target_logits"]
    logits.clamp_(max=8.0)
    logits[..., 10 : 10 + k + 2 * ties] = 9.0
    outs, ranks = sharded(chains.on(backend, arguments), (2048, 1024), backend.name)
    same(backend.verify_chain(**chains.on(backend, arguments)), outs)
    assert ("candidates" in ranks.launches[0]) is ties


def test_given_widths_save_a_round() -> None:
    arguments, widths = make("token", 2800), (1300, 1500)

    def run(group: Any, rank: int) -> sk.VerifyOutput:
        return sk.distributed.verify_chain(**columns(arguments, widths, rank), group=group, widths=widths)

    outs, ranks = on_every_rank(2, run)
    same(sk.verify_chain(**arguments), outs)
    assert "widths" not in ranks.sent[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target_law": sk.laws.Opt(0.3)}, ValueError, "distributed.verify_chain: target_law must be None"),
        ({"return_acceptance": True}, ValueError, "distributed.verify_chain: return_acceptance must be False"),
        ({"draft_stats": 3}, ValueError, "distributed.verify_chain: draft_stats must be None"),
        ({"backend": "cuda"}, ValueError, "distributed.verify_chain: backend='cuda' cannot run here"),
        ({"draft_token_map": 3}, ValueError, "distributed.verify_chain: draft_token_map must be None"),
        ({"tree": 3}, TypeError, "distributed.verify_chain: got an unexpected argument 'tree'"),
        ({"acceptance": "typical"}, ValueError, "distributed.verify_chain: acceptance must be one of"),
        ({"uniform_samples": None}, ValueError, "distributed.verify_chain: acceptance='token' needs uniform_samples"),
        ({"widths": (2800, 1)}, ValueError, "distributed.verify_chain: widths must be >= 1 and those of 1 shards"),
        ({"draft_tokens": torch.zeros(4, 2)}, TypeError, "distributed.verify_chain: draft_tokens must be int64"),
        (
            {"target_logits": torch.zeros(4, 4, 900), "draft_logits": torch.zeros(4, 3, 900)}, ValueError,
            "distributed.verify_chain: target_logits must have more than 1024 ids over all ranks, got 900",
        ),
    ],
)  # fmt: skip
def test_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    def call(**arguments: Any) -> None:
        on_every_rank(1, lambda group, rank: sk.distributed.verify_chain(**arguments, group=group))

    refuses(call, make("token", 2800), change, error, message)


def test_a_rule_that_is_not_written_for_shards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptance rule that is added to the op must not run as another one here."""
    from specdec_kernels.ops.arguments import ACCEPTANCES

    monkeypatch.setitem(ACCEPTANCES, "another", len(ACCEPTANCES))
    with pytest.raises(ValueError, match=r"distributed\.verify_chain: acceptance must be one of"):
        on_every_rank(
            1,
            lambda group, rank: sk.distributed.verify_chain(
                **make("token", 2800) | {"acceptance": "another"}, group=group
            ),
        )


def test_torch_distributed_must_be_initialised() -> None:
    with pytest.raises(RuntimeError, match=r"distributed\.verify_chain: torch\.distributed must be initialised"):
        sk.distributed.verify_chain(**make("token", 2800))
