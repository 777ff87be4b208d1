"""What goes wrong apart from an argument's type: broken drafters, memory, disks, files, options, runners in use."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner
from specdec_kernels import cli, laws
from specdec_kernels.backends import native
from specdec_kernels.decoding import DecodingState, StepResult
from specdec_kernels.drafters import Draft
from specdec_kernels.medusa import fitting
from specdec_kernels.testing import LAW_EXAMPLES

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Proposing(sk.Drafter):
    """Proposes whatever `make` returns."""

    def __init__(self, make: Callable[[DecodingState, int], Any]) -> None:
        self.make = make

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> Any:
        return self.make(state, num_tokens)

    def commit(self, state: DecodingState, result: StepResult) -> None: ...


def proposing(tokens: Tensor) -> Any:
    return Proposing(lambda state, num_tokens: Draft(tokens))


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        (Proposing(lambda state, n: None), TypeError, "a Draft, got NoneType"),
        (Proposing(lambda state, n: IDS[:, :1]), TypeError, "a Draft, got Tensor"),
        (proposing(torch.tensor([1, 2])), ValueError, r"\[batch=2, at most 3\] tokens, got \[2\]"),
        (proposing(IDS[:1]), ValueError, r"\[batch=2, at most 3\] tokens, got \[1, 3\]"),
        (proposing(IDS.to("meta")), ValueError, "tokens on cpu, got meta"),
        (
            Proposing(lambda state, n: Draft(IDS[:, :2], num_draft_tokens=torch.ones(2, device="meta").long())),
            ValueError, "num_draft_tokens on cpu, got meta",
        ),
    ],
)  # fmt: skip
def test_a_drafter_that_proposes_something_else_is_refused(drafter: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^generate: Proposing.propose must give {message}"):
        sk.generate(TableRunner.random(), IDS, drafter=drafter, max_new_tokens=6, num_speculative_tokens=3)


@pytest.mark.parametrize("name", ["tokens", "logits", "probs"])
def test_a_draft_of_another_rank_is_not_widened(name: str) -> None:
    draft = Draft(**{"tokens": IDS[:, :1], name: torch.ones(2).long() if name == "tokens" else torch.ones(2, 1)})
    with pytest.raises(ValueError, match=rf"^Draft: {name} must be \[batch, num_draft.*\], got \[2"):
        draft.widened(3)


@pytest.mark.parametrize("bad", [23, 2**40, -2, -(2**63)])
def test_a_drafted_id_that_is_none_is_flagged_for_its_sequence_alone(bad: int) -> None:
    def make(state: DecodingState, num_tokens: int) -> Draft:
        tokens = torch.full((2, num_tokens), 5)
        tokens[1] = bad
        return Draft(tokens)

    given: dict[str, Any] = {"max_new_tokens": 6, "acceptance": "match", "seeds": torch.tensor([1, 2])}
    out = sk.generate(TableRunner.random(), IDS, drafter=Proposing(make), num_speculative_tokens=2, **given)
    plain = sk.generate(TableRunner.random(), IDS, drafter=sk.NoDrafter(), num_speculative_tokens=0, **given)
    assert torch.equal(out.sequences, plain.sequences)
    assert [bool(s & sk.Status.BAD_TOKEN) for s in out.status.tolist()] == [False, True]


@pytest.mark.parametrize("argument", ["model", "draft_model"])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("token_cascade", {"target_law": laws.Chow(0.5)}), ("seq_cascade", {"alpha": 0.5}), ("bild", {}),
        ("oracle_cascade", {"target_law": laws.Opt(0.3)}),
    ],
)  # fmt: skip
def test_a_comparison_loop_refuses_a_runner_in_use(name: str, own: dict[str, Any], argument: str) -> None:
    used = TableRunner.random()
    loop = getattr(sk, name)
    given = {"model": TableRunner.random(seed=1), "draft_model": TableRunner.random(seed=2)} | {argument: used}
    seen: list[str] = []

    def make(state: DecodingState, num_tokens: int) -> Draft:
        with pytest.raises(ValueError, match=f"^{name}: {argument} serves one call at a time") as error:
            loop(given["model"], IDS, draft_model=given["draft_model"], max_new_tokens=2, **own)
        seen.append(str(error.value))
        return Draft(torch.full((2, 1), 5))

    sk.generate(used, IDS, drafter=Proposing(make), max_new_tokens=2, num_speculative_tokens=1)
    assert seen
    loop(given["model"], IDS, draft_model=given["draft_model"], max_new_tokens=2, **own)  # free again


def test_what_is_wrong_with_an_oracle_cascade_is_said_of_it() -> None:
    law = LAW_EXAMPLES[1]
    for changed in ({"draft_model": TableRunner.random(vocab=9)}, {"max_new_tokens": 0}, {"seeds": torch.zeros(3)}):
        with pytest.raises((TypeError, ValueError), match="^oracle_cascade: "):
            sk.oracle_cascade(
                TableRunner.random(), IDS, **{"draft_model": TableRunner.random(), "target_law": law, **changed}
            )


@pytest.mark.skipif("CPU" in native._problems, reason="needs the compiled CPU library")
def test_out_of_memory_in_a_library_is_torchs_own_exception() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        sk.warp_probs(torch.zeros(1, 2**16).expand(2**30, 2**16), backend=None)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    for name, write in {
        "text": lambda path: path.write_text("some text\n"),
        "array": lambda path: np.save(path.open("wb"), np.arange(3)),
        "empty": lambda path: path.write_bytes(b""),
    }.items():
        write(tmp_path / name)
        with pytest.raises(ValueError, match=rf"^NgramTable: .*{name} is not a table"):
            sk.NgramTable.load(tmp_path / name)


@pytest.mark.parametrize("left", [0, 10, 0.5, 0.99])
def test_a_truncated_checkpoint_is_named(tmp_path: Path, left: float) -> None:
    path = tmp_path / "heads.checkpoint"
    fitting._keep(path, {"about": {}, "modules": {}, "optimizer": {"weight": torch.zeros(999)}, "losses": []})
    assert fitting._kept(path)["losses"] == []
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole)) if left < 1 else int(left)])
    with pytest.raises(ValueError, match=r"^medusa: .*heads.checkpoint must be a whole checkpoint"):
        fitting._kept(path)


FULL_DISK = """
import resource, signal, sys, numpy as np, torch
from pathlib import Path
import specdec_kernels as sk
from specdec_kernels.medusa import MedusaHeads, fitting
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # writing past it fails, as on a full disk
path = Path(sys.argv[1])
heads = MedusaHeads(64, 2, sk.TokenMap(torch.arange(99)))
table = sk.NgramTable.from_tokens(np.arange(9999) % 977)
for write in (
    lambda: heads.save(path), lambda: fitting._keep(path, {"weights": torch.zeros(9999)}), lambda: table.save(path),
):
    try:
        write()
    except OSError as error:
        print(error)
"""


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("the old one")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("could not be written") == 2 and "File too large" in done.stdout, done.stdout
    assert path.read_text() == "the old one" and os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "--seed", "9" * 30], "--seed: must be in"),
        (["demo", "--seed", "9" * 9999], "--seed: must be in"),
        (["demo", "--threads", "1000000"], "--threads: must be in [1, 1024], got 1000000"),
        (["demo", "--num-speculative-tokens", "many"], "--num-speculative-tokens: must be an integer, got 'many'"),
        (["demo", "--batch", "2.5"], "--batch: must be an integer, got '2.5'"),
        (["medusa", "train", "x", "--seed", "9" * 30], "--seed: must be in"),
        (["medusa", "train", "x", "--threads", "0"], "--threads: must be in [1, 1024], got 0"),
        (["backends", "--device", "abacus"], "--device: must be a device: cpu, cuda:0, …, got 'abacus'"),
    ],
)
def test_options_out_of_range(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert sentence in capsys.readouterr().err


def test_a_bad_environment_variable_is_one_sentence() -> None:
    environment = {**os.environ, "SPECDEC_BACKEND": "foo"}
    done = subprocess.run(
        [sys.executable, "-m", "specdec_kernels", "backends"], capture_output=True, text=True, env=environment
    )
    expected = "specdec: SPECDEC_BACKEND must be empty or one of reference, cpu, triton, cuda, got 'foo'\n"
    assert (done.returncode, done.stderr) == (2, expected)
    code = "import torch, specdec_kernels as sk\nsk.row_stats(torch.zeros(2, 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "ValueError: SPECDEC_BACKEND must be" in done.stderr


def test_the_demo_without_rich_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *given: Any, **named: Any) -> Any:
        if name.startswith("rich"):
            raise ModuleNotFoundError("No module named 'rich'")
        return real(name, *given, **named)

    monkeypatch.delitem(sys.modules, "specdec_kernels.demo.columns", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["demo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: needs the 'transformers' extra") and error.count("\n") == 1


INTERRUPTED = """
import sys, torch

for name in ("define", "impl"):
    def run(library, *given, real=getattr(torch.library.Library, name), name=name, **named):
        real(library, *given, **named)
        if sys.argv[1] == name and "verify_chain" in str(given[0]) and not done:
            done.append(name)
            raise KeyboardInterrupt
    setattr(torch.library.Library, name, run)
done = []
try:
    import specdec_kernels
except KeyboardInterrupt:
    print("interrupted")
import specdec_kernels as sk
draft = torch.zeros(2, 1, dtype=torch.int64)
print(sk.verify_chain(torch.zeros(2, 2, 5), draft, acceptance="greedy").num_tokens.tolist())
print(sk.row_stats(torch.empty(2, 3, device="meta")).argmax.shape)
"""


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("after", ["define", "impl"])
def test_an_import_that_was_interrupted_can_be_made_again(after: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, after], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["interrupted", "[2, 2]", "torch.Size([2])"], done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_but_the_reference_serves_one() -> None:
    for row in sk.backends("cuda").values():
        assert [name for name, answer in row.items() if answer == "yes"] == ["reference"]
