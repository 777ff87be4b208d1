"""The bench of target laws: its curves and tables on hand-made points, both tasks from end to end on tiny models."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import specdec_kernels as sk
from bench import machine, plot
from bench.cascades import __main__, generation, next_token, report, rewriting, rules, training
from bench.cascades.results import best_quality, curves, least_cost, markdown
from bench.cascades.rules import Laws, spread_alphas
from specdec_kernels.testing import float64_target_law

POINTS = [{"q": 0.5, "c": 0.2}, {"q": 0.7, "c": 0.4}, {"q": 0.6, "c": 1.0}]


def test_costs_and_qualities_are_read_off_a_curve_that_is_straight_between_points() -> None:
    assert least_cost(POINTS, "q", "c", 0.7) == pytest.approx(0.4)
    assert least_cost(POINTS, "q", "c", 0.6) == pytest.approx(0.3)
    assert least_cost(POINTS, "q", "c", 0.71) is None
    assert best_quality(POINTS, "q", "c", 0.3) == pytest.approx(0.6)
    assert best_quality(POINTS, "q", "c", 2.0) == pytest.approx(0.7)
    assert best_quality(POINTS, "q", "c", 0.1) is None


def test_points_without_a_cost_are_left_out() -> None:
    points = [{"q": 0.9, "c": None}, {"q": 0.5, "c": 0.2}, {"q": 0.4}]
    assert best_quality(points, "q", "c", 1.0) == 0.5


def test_points_are_put_in_the_order_of_alpha() -> None:
    rows = [{"setting": s, "rule": "Diff", "alpha": a} for s in ("T = 0", "T = 1") for a in (0.3, -0.1, 0.2)]
    assert [row["alpha"] for row in curves(rows, "T = 1")["Diff"]] == [-0.1, 0.2, 0.3]


def test_a_table_is_markdown() -> None:
    assert markdown(["rule", "x"], [["Diff", "1.0"]]) == "| rule | x |\n| :-- | --: |\n| Diff | 1.0 |"


@pytest.mark.parametrize(
    ("hypothesis", "reference", "edits"),
    [("a b c", "a b c", 0), ("a x c", "a b c", 1), ("b c", "a b c", 1), ("a b b c", "a b c", 1), ("", "a b", 2)],
)
def test_word_edits(hypothesis: str, reference: str, edits: int) -> None:
    assert rewriting.word_edits(hypothesis, reference) == edits


def test_telegraphic_words() -> None:
    words = ["The", "list's", "re.sub()", "a", "(None)."]
    assert [rewriting.telegraphic(word) for word in words] == ["", "lists", "re sub", "", "none"]


def random_laws(n: int, vocab: int) -> Laws:
    rng = np.random.default_rng(3)
    p, q = (rng.dirichlet(np.full(vocab, 0.3), n) for _ in range(2))
    return Laws(p, q, p, q)


@pytest.mark.parametrize("rule", (*rules.RULES, *rules.LOG_RULES), ids=lambda rule: rule.name)
def test_alphas_spread_what_is_rejected(rule: rules.Rule) -> None:
    x = random_laws(400, 8)
    alphas = spread_alphas(rule, x, (0.8, 0.5, 0.2))
    assert alphas == sorted(alphas)
    lossless = rules.total_variation(x.P, x.Q).mean()
    made = [float64_target_law(rule.make(alpha), x.P, x.Q, x.p, x.q) for alpha in alphas]
    shares = [rules.total_variation(law, x.Q).mean() / lossless for law in made]
    # Lossy also rejects less of what it still rejects; a token rule recovers a replaced token too
    loose = 0.3 if rule.by_token else 0.08
    assert shares == pytest.approx([0.8, 0.5, 0.2], abs=loose)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.name)
def test_alphas_of_a_target_that_all_but_rules_the_draft_out_are_lawful(rule: rules.Rule) -> None:
    tiny = 1e-9
    P, Q = (np.array([[low, 1 - low], [0.5, 0.5]]) for low in (tiny, 1 - tiny))
    for alpha in spread_alphas(rule, Laws(P, Q, P, Q), (0.9, 0.5, 0.05)):
        assert np.isfinite(float64_target_law(rule.make(alpha), P, Q, P, Q)).all()


@pytest.fixture(scope="module")
def pair() -> tuple[rewriting.Corpus, list[training.T5ForConditionalGeneration]]:
    words = "return the list of a strings or none if there is an error in it and close them".split()
    rng = np.random.default_rng(0)
    texts = [list(rng.choice(words, 14)) for _ in range(60)]
    corpus = rewriting.Corpus(texts, rewriting.train_tokenizer(texts))
    recipes = (training.Recipe("target", 32, 1, 2, 8, 1e-3), training.Recipe("draft", 32, 1, 1, 4, 1e-3))
    return corpus, [training.fit(recipe, corpus) for recipe in recipes]


def test_a_corpus_is_parted_and_its_pairs_decode(pair: tuple[rewriting.Corpus, list[object]]) -> None:
    corpus = pair[0]
    assert corpus.held_out and len(corpus.train) > len(corpus.held_out)
    for drawn in corpus.draw(corpus.held_out, 20, 1):
        assert corpus.decode(drawn.target) == drawn.text
        source = " ".join(filter(None, map(rewriting.telegraphic, drawn.text.split())))
        assert corpus.decode(drawn.source) == source


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("setting", ["T = 0", "T = 1"])
def test_the_rewriting_task_from_end_to_end(
    pair: tuple[rewriting.Corpus, list[object]], setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_NEW_TOKENS", 6)
    monkeypatch.setattr(generation, "_PLAIN_RUNS", 1)
    corpus, (target, draft) = pair
    rows = generation.sweep(
        target, draft, corpus, [setting], pairs=2, batch=2, timed=1, shares=(0.5,), save=lambda rows: None
    )
    by_rule = curves(rows, setting)
    expected = {rule.name for rule in rules.RULES if setting in rule.settings}
    assert expected | {"target alone", "draft alone", "lossless", "SeqCascade [Chow]"} <= by_rule.keys()
    assert by_rule["target alone"][0]["target_calls_per_token"] == 1
    assert by_rule["target alone"][0]["relative_seconds"] == 1
    for row in rows:
        assert 0 <= row["target_calls_per_token"] <= 2
        assert row["relative_seconds_alone"] > 0
        assert row["rejection_rate"] is None or 0 <= row["rejection_rate"] <= 1
    if setting == "T = 0":  # what is lossless is the target's text
        assert by_rule["lossless"][0]["word_accuracy"] == by_rule["target alone"][0]["word_accuracy"]
    settings = {"pairs": 2, "batch": 2, "timed": 1, "draft_length": 5, "threads": 1}
    machine.save(tmp_path, "rewriting", rows, settings)
    written = report.write(tmp_path)
    assert all(path.stat().st_size > 1000 for path in written)
    assert f"### {setting}" in (tmp_path / "README.md").read_text()


def test_draft_lengths_from_end_to_end(
    pair: tuple[rewriting.Corpus, list[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_NEW_TOKENS", 6)
    monkeypatch.setattr(generation, "_PLAIN_RUNS", 1)
    drafted: list[int] = []
    real = sk.generate

    def generate(*of: Any, **how: Any) -> Any:
        drafted.append(how.get("num_speculative_tokens", 0))
        return real(*of, **how)

    monkeypatch.setattr(sk, "generate", generate)
    corpus, (target, draft) = pair
    rows = generation.sweep(
        target, draft, corpus, ["T = 0", "T = 1"], pairs=2, batch=2, timed=0, shares=(0.5,), save=lambda rows: None,
        draft_lengths=(2, 3),
    )  # fmt: skip
    assert set(drafted) == {0, 2, 3}
    assert list(dict.fromkeys(row["setting"] for row in rows)) == [f"T = {t}, γ = {n}" for t in (0, 1) for n in (2, 3)]
    assert {row["rule"] for row in rows if row["setting"] == "T = 0, γ = 3"} == {
        "target alone", "draft alone", "lossless", *(rule.name for rule in rules.RULES if "T = 0" in rule.settings)
    }  # fmt: skip
    settings = {"settings": ["T = 0", "T = 1"], "pairs": 2, "draft_length": (2, 3), "threads": 1}
    machine.save(tmp_path, "draft-lengths", rows, settings)
    assert [path.name for path in report.write(tmp_path)] == ["README.md", "draft-lengths.png"]
    assert "| rule | calls, γ = 2 | calls, γ = 3 | best, γ = 2 | best, γ = 3 |" in (tmp_path / "README.md").read_text()


def test_the_next_token_task_from_end_to_end(tmp_path: Path) -> None:
    logits = torch.randn(70, 12, generator=torch.Generator().manual_seed(0))
    draft = np.random.default_rng(0).dirichlet(np.ones(12), 70)
    truth = np.arange(70) % 12
    problems = np.repeat([0, 1, 2, 3], [10, 30, 5, 25])
    given = ["T = 0", "T = 1"]
    rows = next_token.sweep(logits, draft, truth, problems, given, shares=(0.7, 0.2), save=lambda rows: None)
    target, made = (curves(rows, "T = 1")[name][0] for name in ("target alone", "Diff"))
    law = logits.double().softmax(1).numpy()
    assert target["accuracy"] == pytest.approx(law[np.arange(70), truth].mean())
    assert target["log_loss"] == pytest.approx(-np.log(law[np.arange(70), truth]).mean())
    off = law[np.arange(70), truth] - target["accuracy"]  # a solution's positions are alike
    by_problem = [off[problems == number].sum() for number in range(4)]
    assert target["standard_error"] == pytest.approx(np.sqrt(np.square(by_problem).sum()) / 70)
    assert target["rejection_rate"] == pytest.approx(np.abs(law - draft).sum(1).mean() / 2)
    expected = float64_target_law(sk.laws.Diff(made["alpha"]), law, draft, law, draft)
    assert made["rejection_rate"] == pytest.approx(np.abs(expected - draft).sum(1).mean() / 2)
    settings = {"positions": 70, "target": "a target", "draft": "a draft", "threads": 1}
    machine.save(tmp_path, "next-token", rows, settings)
    report.write(tmp_path)
    assert "log-loss" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "next-token.json").read_text())["rows"] == rows


def test_an_ngram_law_is_the_drafter_s_and_normalised() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    laws = next_token.ngram_laws(sk.NgramLMDrafter(), tokens, [3, 8 - 1], 6)
    assert laws.sum(1) == pytest.approx(1)
    assert laws[1].argmax() == 2  # after 3 1 came 2
    assert (laws > 0).all()


@pytest.mark.skipif(not machine.RESULTS.exists(), reason="a source distribution holds no results")
def test_every_figure_of_rewriting_has_the_recommended_rule_and_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = json.loads((machine.RESULTS / "cascades/rewriting.json").read_text())
    drawn: dict[Axes, set[tuple[float, ...]]] = {}
    real = Axes.errorbar

    def errorbar(axes: Axes, x: Any, y: Any, errors: Any, **style: Any) -> Any:
        drawn.setdefault(axes, set()).add(tuple(errors))
        return real(axes, x, y, errors, **style)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    below: list[str] = []
    supxlabel = Figure.supxlabel
    monkeypatch.setattr(Figure, "supxlabel", lambda of, text, **how: below.append(text) or supxlabel(of, text, **how))
    figures = report._draw_rewriting(result, tmp_path)
    for path in figures:
        with Image.open(path) as figure:
            assert figure.info["Description"] == plot.revision(result) and figure.width >= 880
    assert {path.stem for path in figures} >= {"rewriting-rejections", "rewriting-target-calls", "rewriting-seconds"}
    assert below.count("python -m bench.cascades report") == len(figures)
    recommended = {
        tuple(point["standard_error"] for point in curves(result["rows"], setting)["TokenV2"])
        for setting in report._settings_of(result)
    }
    assert len(drawn) > 8 and all(recommended & errors for errors in drawn.values())


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match="no result file"):
        report.write(tmp_path)
    assert __main__.main(["report", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"cascades: no result file in {tmp_path}\n"


@pytest.mark.parametrize(
    ("task", "module"), [("rewriting", generation), ("draft-lengths", generation), ("next-token", next_token)]
)
def test_a_published_result_is_replaced_by_a_whole_sweep_alone(
    task: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, unfinished = tmp_path / f"{task}.json", tmp_path / f"{task}.unfinished.json"
    published.write_text("as it was")
    rows = [{"setting": "T = 0", "rule": "lossless"}, {"setting": "T = 1", "rule": "lossless"}]
    interrupted, known = True, inspect.signature(module.sweep)

    def sweep(*of: Any, save: Any, **how: Any) -> Any:
        known.bind(*of, save=save, **how)
        save(rows[:1])
        if interrupted:
            raise KeyboardInterrupt
        save(rows)
        return rows

    monkeypatch.setattr(module, "sweep", sweep)
    monkeypatch.setattr(training, "load_corpus", lambda: None)
    monkeypatch.setattr(training, "load_model", lambda recipe, corpus: None)
    monkeypatch.setattr(next_token, "held_out", lambda positions: (None, None, np.arange(4), np.arange(4)))
    command = [task, "--threads", str(torch.get_num_threads()), "--output", str(tmp_path)]
    assert __main__.main(command) == 130
    assert published.read_text() == "as it was"
    assert json.loads(unfinished.read_text())["rows"] == rows[:1]
    interrupted = False
    assert __main__.main(command) == 0
    assert json.loads(published.read_text())["rows"] == rows and not unfinished.exists()


def test_sizes_of_a_rehearsal_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["report", "--quick", "--pairs", "3", "--output", str(tmp_path)])
    assert "--quick chooses --pairs and must be given without it" in capsys.readouterr().err
