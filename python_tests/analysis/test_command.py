"""What a person sees of ``specdec plan`` and ``specdec plot``: a table, JSON, figures, one sentence for an error."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from python_tests.decoding.models import AS_THE_DEMO, Letters, TableRunner, tiny
from specdec_kernels import assets, cli
from specdec_kernels.analysis import command, drafters, planner
from specdec_kernels.assets import corpus, prompts
from specdec_kernels.commands import load_draft
from specdec_kernels.drafters import MedusaDrafter, ModelDrafter, ModelTreeDrafter, NgramDrafter
from specdec_kernels.integrations.transformers.packing import is_packed, pack_linear_weights


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model instead of the demo's, and of every folder."""
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1), Letters()))
    monkeypatch.setattr(corpus, "ngram_table", lambda tokenizer: None)
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: ["to be or not to be", "that is it"] * 8)


FAST = ["--count", "2", "--max-new-tokens", "10", "--num-speculative-tokens", "2", "--batch", "1", "2", "--rounds", "1",
        "--drafter", "lookup", "ngram-lm"]  # fmt: skip


def plan(*more: str) -> int:
    return cli.main(["plan", *FAST, *more])


def test_a_plan_is_printed(small: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "plan.png"
    assert plan("--figure", str(figure)) == 0
    printed = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct on cpu" in printed and "2 prompts of humaneval" in printed
    for temperature in (0, 1):
        for batch in (1, 2):
            assert f"temperature {temperature}, batch {batch}: " in printed
    assert printed.count("ngram-lm  ") >= 4 and f"written: {figure}" in printed and figure.stat().st_size > 10_000


def test_a_plan_as_json_can_be_drawn(
    small: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, measure = [], planner.measure_acceptance

    def note(*of: Any, **how: Any) -> Any:
        noted.append(how["draws"])
        return measure(*of, **how)

    monkeypatch.setattr(planner, "measure_acceptance", note)
    assert plan("--json", "--unpacked", "--temperature", "0.5") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packed"] is False and report["num_prompts"] == 2
    assert noted == [2, 2]  # --draws by default: two drafters
    assert {(r["temperature"], r["batch_size"]) for r in report["best"]} == {(0.5, 1), (0.5, 2)}
    assert [r["drafter"] for r in report["choices"]] == ["lookup", "lookup", "ngram-lm", "ngram-lm"]
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(report))
    for name in ("acceptance", "batch"):
        drawn = tmp_path / f"{name}.png"
        assert cli.main(["plot", name, str(saved), "--output", str(drawn)]) == 0
        assert drawn.stat().st_size > 10_000


def test_a_file_s_first_prompts_are_taken_and_a_set_s_last(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The n-gram model was tuned on a set's first ones."""
    texts = ["to be or not to be", "that is it", "no more of it"]
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer: texts)
    taken, encode = list[list[str]](), prompts.encode
    monkeypatch.setattr(prompts, "encode", lambda tokenizer, of: taken.append(of) or encode(tokenizer, of))
    (file := tmp_path / "x.txt").write_text("\n".join(texts))
    for more in ([], ["--prompt-file", str(file), "--raw"]):
        assert plan("--temperature", "0", "--batch", "1", "--json", *more) == 0
    assert taken == [texts[1:], texts[:2]]


def test_a_tree_of_lookups_is_planned_where_it_is_named(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert "lookup-tree" not in drafters.COMPARED
    assert plan("--drafter", "lookup-tree", "--temperature", "0", "--json") == 0
    chosen = json.loads(capsys.readouterr().out)["choices"]
    assert {(r["drafter"], r["rows"], r["num_speculative_tokens"]) for r in chosen} == {("lookup-tree", 16, 7)}
    assert len(chosen) == 2 and all(r["gain"]["mean"] > 0 and r["tokens_per_step"]["mean"] >= 1 for r in chosen)


def test_cascades_are_drawn_of_their_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "bench/results/cascades"
    if not results.exists():
        pytest.skip("a source distribution holds no results")
    drawn = tmp_path / "cascades.png"
    assert cli.main(["plot", "cascades", str(results / "draft-lengths.json"), "--output", str(drawn)]) == 0
    assert drawn.stat().st_size > 10_000
    assert cli.main(["plot", "cascades", str(results / "next-token.json"), "--output", str(drawn)]) == 2
    assert "does not hold what cascades is drawn from: " in capsys.readouterr().err


def test_a_models_folder_drafts_or_is_drafted_for(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(assets, "load_folder", lambda folder: (tiny("llama", 1), Letters()))
    texts = tmp_path / "prompts.txt"
    texts.write_text('to be\n\n"or\\nnot"\n')
    arguments = ["--model", str(tmp_path), "--draft-model", str(tmp_path), "--prompt-file", str(texts), "--json"]
    assert plan(*arguments, "--temperature", "0") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == tmp_path.name and report["num_prompts"] == 2 and report["prompts"] == "prompts.txt"
    assert {r["drafter"] for r in report["choices"]} == {"lookup", "ngram-lm", "model", "model-tree"}
    of_model = [r for r in report["choices"] if r["drafter"] == "model"]
    assert [r["tokens_per_step"]["mean"] for r in of_model] == [3.0, 3.0]  # the same model: all is accepted
    of_trees = [r for r in report["choices"] if r["drafter"] == "model-tree"]
    assert [(r["rows"], r["num_speculative_tokens"]) for r in of_trees] == [(6, 2), (6, 2)]
    assert all(r["tokens_per_step"]["mean"] >= 2.0 for r in of_trees)  # the likeliest token is always among the nodes


def test_a_draft_model_whose_vocabulary_is_padded_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vocabulary:
        def __init__(self, *words: str) -> None:
            self.get_vocab = lambda: {word: i for i, word in enumerate(words)}

    target, given = tiny("llama"), argparse.Namespace(draft_model=Path("draft"), device="cpu")
    for size, own, ids in ((50, "ab", [*range(50)]), (70, "ab", [*range(61)]), (50, "ac", None), (61, "ac", None)):
        loaded = tiny("llama", vocab_size=size), Vocabulary(*own)
        monkeypatch.setattr(assets, "load_folder", lambda folder, loaded=loaded: loaded)
        draft = load_draft(given, target, Vocabulary(*"ab"))
        assert getattr(draft.config, "draft_token_ids", None) == ids


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--model", "."], "plan: . must be a folder of a transformers model, and has no config"),
        (["plan", *FAST, "--heads", __file__, "--drafter", "medusa"], "plan: "),
        (["plan", "--drafter"], "plan: --drafter or --draft-model must name one or more, got none"),
        (["plan", "--raw"], "plan: --raw must be given with --prompt-file, got it alone"),
        (
            ["plan", "--prompt-file", ".", "--sets", "chat"],
            "plan: prompts must be given once, got --sets and ",
        ),
        (
            ["plan", "--heads", ".", "--drafter", "lookup"],
            "plan: --heads must be given with --drafter medusa, got ",
        ),
        (["plan", "--model", ".", "--drafter", "medusa"], "plan: --drafter medusa needs --heads, the Medusa heads of"),
        (["plot", "acceptance"], "plot: figure acceptance takes a JSON file, got none"),
        (["plot", "best-gamma", "."], "plot: figure best-gamma takes no file, got ."),
        (["plot", "measured", "."], "plot: . must be a file, got a folder"),
        (
            ["plot", "expected-tokens", "--output", "no/such/folder.png"],
            "plot: --output must be in a folder that is there",
        ),
        (["plan", *FAST, "--figure", "no/such/folder.png"], "plan: --figure must be in a folder that is there"),
        (["plan", *FAST, "--figure", "x.poem"], "plan: --figure must end with one of .eps, "),
        (["plan", *FAST, "--figure", "{folder}.png"], "plan: --figure must be a file that can be written, got "),
    ],
)
def test_one_sentence_for_an_error(
    small: None, arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    assert cli.main([argument.replace("{folder}", str(tmp_path / "folder")) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence) and said.count("\n") == 1, said


@pytest.mark.parametrize("arguments", [["plot", "best-gamma", "--output"], ["plan", *FAST, "--figure"]])
def test_a_figure_that_a_program_is_missing_for(
    arguments: list[str], small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", str(tmp_path))  # without LaTeX
    assert cli.main([*arguments, str(tmp_path / "x.pgf")]) == 2
    said = capsys.readouterr().err
    assert f"{arguments[-1]} must end as what can be written here, got " in said and said.count("\n") == 1, said


@pytest.mark.parametrize("text", ["[]", "{", '{"rows": []}', '{"choices": [{"drafter": "x"}]}'])
def test_a_file_of_something_else(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    assert cli.main(["plot", "batch", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "does not hold what batch is drawn from" in said and (
        "rows" not in text or "its rows must not be empty" in said
    )


def test_rows_of_auto_alone_draw_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"drafter": "lookup", "num_speculative_tokens": "auto", "temperature": 0}
    row |= dict.fromkeys(("ratio", "ratio_min", "ratio_max"), 1)
    (tmp_path / "x.json").write_text(json.dumps({"rows": [row]}))
    assert cli.main(["plot", "techniques", str(tmp_path / "x.json")]) == 2
    assert 'rows must have a num_speculative_tokens other than "auto"' in capsys.readouterr().err


def test_what_was_measured_is_printed_before_a_figure_fails(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.plots, "save", Mock(side_effect=OSError(28, "No space left on device")))
    assert plan("--json", "--figure", str(tmp_path / "plan.png")) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["choices"] and printed.err == "plan: the disk is full\n"


def test_a_damaged_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    assert cli.main(["plan", "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"plan: the model in {tmp_path} cannot be read: ") and said.count("\n") == 1


@pytest.mark.parametrize("text", ["", "\n\n", '"unclosed\n', r'"half of \ud83d"'])
def test_a_bad_file_of_prompts(small: None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_text(text)
    assert plan("--prompt-file", str(tmp_path / "x.txt")) == 2
    assert capsys.readouterr().err.startswith(f"plan: {tmp_path / 'x.txt'}")


@pytest.mark.parametrize(
    "arguments", [["plan", "--count", "0"], ["plot"], ["plot", "poem"], ["plan", "--drafter", "x"]]
)
def test_bad_options_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert f"usage: specdec {arguments[0]}" in capsys.readouterr().err


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def without(name: str, package: str) -> None:
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(cli.importlib, "import_module", without)
    assert cli.main(["plan"]) == 2
    assert (
        capsys.readouterr().err
        == "plan: needs the 'analysis' extra (pip install 'specdec_kernels[analysis]'): No module named 'matplotlib'\n"
    )


def test_drafters_by_name() -> None:
    model: Any = tiny("llama", **AS_THE_DEMO)
    names = ["medusa", "lookup", "model", "model-tree"]
    made = drafters.make(names, model, Letters(), corpus=False, draft_model=tiny("llama"))
    assert [type(drafter) for drafter in made.values()] == [MedusaDrafter, NgramDrafter, ModelDrafter, ModelTreeDrafter]
    assert list(made) == names and not is_packed(made["medusa"].heads)  # type: ignore[attr-defined]
    draft, runner = tiny("llama"), TableRunner.random()
    with pack_linear_weights(model):
        packed = drafters.make(["medusa"], model, Letters(), corpus=False, draft_model=draft)
        assert is_packed(packed["medusa"].heads) and not is_packed(draft)  # type: ignore[attr-defined]
        for name in ("model", "model", "model-tree"):  # the first packs it
            made = drafters.make([name], model, Letters(), corpus=False, draft_model=draft)
            assert list(made) == [name] and is_packed(draft)
        for other in (runner, model, tiny("llama").bfloat16()):
            kept = drafters.make(["model"], model, Letters(), corpus=False, draft_model=other)["model"]
            assert is_packed(other) == (other is model) and kept.draft_model is other  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError,
        match="^make: names must be of lookup, ngram-lm, medusa, lookup-tree, none, model, model-tree, got 'magic'",
    ):
        drafters.make(["magic"], model, Letters(), corpus=False)
    for name in drafters.OF_DRAFT_MODEL:
        with pytest.raises(ValueError, match=f"^make: draft_model must be given for '{name}', got None"):
            drafters.make([name], model, Letters(), corpus=False)


def test_trees_of_a_draft_model_are_planned_where_both_models_take_them() -> None:
    takes, not_trees = tiny("llama"), tiny("t5")
    assert drafters.of_draft_model(takes, takes) == drafters.OF_DRAFT_MODEL
    assert drafters.of_draft_model(takes, not_trees) == drafters.of_draft_model(not_trees, takes) == ("model",)


def test_prompts_are_fed_as_a_model_begins_its_texts() -> None:
    """With the token that it puts before a text, once; and a file's prompts in its chat template."""

    class Begins(Letters):
        chat_template = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            ids = [1] if text.startswith("<s>") else []
            ids += super().encode(text.removeprefix("<s>"), False)
            return [1, *ids] if add_special_tokens else ids

    tokenizer: Any = Begins()
    plain = Letters().encode("ab", False)
    assert prompts.ids_of(tokenizer, "ab") == [1, *plain] == prompts.ids_of(tokenizer, "<s>ab")
    ids, mask = prompts.encode(tokenizer, ["ab", "<s>abb"])
    assert ids[0, 1:].tolist() == [1, *plain] and mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]


def test_a_line_ends_at_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('"first\u2028second"\na\x0cb\n', encoding="utf-8")
    assert command._read_prompts(path) == ["first\u2028second", "a\x0cb"]
