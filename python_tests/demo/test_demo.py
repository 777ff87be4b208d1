"""What a person sees of the demo: origins of tokens, options, and one sentence for everything that goes wrong."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from python_tests.support import Terminal, environment
from specdec_kernels import assets, cli, demo
from specdec_kernels.assets import corpus, prompts
from specdec_kernels.decoding import Provenance
from specdec_kernels.demo import columns, compare, render

ACCEPTED, RECOVERED, BONUS = Provenance.ACCEPTED, Provenance.RECOVERED, Provenance.BONUS


class Bytes:
    """A tokenizer with one token a byte."""

    pad_token_id = eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    text = "aé€z"
    assert render.pieces(Bytes(), list(text.encode())) == ["a", "", "é", "", "", "€", "z"]  # type: ignore[arg-type]
    assert "".join(render.pieces(Bytes(), [97, 0xC3])) == "a\ufffd"  # type: ignore[arg-type]


def test_neighbours_of_one_origin_share_marks() -> None:
    texts, origins = ["a", "b", "c", "", "d"], [ACCEPTED, ACCEPTED, RECOVERED, ACCEPTED, BONUS]
    assert render.render(texts, origins, color=False) == "⟦ab⟧‹c›d"
    assert render.render(texts, origins, color=True) == "\x1b[32mab\x1b[0m\x1b[31mc\x1b[0m\x1b[36md\x1b[0m"
    with pytest.raises(ValueError, match="shorter|longer"):
        render.render(texts, origins[:2], color=False)


def test_colour_is_for_terminals_that_want_it() -> None:
    assert not render.use_color(io.StringIO())
    with environment(NO_COLOR=""):
        assert render.use_color(Terminal())
    with environment(NO_COLOR="1"):
        assert not render.use_color(Terminal())


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = prompts.encode(Bytes(), ["ab", "c"])  # type: ignore[arg-type]
    assert ids.tolist() == [[97, 98], [0, 99]]
    assert mask.tolist() == [[1, 1], [0, 1]]


def test_an_unknown_prompt_set_is_named() -> None:
    with pytest.raises(ValueError, match="must be one of code-edit, quote, .* got 'poems'"):
        prompts.load_prompts("poems", Bytes())  # type: ignore[arg-type]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a random model of one layer, and no table."""
    torch.manual_seed(0)
    small = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=256, eos_token_id=0
    )
    model = LlamaForCausalLM(small).eval()
    monkeypatch.setattr(assets, "load_model", lambda: (model, Bytes()))
    monkeypatch.setattr(corpus, "ngram_table", lambda tokenizer: None)
    monkeypatch.setattr(prompts, "load_prompts", lambda name, tokenizer, count: ["to be or not to be"] * count)


def test_pieces_of_a_text_keep_their_spaces() -> None:
    class Words:
        """Like sentencepiece: a word's space is lost where decoding begins with it."""

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return " ".join(f"w{token}" for token in tokens)

    assert render.pieces(Words(), [1, 2, 3]) == ["w1", " w2", " w3"]  # type: ignore[arg-type]


ARGUMENTS = ["demo", "--sets", "chat", "--batch", "2", "--max-new-tokens", "12", "--threads", "1"]


def test_the_demo_prints_figures_and_checks_the_output(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(ARGUMENTS) == 0
    printed = capsys.readouterr().out
    assert "chat, temperature 0" in printed and "chat, temperature 1" in printed
    assert printed.count("output identical to plain decoding") == 2
    assert "mean acceptance length" in printed and "tokens/s plain" in printed


def test_the_report_as_json(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--json", "--num-speculative-tokens", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["identical"] for row in report["comparisons"]] == [True, True]
    for row in report["comparisons"]:
        assert row["speed_up"] == pytest.approx(row["speculative_tokens_per_second"] / row["plain_tokens_per_second"])
        assert all(len(a["texts"]) == len(a["origins"]) <= 12 for a in row["answers"])


def test_a_run_that_ends_with_the_prompts_forward_has_no_rate(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["demo", "--sets", "chat", "--batch", "1", "--max-new-tokens", "1", "--threads", "1"]
    assert cli.main(given) == 0
    assert "– tokens/s plain, – with speculation: –x; mean acceptance length 1.00" in capsys.readouterr().out
    assert cli.main([*given, "--json"]) == 0
    assert [row["speed_up"] for row in json.loads(capsys.readouterr().out)["comparisons"]] == [None, None]


def test_the_largest_seed_has_seeds_beside_it(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGUMENTS, "--json", "--temperature", "1", "--seed", str(2**63 - 1)]) == 0
    first, second = json.loads(capsys.readouterr().out)["comparisons"][0]["answers"]
    assert first["texts"] != second["texts"]  # of one prompt, by other seeds


def test_in_a_log_the_demo_is_silent_between_results(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(ARGUMENTS) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("wanted", [None, "1"])
def test_in_a_terminal_the_runs_are_side_by_side(
    wanted: str | None, tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every picture has both runs; the last one the figures of both, and then the screen is cleared."""
    monkeypatch.setattr(columns, "_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with environment(NO_COLOR=wanted or ""):
        assert cli.main([*ARGUMENTS, "--temperature", "0"]) == 0
    shown = terminal.getvalue()
    pictures = shown.split("chat, temperature 0 (1 of 1)")[1:]
    assert len(pictures) > 12
    assert "plain decoding, " in pictures[-1] and "with speculation, " in pictures[-1]
    assert pictures[-1].count("tokens/s") == 2 and "with speculation" not in pictures[2]
    assert ("\x1b[36m" in shown) == (wanted is None) and pictures[-1].rstrip("\n").endswith("\x1b[2K")
    assert "identical to plain" in capsys.readouterr().out


def test_a_divergence_is_not_called_identical(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compare.generate

    def wrong(*arguments: Any, **options: Any) -> Any:
        output = real(*arguments, **options)
        if not isinstance(options["drafter"], compare.NoDrafter):
            output.tokens[0, 3] += 1
        return output

    monkeypatch.setattr(compare, "generate", wrong)
    report = compare.run(
        ["chat"], batch=1, max_new_tokens=8, temperatures=[0.0], threads=1, num_speculative_tokens=3, seed=0, show=None
    )
    assert report["comparisons"][0]["identical"] is False


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--max-new-tokens", "x"], ["--num-speculative-tokens", "-1"]])
def test_bad_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_threads_where_a_process_may_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which cannot say which it may use."""

    def none() -> Any:
        raise assets.AssetError("no model")

    asked: list[int] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(assets, "load_model", none)
    with pytest.raises(assets.AssetError):
        compare.run(
            ["chat"], batch=1, max_new_tokens=1, temperatures=[0.0], threads=None, num_speculative_tokens=1, seed=0,
            show=None,
        )  # fmt: skip
    assert asked == [3]


def test_more_prompts_than_a_set_has_are_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "num_prompts", lambda name: 5)
    monkeypatch.setattr(assets, "load_model", lambda: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=r"^demo: batch must be at most 5, the prompts of 'chat', got 6$"):
        demo.main(["--sets", "chat", "--batch", "6"])
