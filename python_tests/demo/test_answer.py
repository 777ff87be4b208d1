"""What a person sees of ``specdec generate``: the answer, its tokens by origin, figures, one sentence for an error."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from python_tests.decoding.models import AS_THE_DEMO, near, tiny
from python_tests.support import Terminal, environment
from specdec_kernels import assets, cli
from specdec_kernels.analysis import drafters
from specdec_kernels.assets import corpus
from specdec_kernels.commands import read_text
from specdec_kernels.decoding import Provenance
from specdec_kernels.demo import render


class Letters:
    """A tokenizer with one token a character, and an end."""

    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [3 + ord(letter) % 50 for letter in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(64 + token) for token in tokens if token > 2)

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return f"<{turns[0]['content']}>"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models instead of the demo's and of every folder, and no table."""
    endless: dict[str, Any] = {"eos_token_id": None}
    monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1, **endless), Letters()))
    monkeypatch.setattr(assets, "load_folder", lambda folder: (near("llama", 1, 0.2, **endless), Letters()))
    monkeypatch.setattr(corpus, "ngram_table", lambda tokenizer: None)


def generate(*arguments: str) -> int:
    return cli.main(["generate", "--max-new-tokens", "24", "--seed", "0", *arguments])


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert generate(*arguments, "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_a_pipe_gets_the_answer_alone(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    report = answer(capsys, "to be or not to be")
    assert generate("to be or not to be") == 0
    printed = capsys.readouterr()
    assert printed.out == report["text"] + "\n" == "".join(report["texts"]) + "\n"
    assert len(report["tokens"]) == len(report["origins"]) == len(report["texts"]) == report["stats"]["num_tokens"]
    assert printed.err.startswith(f"{len(report['tokens'])} tokens, ") and printed.err.count("\n") == 1
    assert " s of prefill, the others in " in printed.err


def test_log_probabilities_stand_beside_the_tokens(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "to be or not to be", "--top-k", "2")
    report = answer(capsys, "to be or not to be", "--top-k", "2", "--logprobs", "3")
    assert "logprobs" not in plain and report["tokens"] == plain["tokens"]
    said, tokens = report["logprobs"], report["tokens"]
    assert set(said["rank"]) <= {1, 2} and len(said["rank"]) == len(said["raw_log_prob"]) == len(tokens)
    for token, rank, raw, own, ids, top, processed in zip(
        tokens, said["rank"], said["raw_log_prob"], said["log_prob"], said["top_ids"], said["top_log_prob"],
        said["top_processed_log_prob"], strict=True,
    ):  # fmt: skip
        assert ids[rank - 1] == token and top[rank - 1] == raw and processed[rank - 1] == own > raw
        assert processed[2] is None  # JSON has no infinity


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_tokens_by_origin(
    no_color: str, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["to be or not to be", "--draft-model", ".", "--num-speculative-tokens", "3"]
    report = answer(capsys, *arguments)
    assert set(report["origins"]) == {Provenance.ACCEPTED, Provenance.RECOVERED, Provenance.BONUS}
    terminal = Terminal()
    with environment(NO_COLOR=no_color), monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert generate(*arguments) == 0
    color = not no_color
    shown, _, legend = terminal.getvalue().partition("\n\n")
    assert legend == render.legend(color=color) + "\n"
    expected, texts, origins = "", report["texts"], report["origins"]
    while texts:  # a step ends with what the target drew
        length = next((i + 1 for i, origin in enumerate(origins) if origin != Provenance.ACCEPTED), len(texts))
        expected += render.render(texts[:length], origins[:length], color=color)
        texts, origins = texts[length:], origins[length:]
    assert shown == expected


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "medusa"))
        for name in [*drafters.NAMES, *drafters.OF_DRAFT_MODEL]
    ],
)
def test_every_drafter_answers_greedily_alike(
    name: str, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "medusa":
        monkeypatch.setattr(assets, "load_model", lambda: (tiny("llama", 1, **AS_THE_DEMO), Letters()))
    more = ["--draft-model", "."] if name in drafters.OF_DRAFT_MODEL else []
    given = ["to be or not to be", "--temperature", "0", "--max-new-tokens", "8"]
    report = answer(capsys, *given, "--drafter", name, *more)
    assert report["drafter"] == name and report["tokens"] == answer(capsys, *given, "--drafter", "none")["tokens"]


def test_prompts_from_everywhere(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("to be")
    expected = answer(capsys, "to be")
    assert answer(capsys, "--prompt-file", str(tmp_path / "prompt.txt")) == expected | {"stats": mock.ANY}
    monkeypatch.setattr(sys, "stdin", io.StringIO("to be"))
    assert answer(capsys) == expected | {"stats": mock.ANY}
    other = answer(capsys, "to be", "--seed", "1")
    assert (expected["seed"], other["seed"]) == (0, 1) and expected["acceptance"] == "token"
    assert other["tokens"] != expected["tokens"]
    monkeypatch.setattr(Letters, "chat_template", "of a chat")
    assert answer(capsys, "to be")["tokens"] != expected["tokens"]
    assert answer(capsys, "to be", "--raw")["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--logprobs", "2"], "--logprobs must be given with --json, got it alone"),
        (["x", "--drafter", "model"], "--draft-model must be given with --drafter model or model-tree alone, got "),
        (["x", "--drafter", "medusa", "--model", "."], "--drafter medusa needs --heads, the Medusa heads of --model"),
        (
            ["x", "--acceptance", "typical"],
            "--acceptance typical must be given with --drafter medusa or lookup-tree or model",
        ),
        (
            ["x", "--drafter", "none", "--num-speculative-tokens", "3"],
            "--num-speculative-tokens must be given with a drafter, got --drafter none",
        ),
        (
            ["x", "--min-confidence", "0"],
            "--min-confidence must be given with --drafter model alone, got --drafter lookup",
        ),
        (
            ["x", "--draft-model", ".", "--drafter", "model-tree", "--min-confidence", "0.4"],
            "--min-confidence must be given with --drafter model alone, got --drafter model-tree",
        ),
        (["x", "--epsilon", "0.1"], "--epsilon must be given with --acceptance typical alone"),
        (["x", "--prompt-file", "."], "a prompt must be given once, got an argument and --prompt-file"),
        (["--prompt-file", "."], ". must be a file, got a folder"),
        ([" "], "the prompt must hold some text, got none"),
        (["caf\udce9"], "the prompt must be UTF-8, got other bytes"),
        (["x", "--heads", __file__], "--heads must be given with --drafter medusa alone, got --drafter lookup"),
        (["x" * 300], "LlamaForCausalLM holds 256 positions, but prompt and max_new_tokens need 325"),
    ],
)
def test_one_sentence_for_an_error(
    small: None, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"generate: {sentence}") and printed.err.count("\n") == 1, printed.err
    assert printed.out == ""


def test_a_file_that_is_not_utf_8_is_named(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"caf\xe9")
    assert generate("--prompt-file", str(path)) == 2
    assert capsys.readouterr().err.startswith(f"generate: {path} must be UTF-8: ")


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("x", "--model", str(tmp_path)) == 2
    assert capsys.readouterr().err.startswith(f"generate: {tmp_path} must be a folder of a transformers model, and has")


def test_without_a_prompt_in_a_terminal_it_asks_for_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(SystemExit, match="2"):
        generate()
    assert "a prompt is needed" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_written(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = answer(capsys, "to be or not to be")["text"]
    steps: list[int] = []
    real = render.Detokenizer.add

    def interrupted(self: render.Detokenizer, token: int) -> str:
        steps.append(token)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return real(self, token)

    monkeypatch.setattr(render.Detokenizer, "add", interrupted)
    assert generate("to be or not to be") == 130
    printed = capsys.readouterr()
    assert printed.err == "\ngenerate: stopped\n"
    assert printed.out.endswith("\n") and whole.startswith(printed.out[:-1]) and len(printed.out) > 1


def test_typical_acceptance_is_named(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The higher its thresholds, the fewer draft tokens are accepted; at the highest none is."""
    given = ["to be or not to be", "--drafter", "lookup-tree", "--acceptance", "typical"]
    free = answer(capsys, *given, "--epsilon", "0.0001", "--delta", "0.0001")
    strict = answer(capsys, *given, "--epsilon", "1", "--delta", "1000000")
    assert free["stats"]["num_steps"] < strict["stats"]["num_steps"] == 24 and free["acceptance"] == "typical"
    assert generate(*given) == 0 and capsys.readouterr().err.rstrip().endswith("; not lossless")


def test_a_draft_ends_where_the_draft_model_is_unsure(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    """At the highest threshold behind its first token; the answer is the same."""
    given = ["to be or not to be", "--draft-model", ".", "--temperature", "0", "--num-speculative-tokens", "3"]
    usual, off, strict = (
        answer(capsys, *given, *more) for more in ([], ["--min-confidence", "0"], ["--min-confidence", "1"])
    )
    assert usual["tokens"] == off["tokens"] == strict["tokens"]
    drafted, steps = ([one["stats"][name] for one in (usual, off, strict)] for name in ("num_drafted", "num_steps"))
    assert drafted[0] == drafted[1] > 2 * steps[0]
    assert steps[2] - 1 <= drafted[2] <= steps[2], "the last step may have no room for a draft"


def test_help_says_what_is_off_and_what_keeps_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        generate("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--top-p TOP_P 0 and 1 are off" in shown and "greedy decodes as at temperature 0; typical" in shown


def test_greedy_acceptance_is_greedy_at_any_temperature(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = answer(capsys, "to be or not to be", "--temperature", "0")["tokens"]
    assert answer(capsys, "to be or not to be", "--acceptance", "greedy", "--temperature", "2")["tokens"] == greedy
    plain = answer(capsys, "to be or not to be", "--top-k", "0")["tokens"]
    assert answer(capsys, "to be or not to be", "--top-p", "0")["tokens"] == plain


def test_an_answer_of_one_step_has_no_rate(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("x", "--max-new-tokens", "1") == 0
    said = capsys.readouterr().err
    assert said.startswith("1 tokens, 1 of them in ") and said.endswith(" s of prefill, 1.00 a step\n")


def test_without_a_seed_each_answer_is_another(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = assets.load_model
    # making random models sets torch's seed, as loading one does not
    monkeypatch.setattr(assets, "load_model", lambda: (random(), torch.seed())[0])

    def told() -> dict[str, Any]:
        assert cli.main(["generate", "to be or not", "--max-new-tokens", "40", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    first, second = told(), told()
    assert first["seed"] is None and first["tokens"] != second["tokens"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    marked = tmp_path / "prompt.txt"
    marked.write_bytes(b"\xef\xbb\xbfto be")
    assert read_text(marked) == "to be"


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_device_without_memory_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, *(["x"] if command == "generate" else []), "--device", "meta"]) == 2
    assert capsys.readouterr().err.startswith(f"{command}: --device must be usable here, got meta")
