"""The end-to-end bench on a model that is instant: ways of decoding, rows and figures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels as sk
from bench import end_to_end, real_model
from bench.end_to_end import PLAIN
from bench.real_model import ReadOnce
from bench.turns import InTurns
from examples.own_loop import LeanLlama
from python_tests.decoding.models import prompts, tiny
from specdec_kernels import assets
from specdec_kernels.medusa import MedusaHeads


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_random_trees_have_the_size_asked_for(nodes: int) -> None:
    trees = [end_to_end.random_tree(4, 10, nodes, seed) for seed in range(20)]
    for tree in trees:
        assert tree.num_nodes == nodes and tree.max_depth <= 4 and not tree.status.any()
        assert tree.ranks is not None and int(tree.ranks.max()) < 10
    assert nodes == 2 or len({tuple(tree.parents.tolist()) for tree in trees}) > 5


def test_medusa_is_measured_losslessly_typically_and_on_random_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    heads = MedusaHeads.of_model(model, 3, sk.TokenMap(torch.arange(3, 60)))
    path = tmp_path / "heads.safetensors"
    heads.save(path)
    with pytest.raises(ValueError, match="must be calibrated"):
        end_to_end.ways_of(["medusa"], model, None, path)
    heads.accuracy = torch.linspace(0.5, 0.1, 5, dtype=torch.float64).expand(3, 5)
    heads.save(path)
    monkeypatch.setattr(end_to_end, "TREE_NODES", (4, 8))
    batches = [prompts(4, 6)]
    names = ["medusa", "lookup-tree"]
    ways = {**end_to_end.ways_of(names, model, None, path), **end_to_end.ways_of(names, model, None, path, seed=0)}
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1

    rows = []
    for temperature in (0.0, 1.0):
        sampling = sk.SamplingParams(temperature)
        results = end_to_end.measure(model, batches, ways, sampling, rounds=2, max_new_tokens=12, advance=advance)
        rows += end_to_end.rows_of("texts", temperature, results)
    kinds = [(r["drafter"], r["num_speculative_tokens"]) for r in rows if r["temperature"] == 0]
    assert ("medusa, random tree", 4) in kinds and ("lookup-tree", 8) in kinds and ("medusa", 8) in kinds
    chain: Any = ways["medusa, heads alone", 4].drafter
    assert chain.tree.parents.tolist() == [-1, 0, 1, 2] and ("medusa, heads alone", 4) in kinds
    assert not any("typical" in drafter for drafter, _ in kinds)
    sampled = {r["drafter"]: r for r in rows if r["temperature"] == 1 and r["num_speculative_tokens"] == 8}
    assert sampled["medusa, typical"]["mean_acceptance_length"] > sampled["medusa"]["mean_acceptance_length"] >= 1
    assert all(r["batches_differing"] == 0 for r in rows) and done == 2 * len(rows)
    assert all(isinstance(length, int) for _, length in end_to_end.ways_of(["medusa"], model, None, path, seed=0))
    for draw in (end_to_end.plot, end_to_end.plot_trees):
        draw(rows, tmp_path / "figure.png", "a figure")
        assert (tmp_path / "figure.png").stat().st_size > 5000


def test_random_trees_are_a_matter_of_their_seed() -> None:
    random.seed(5)
    one = end_to_end.random_tree(3, 5, 20, 1)
    random.seed(6)
    assert torch.equal(end_to_end.random_tree(3, 5, 20, 1).parents, one.parents)


def test_auto_is_set_against_the_best_fixed_length_round_by_round() -> None:
    plain = end_to_end.Result([10] * 3, [10] * 3, [10] * 3, [1.0, 4.0, 2.0])
    results = {
        PLAIN: plain, ("lookup", 3): end_to_end.Result([20, 10, 20], [20, 10, 20], [9] * 3, plain.seconds),
        ("lookup", 7): end_to_end.Result([9] * 3, [9] * 3, [9] * 3, plain.seconds),
        ("lookup", "auto"): end_to_end.Result([18, 10, 18], [18, 10, 18], [9] * 3, plain.seconds),
    }  # fmt: skip
    found = {t["what"]: t["measured"] for t in end_to_end.targets_of(end_to_end.rows_of("chat", 1.0, results))}
    assert found["auto, any set: smallest ratio to plain"] == pytest.approx(1.8)
    (share,) = (measured for what, measured in found.items() if "round by round" in what)
    assert share == pytest.approx(0.9)


def test_a_tree_that_is_left_out_where_it_does_not_pay_is_held_against_the_same_tree() -> None:
    ways = end_to_end.ways_of(["lookup-tree"], None, None, Path(), lengths=[3, "auto"])
    trees = {(number, way.num_speculative_tokens) for (_, number), way in ways.items() if way.num_speculative_tokens}
    assert trees == {(8, 7), ("auto, 8", "auto"), (16, 7), ("auto, 16", "auto")}
    rates = {8: 1.2, "auto, 8": 1.1, 16: 2.0, "auto, 16": 0.5}
    rows: list[dict[str, Any]] = [
        {
            "prompts": "chat", "temperature": 0.0, "drafter": "lookup-tree", "num_speculative_tokens": number,
            "ratio": rate, "rates": [rate], "batches_differing": 0,
        }
        for number, rate in rates.items() if number != "auto, 16"
    ]  # fmt: skip
    assert [goal["measured"] for goal in end_to_end.targets_of(rows)] == pytest.approx([1.1, 1.1 / 1.2, 0])


def test_ways_side_by_side_share_weights_and_nothing_else() -> None:
    target = LeanLlama(tiny("llama"))
    draft = sk.ModelDrafter(LeanLlama(tiny("llama", 1)))
    ways = {
        PLAIN: end_to_end.Way(sk.NoDrafter()), ("lookup", 3): end_to_end.Way(sk.NgramDrafter(), 3),
        ("model", 3): end_to_end.Way(draft, 3), ("model", 1): end_to_end.Way(draft, 1),
    }  # fmt: skip
    apart = {key: end_to_end.by_itself(way, target) for key, way in ways.items()}
    models, drafters = [way.model for way in apart.values()], [way.drafter for way in apart.values()]
    assert models[0].layers[0].qkv is models[1].layers[0].qkv and models[0].layers[0] is not models[1].layers[0]
    assert drafters[1] is not ways["lookup", 3].drafter
    own = [drafter.runner for drafter in drafters[2:]]
    assert own[0].layers[0].qkv is own[1].layers[0].qkv and own[0].layers[0] is not own[1].layers[0]
    with InTurns(len(apart)) as in_turns:
        results = end_to_end.measure(
            target, [prompts(4, 6)], apart, sk.SamplingParams(0.0), rounds=2, max_new_tokens=12, advance=lambda: None,
            run=in_turns,
        )  # fmt: skip
    for result in results.values():
        assert result.differing == 0 and all(seconds > 0 for seconds in result.seconds)
    assert results[PLAIN].tokens == results["lookup", 3].tokens == results["model", 3].tokens


def test_copies_read_a_batch_once_and_decode_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three batches the last two are kept, for any copy and any room."""
    target, read = ReadOnce(tiny("llama"), 2), []
    forward = LeanLlama.prefill
    monkeypatch.setattr(LeanLlama, "prefill", lambda self, prompt: (read.append(prompt.longest), forward(self, prompt)))
    way = end_to_end.Way(sk.NoDrafter())
    copies = [end_to_end.by_itself(way, target).model for _ in range(2)]
    batches = [prompts(4, 6), prompts(5, 5), prompts(3, 7)]

    def decode(model: Any, batch: Any, new: int = 8) -> torch.Tensor:
        ids, mask = batch
        return sk.generate(
            model, ids, attention_mask=mask, drafter=sk.NoDrafter(), sampling=sk.SamplingParams(0.0), max_new_tokens=new
        ).tokens

    expected = [decode(LeanLlama(tiny("llama")), batch) for batch in batches]
    read.clear()
    for model in copies:
        for batch, wanted in zip(batches[:2], expected, strict=False):
            assert torch.equal(decode(model, batch), wanted)
    assert torch.equal(decode(copies[0], batches[0], 4), expected[0][:, :4])
    assert read == [6, 5]
    assert torch.equal(decode(copies[1], batches[2]), expected[2])
    assert torch.equal(decode(copies[1], batches[0]), expected[0])
    assert read == [6, 5, 7, 6] and len(target.read) == 2


def test_a_round_decodes_the_next_batch() -> None:
    """Of three batches four rounds decode the first twice, where all four rounds of the other way decode all three."""
    batches, ways, seen = [prompts(4), prompts(5), prompts(6)], {PLAIN: end_to_end.Way(sk.NoDrafter())}, []

    def decode(model: Any, ids: torch.Tensor, **given: Any) -> Any:
        seen.append(ids.shape[1])
        return sk.generate(model, ids, **given)

    kw: dict[str, Any] = {"rounds": 4, "max_new_tokens": 2, "advance": lambda: None, "decode": decode}
    end_to_end.measure(tiny("llama"), batches, ways, sk.SamplingParams(0.0), one_batch=True, **kw)
    assert seen == [4, 5, 6, 4]
    seen.clear()
    end_to_end.measure(tiny("llama"), batches, ways, sk.SamplingParams(0.0), **kw)
    assert seen == [4, 5, 6] * 4


def test_first_calls_know_nothing_of_each_other() -> None:
    model, drafter, (ids, mask) = LeanLlama(tiny("llama")), sk.NgramDrafter(2), prompts(4)
    how: dict[str, Any] = {"attention_mask": mask, "drafter": drafter, "max_new_tokens": 40, "eos_token_id": []}
    costs = [call(model, ids, **how).stats.costs for call in [end_to_end.first_call] * 2 + [sk.generate] * 2]
    assert all(of is not None for of in costs)
    assert [of.compared for of in costs if of is not None] == [False, False, False, True]


@pytest.mark.parametrize("option", ["--in-turns", "--first-calls"])
def test_what_is_for_the_own_loop_alone(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        end_to_end.main([option])
    assert f"{option} needs --own-loop" in capsys.readouterr().err


def test_a_draft_model_is_for_the_own_loop_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--own-loop"], ["--draft-model", "."]):
        with pytest.raises(SystemExit):
            end_to_end.main(["--drafter", "model", *given])
        assert "--drafter model needs --draft-model and --own-loop" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [["--draft-model", "."], ["--min-confidence", "0.4"], ["--heads", "."], ["--trees", "3"]],
    ids=lambda given: given[0],
)
def test_what_another_drafter_takes_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        end_to_end.main(["--drafter", "lookup", *given])
    assert f"{given[0]} must be given with --drafter m" in capsys.readouterr().err


def test_no_round_decodes_texts_of_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"chat": ["a"] * 30, "quote": ["a"] * 11}
    monkeypatch.setattr(real_model, "load", lambda arguments, last: (tiny("llama"), None, texts))
    assert end_to_end.main(["--one-batch", "--batch", "4", "--rounds", "3"]) == 2
    assert "each set must have --rounds × --batch = 12 prompts, got 11 of quote" in capsys.readouterr().err


def test_drafters_have_the_names_of_all_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model runs in the loop that is asked for."""
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama"), None))
    model, names = tiny("llama"), ("lookup", "lookup-16", "lookup-tree", "model")
    for loop in (LeanLlama, ReadOnce):
        made = real_model.drafters_of(names, model, None, tmp_path, loop)
        assert tuple(made) == names and type(made["model"].runner) is loop
        assert [made[name].n for name in names[:2]] == [sk.NgramDrafter().n, 16]
    ways = end_to_end.ways_of(["model"], model, None, tmp_path, lengths=(3,), draft_model=tmp_path)
    assert type(ways["model", 3].drafter.runner) is ReadOnce


def test_a_draft_model_that_stops_is_a_way_beside_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama"), None))
    ways = end_to_end.ways_of(
        ["lookup", "model"],
        tiny("llama"),
        None,
        tmp_path,
        lengths=(3, "auto"),
        draft_model=tmp_path,
        min_confidence=0.4,
    )
    models = {key: way.drafter.min_confidence for key, way in ways.items() if isinstance(way.drafter, sk.ModelDrafter)}
    assert models == {
        ("model", 3): 0.0, ("model", "auto"): 0.0, ("model, 0.4", 3): 0.4, ("model, 0.4", "auto"): 0.4
    }  # fmt: skip
