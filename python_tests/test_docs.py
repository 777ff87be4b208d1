"""README.md and docs/ are true: their code runs and does what it says, their commands exist, their links resolve.

Every block of code in them is run, all of a page's blocks in one namespace, in order, with the names that the page
takes for granted (`SETUPS`). A block that cannot be run has ``<!-- not run: the reason -->`` above it.
"""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import AS_THE_DEMO, near, prompts, tiny
from python_tests.support import present, present_emulated
from specdec_kernels import cli, config
from specdec_kernels.integrations.transformers.models import DECODERS, ENCODER_DECODERS
from specdec_kernels.testing import float64_law

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "docs").exists():
    pytest.skip("a source distribution holds no docs", allow_module_level=True)
PAGES = ["README.md", "CONTRIBUTING.md", "bench/README.md", *sorted(
    str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")
)]  # fmt: skip
CHECKED_ELSEWHERE = {"diff": "test_an_examples_patch_is_all_that_it_takes"}
README_LINES = 110
COLUMNS = {"text": 140, "table": 180}


class Block(NamedTuple):
    """A fenced block; `line` is that of its first line, `reason` why it is not run."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    lines = (ROOT / page).read_text().splitlines()
    found, begun = [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begun is None:
            begun = number
            continue
        above = re.fullmatch(r"<!-- not run: (.+) -->", lines[begun - 1])
        text = "\n".join(lines[begun + 1 : number]) + "\n"
        found.append(Block(page, begun + 2, lines[begun][3:], text, above and above[1]))
        begun = None
    assert begun is None, f"{page}: a block without an end"
    return found


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]


# --- Python -----------------------------------------------------------------------------------------------------------

VOCAB, BATCH, NUM_DRAFT = 61, 4, 5


def logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def a_step() -> dict[str, Any]:
    """What a loop has when it is about to verify a chain."""
    return {
        "torch": torch, "sk": sk, "batch": BATCH, "num_draft": NUM_DRAFT, "step": 3, "seeds": torch.arange(BATCH),
        "length": torch.tensor([9, 4, 7, 5]), "sampling": sk.SamplingParams(0.8, top_k=20, top_p=0.9),
        "target_logits": logits(BATCH, NUM_DRAFT + 1, VOCAB), "draft_logits": logits(BATCH, NUM_DRAFT, VOCAB, seed=1),
        "draft_tokens": logits(BATCH, NUM_DRAFT, VOCAB, seed=1).argmax(-1),
    }  # fmt: skip


def models() -> dict[str, Any]:
    """A target, a draft and prompts."""
    ids, mask = prompts(6, 4, 9, 5)
    return {"model": tiny("llama", 1), "draft_model": near("llama", 1, 0.15), "input_ids": ids, "mask": mask}


def words(ids: list[int]) -> str:
    """What some tokenizer decodes: few words, so that some text soon ends."""
    return "".join("en d"[i % 4] + "\n" * (i % 3) for i in ids)


def using() -> dict[str, Any]:
    return a_step() | models() | {
        "tokenizer": SimpleNamespace(decode=words),
        "packed_target_logits": logits(9 + BATCH, VOCAB), "packed_draft_tokens": torch.arange(9),
        "small_logits": logits(BATCH, NUM_DRAFT, 4), "tree": sk.DraftTree.cartesian([2, 1]),
        "tree_logits": logits(BATCH, 5, VOCAB), "node_tokens": torch.arange(5).expand(BATCH, 5),
    }  # fmt: skip


def laws() -> dict[str, Any]:
    return a_step() | models() | {"input_ids": prompts(6, 6)[0]}


def a_tree_step(batch: int = BATCH, vocab: int = VOCAB) -> dict[str, Any]:
    """A tree of 7 nodes, scored by a table of what follows what; the draft has one row per depth, as heads do."""
    table, rows = logits(vocab, vocab) * 0.6, logits(2, vocab, seed=1) * 1.5

    def forward(node_tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        assert node_tokens.shape == positions.shape == (batch, 7) and mask.shape == (batch, 1, 7, 32)
        return table[node_tokens]

    return {
        "torch": torch, "sk": sk, "batch": batch, "step": 3, "seeds": torch.arange(batch), "sampling": None,
        "length": torch.full((batch,), 9), "kv_length": 32, "last_tokens": torch.zeros(batch, dtype=torch.int64),
        "draft_logits": rows[torch.tensor([0, 1, 1, 0, 0, 0, 0])].expand(batch, 7, vocab).contiguous(),
        "forward": forward, "table": table,
        "cache": [(logits(batch, 2, 32, 4, seed=2), logits(batch, 2, 32, 4, seed=3)) for _ in range(2)],
    }  # fmt: skip


def medusa() -> dict[str, Any]:
    return {"model": tiny("llama", **AS_THE_DEMO), "input_ids": prompts(6)[0]}


def after_porting(names: dict[str, Any]) -> None:
    assert names["token"].shape == (4,)
    assert (names["predicts"] >= 0).sum() == names["accept_token_num"].sum() + 2


def after_readme(names: dict[str, Any]) -> None:
    assert names["out"].sequences.shape[0] == 1 and names["out"].stats.mean_acceptance_length >= 1


def after_using(names: dict[str, Any]) -> None:
    assert names["draw"].token.shape == (BATCH, NUM_DRAFT) and names["total"] == 9
    likely, tree = names["likely"], names["tree"]
    assert likely.top_ids.shape == (BATCH, tree.max_depth + 1, 5) and (likely.rank[:, 0] > 0).all()
    assert names["cu"].tolist() == [0, 3, 3, 8, 9] and names["out"].stats.num_tokens > 0
    for row, n in zip(names["stopped"].tokens.tolist(), names["stopped"].num_tokens.tolist(), strict=True):
        text, before = words(row[:n]), words(row[: n - 1])
        assert n < 32 and ("end" in text or "\n\n" in text) and "end" not in before and "\n\n" not in before
    assert names["sequences"].shape[0] == BATCH and names["tokens"].shape == (1, int(names["num_matches"]) + 1)


def after_trees(names: dict[str, Any]) -> None:
    out, moved = names["out"], names["moved"]
    assert out.tokens.shape == (BATCH, 3) and out.accepted_nodes.shape == (BATCH, 2) and not out.status.any()
    assert torch.equal(moved.lengths, names["length"] + 1 + out.num_accepted)


def after_laws(names: dict[str, Any]) -> None:
    assert names["out"].stats.num_drafted > 0


def after_planning(names: dict[str, Any]) -> None:
    assert len(names["plan"].choices) == 16 and names["best"] in [None, *names["plan"].choices]
    assert names["seen"].acceptance.shape[1] == 5 and names["forward"] > 0


def nothing_more(names: dict[str, Any]) -> None:
    """The page contains its own assertions."""


SETUPS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "README.md": (lambda: a_step() | models() | {"input_ids": prompts(6)[0]}, after_readme),
    "docs/using.md": (using, after_using),
    "docs/in-an-engine.md": (dict, nothing_more),
    "docs/porting.md": (dict, after_porting),
    "docs/rules.md": (a_step, nothing_more),
    "docs/trees.md": (a_tree_step, after_trees),
    "docs/laws.md": (laws, after_laws),
    "docs/medusa.md": (medusa, nothing_more),
    "docs/errors.md": (dict, nothing_more),
    "docs/what-it-gains.md": (models, after_planning),
    "docs/audit.md": (lambda: {"torch": torch}, nothing_more),
}


def run_python(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a page's Python blocks; an error is reported at its line of the page."""
    for block in blocks(page):
        if block.language == "python" and block.reason is None:
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), names)
    return names


@pytest.mark.parametrize("page", SETUPS)
def test_the_code_of_a_page_runs(page: str) -> None:
    setup, check = SETUPS[page]
    check(run_python(page, setup()))


def test_every_block_is_run_or_says_why_not() -> None:
    for page in PAGES:
        indented = re.search(
            r"\n\n    [^ \n].*", re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)
        )
        assert not indented, f"{page}: a block without a fence, which nothing would run: {indented}"
    for block in ALL_BLOCKS:
        run = block.language in ("sh", *CHECKED_ELSEWHERE) or (block.language == "python" and block.page in SETUPS)
        assert run or block.reason, f"{block}: nothing runs this block of {block.language or 'no language'}"
    assert all(name in globals() for name in CHECKED_ELSEWHERE.values())


def test_the_example_of_a_drafter_in_its_docstring_works() -> None:
    example = (inspect.getdoc(sk.Drafter) or "").partition("::\n\n")[2].partition("\n\n`NgramDrafter`")[0]
    names: dict[str, Any] = {"Drafter": sk.Drafter, "Draft": sk.Draft}
    exec(textwrap.dedent(example), names)
    given = models()
    arguments = {
        "attention_mask": given["mask"],
        "sampling": sk.SamplingParams(0.0),
        "max_new_tokens": 12,
        "num_speculative_tokens": 3,
    }
    plain, drafted = (
        sk.generate(given["model"], given["input_ids"], drafter=drafter, **arguments)
        for drafter in (sk.NoDrafter(), names["RepeatLast"]())
    )
    assert torch.equal(plain.tokens, drafted.tokens) and drafted.stats.num_drafted > 0


def chi_square(acceptance: str, by_position: bool) -> float:
    """docs/trees.md's example as written, on many sequences at once: Pearson's statistic of the first two tokens
    against the target's own distribution; 24 degrees of freedom. With `by_position`, keys are those of the node's
    depth.
    """
    batch, vocab = 60_000, 5
    names = a_tree_step(batch, vocab)
    (example,) = (b.text for b in blocks("docs/trees.md") if "sk.verify_tree(" in b.text)
    example = example.replace('"recursive"', f'"{acceptance}"')
    if by_position:
        by_node, positions = "noise_keys(seeds, tree, step=step)", "length[:, None] + tree.position_ids"
        assert by_node in example
        example = example.replace(by_node, f"noise_keys(seeds, {positions}, 'draft', step)")
    exec(example, names)
    probs, tokens = float64_law(names["table"]), names["out"].tokens[:, :2].clone()
    second = torch.from_numpy(probs)[tokens[:, 0]].multinomial(1, generator=torch.Generator().manual_seed(0))[:, 0]
    tokens[:, 1] = torch.where(tokens[:, 1] < 0, second, tokens[:, 1])  # where only one token came, the next step's
    seen = torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab**2).double()
    expected = batch * torch.from_numpy(probs[0][:, None] * probs).flatten()
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("acceptance", ["recursive", "traversal"])
def test_the_example_of_a_tree_is_lossless(acceptance: str) -> None:
    assert chi_square(acceptance, by_position=False) < 60  # 24 degrees of freedom: p = 6e-5


def test_keys_by_position_would_not_be() -> None:
    """What docs/trees.md warns of: siblings whose children are drawn with the same noise."""
    assert chi_square("traversal", by_position=True) > 120


# --- commands ---------------------------------------------------------------------------------------------------------

Command = list[str]


class Parsed(Exception):
    """Raised in place of what a command would do after parsing its arguments, or of its refusal."""


def commands(text: str) -> list[Command]:
    joined = re.sub(r"\\\n\s*", "", text)
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def inline(page: str) -> list[Command]:
    """Commands within a sentence."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    quoted = [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)]
    return [shlex.split(text) for text in quoted if re.match(r"(make|specdec|python -m) [a-z]", text)]


def exists(command: Command, config: pytest.Config, monkeypatch: pytest.MonkeyPatch, mentioned: bool = False) -> None:
    """Fail unless the command exists and takes its arguments; nothing of it runs. One that is only mentioned may lack
    required arguments.
    """
    program, *arguments = command
    if program == "make":
        assert shutil.which("make"), "make is not installed"
        done = subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}
        )
        assert done.returncode == 0, done.stderr
        if arguments[0].startswith("test") and len(arguments) > 1:
            are_of_pytest(shlex.split(arguments[1].removeprefix("ARGS=")), config)
        elif len(arguments) > 1:
            module = {"demo": "specdec_kernels demo", "bench": "bench.run", "gpu-report": "bench.gpu_report"}
            module |= {"gpu-peers": "bench.peers", "gpu-model": "bench.gpu.model"}
            module |= {"soak": "python_tests.soak", "fuzz": "python_tests.fuzz"}
            parses(
                [*module[arguments[0]].split(), *shlex.split(arguments[1].removeprefix("ARGS="))],
                monkeypatch,
                mentioned,
            )
    elif program == "specdec":
        parses(["specdec_kernels", *arguments], monkeypatch, mentioned)
    elif command[:2] == ["python", "-m"]:
        parses(command[2:], monkeypatch, mentioned)
    else:
        found = ROOT / program
        assert found.is_file() and os.access(found, os.X_OK), f"there is no command {program}"


def are_of_pytest(arguments: list[str], config: pytest.Config) -> None:
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            value = config.getoption(name)  # ValueError: no such option
            # pytest takes a value that stands alone for a path, and looks there for whatever defines the option.
            assert equals or name[:2] != "--" or isinstance(value, bool), f"{name}=VALUE, with its sign"
        elif argument.endswith(".py") or "/" in argument:
            assert (ROOT / argument).exists(), argument


def parses(words: Command, monkeypatch: pytest.MonkeyPatch, mentioned: bool) -> None:
    """Run a module until its last parser has taken the arguments."""
    module, *arguments = words
    if module == "bench.gpu.bench":  # it first makes its folder, named after the GPU
        arguments += ["--folder", str(ROOT / "build/test_docs")]
    parse = ArgumentParser.parse_args

    def stop(self: ArgumentParser, *given: Any, **named: Any) -> Namespace:
        namespace = parse(self, *given, **named)
        if self.prog == "specdec":
            return namespace  # its subcommands have parsers of their own
        raise Parsed

    def refuse(self: ArgumentParser, message: str) -> NoReturn:
        assert mentioned and "arguments are required" in message, f"{shlex.join(words)}: {message}"
        raise Parsed

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about a module that another test has imported
        patch.setattr(ArgumentParser, "parse_args", stop)
        patch.setattr(ArgumentParser, "error", refuse)
        patch.setattr(Path, "exists", lambda self: True)  # pages say FOLDER where a reader would name one
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(Parsed):
            if module == "specdec_kernels":
                cli.main(arguments)  # below the level that turns every exception into a status
            else:
                runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist(page: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [c for b in blocks(page) if b.language == "sh" and b.reason is None for c in commands(b.text)]
    for command in shown:
        exists(command, pytestconfig, monkeypatch)
    for command in inline(page):
        exists(command, pytestconfig, monkeypatch, mentioned=True)


def test_the_commands_of_ci_exist(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / ".ci/run").read_text().replace("\\\n", "").replace("${3:-}", "")
    text = re.sub(r"\$\(.*\)+", "7", text)  # what the shell computes
    (common,) = re.findall(r'make "\$2" ARGS="(.+)"', text)
    shown = [(target, f"{common} {more}") for target, more in re.findall(r'part_of \d+ (\S+)(?: "(.+)")?', text)]
    shown += re.findall(' make ([a-z-]+) ARGS="(.+)"', text)
    assert [target for target, _ in shown] == ["test-transformers", "test-all", "test-all", "test", "soak", "fuzz"]
    for target, arguments in shown:
        exists(["make", target, f"ARGS={arguments}"], pytestconfig, monkeypatch)


@pytest.mark.parametrize(
    "wrong",
    ["make tests", "specdec medusa trian x", "python -m bench.run --ops verify_chain", "./ci/run", "pip install x",
     'make test ARGS="--case=3"', 'make test ARGS="--tier long"', 'make test ARGS="python_tests/no_such_file.py"',
     'make demo ARGS="--promts x"'],
)  # fmt: skip
def test_a_wrong_command_is_seen(wrong: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "No rule to make|invalid choice|unrecognized argument|no command|no option|with its sign|no_such_file"
    with pytest.raises((AssertionError, ValueError), match=said):
        exists(shlex.split(wrong), pytestconfig, monkeypatch)


# --- links, paths, widths ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from a page's headings."""
    heads = re.findall(r"^#+ (.*)", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_and_paths_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), f"{page}: there is no {target}"
        assert not anchor or anchor in anchors(found), f"{page}: {found.name} has no heading #{anchor}"
    folders = r"(?:specdec_kernels|csrc|bench|docs|python_tests|\.ci)/[\w./-]+"
    for path in re.findall(rf"`({folders})`", text):
        placeholder = re.search(r"/(?:\w+_)?x\b", path)
        assert placeholder or (ROOT / path).exists(), f"{page}: there is no {path}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_the_index_answers_the_four_questions_first() -> None:
    listed = re.findall(r"^(\d)\. \*\*(.+?)\*\*((?:.*\n   )*.*)$", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    asked = ["would it gain on my model and my prompts", "With which drafter", "ever make me slower", "How do I see it"]
    assert len(listed) == len(asked)
    for (number, question, answer), wanted in zip(listed, asked, strict=True):
        assert wanted in question and "](" in answer, f"{number}. {question}"
        assert re.search(r"`specdec |`--", answer), f"{number}. {question} names no command"


def test_the_models_that_are_served_are_listed() -> None:
    text = (ROOT / "docs/using.md").read_text()
    (listed,) = re.findall(r"one\s+of\s+these\s+`model_type`s: ([^.]+)\.", text)
    assert set(re.split(r"[,;]\s+", listed)) == DECODERS | ENCODER_DECODERS


def test_the_readme_is_one_screen_and_lines_are_readable() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    for page in PAGES:
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
            limit = COLUMNS["table" if line.startswith("|") else "text"]
            assert len(line) <= limit or page == "CONTRIBUTING.md", f"{page}:{number}: {len(line)} columns"


# --- tables that list what there is -----------------------------------------------------------------------------------


def first_cells(page: str, heading: str) -> list[str]:
    """The names in backquotes in the first column of the table whose first heading this is."""
    text = (ROOT / page).read_text()
    tables = re.findall(rf"^\| {re.escape(heading)} \|.*\n(?:\|.*\n)+", text, flags=re.MULTILINE)
    return [
        name for table in tables for name in re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\|([^|]+)", table, re.M)))
    ]


def rules_of(call: Callable[[], object]) -> list[str]:
    """The acceptance rules that an op names when it refuses an unknown one."""
    with pytest.raises(ValueError, match="acceptance must be one of") as refused:
        call()
    return str(refused.value).partition("one of ")[2].partition(", got")[0].split(", ")


def test_the_tables_of_rules_have_them_all() -> None:
    one = torch.zeros(1, 1, 3)
    of_chains = rules_of(lambda: sk.verify_chain(one, torch.zeros(1, 0).long(), acceptance="?"))
    of_trees = rules_of(
        lambda: sk.verify_tree(one, sk.DraftTree.from_parents([-1]), torch.zeros(1, 1).long(), acceptance="?")
    )
    listed = [name.strip('"') for name in first_cells("docs/rules.md", "rule")]
    assert sorted(listed) == sorted([*of_chains, *of_trees])


def test_the_tables_of_drafters_laws_and_flags_have_them_all() -> None:
    drafters = {name for name in sk.__all__ if name.endswith("Drafter")} - {"Drafter", "TreeDrafter"}
    assert {name.partition("(")[0] for name in first_cells("docs/using.md", "drafter")} == drafters
    laws = {name: law for name, law in vars(sk.laws).items() if isinstance(law, type) and not name.startswith("_")}
    known = {name for name, law in laws.items() if issubclass(law, sk.laws.TargetLaw) and hasattr(law, "number")}
    listed = first_cells("docs/laws.md", "`sk.laws.`")
    assert {name.partition("(")[0] for name in listed} - {"sk.laws."} == known, "docs/laws.md: a row for each law"
    assert known < set(sk.laws.__all__)
    table = re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert {name: int(value) for name, value in table} == {flag.name: flag.value for flag in [sk.Status.OK, *sk.Status]}
    variables = re.findall(r"^``(\w+)``", inspect.getdoc(config) or "", re.MULTILINE)
    assert first_cells("docs/errors.md", "environment variable") == variables


# --- places to touch --------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """For an example's patch, as arguments of pytest: the tests that it adds and those that find it; and those that ask
    for what the page's end leaves to do.
    """

    tests: str
    left: frozenset[str] = frozenset()


EXAMPLES = {
    "docs/adding-a-law.md": Example(
        "Sure and (is_the_cascades or nothing_flips) or same_numbers and LawKind or tables_of_drafters "
        "or no_file_is_too_long",
        frozenset({"python_tests/ops/test_arguments.py", "python_tests/test_docs.py"}),
    ),
    "docs/adding-a-rule.md": Example(
        "antithetic or same_numbers and Acceptance or tables_of_rules or no_file_is_too_long",
        frozenset({"python_tests/ops/test_margins.py", "python_tests/test_docs.py"}),
    ),
    "docs/adding-an-op.md": Example(
        "common_prefix or has_every_op or reaches_every_op or list_of_ops or backend_agrees or test_reference "
        "or test_public_api or no_file_is_too_long"
    ),
}
SOURCES = ("bench", "csrc", "docs", "examples", "integration_tests", "specdec_kernels", "python_tests")
MOST_PLACES = {"an op": 17, "an acceptance rule of chains": 7, "an acceptance rule of trees": 12, "a target law": 5}


def patch_of(page: str) -> str:
    (patch,) = (block.text for block in blocks(page) if block.language == "diff")
    return patch


def test_the_readme_says_where_the_command_is_before_it_gives_one() -> None:
    text = (ROOT / "README.md").read_text()
    way, command = text.index(". .venv/bin/activate"), text.index("## Two commands")
    assert command < way < re.compile(r"`specdec (env|check|plan)").search(text, command).start()  # type: ignore[union-attr]


@pytest.mark.parametrize("what", MOST_PLACES)
def test_a_thing_is_added_in_few_places(what: str) -> None:
    """They are those of its page's patch, whose number CONTRIBUTING states, or else those that it names."""
    article, name = what.split(" ", 1)
    (row,) = re.findall(rf"^\| {article} \*\*{name}\*\* .*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    if page := re.search(r"\]\((docs/adding-.*?\.md)\)", row):
        files = re.findall(r"^\+\+\+ b/(.*)", patch_of(page[1]), re.MULTILINE)
        assert page[1] in EXAMPLES and f"in {len(files)} files" in row
    else:
        files = re.findall(r"`([\w/.]+/[\w.]+\.\w+)`", row)
        assert all((ROOT / file).is_file() for file in files)
    assert 0 < len(files) <= MOST_PLACES[what] and len(files) == len(set(files))


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with all pages' patches, each of which also applies by itself, and the compiled parts
    built: the CPU kernels here, reusing this tree's valid objects; the emulated ones by the first test.
    """
    copy = tmp_path_factory.mktemp("patched")
    for folder in (*SOURCES, "build/obj/_C_cpu", "build/obj/_C_emulated"):
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ROOT.glob("*.*"):
        if file.is_file():
            shutil.copy(file, copy)
    for options in (["--check"], []):
        for page in EXAMPLES:
            subprocess.run(["git", "apply", *options, "-"], cwd=copy, input=patch_of(page), text=True, check=True)
    run_in(copy, "setup.py", "-q", "build_ext", "--inplace")
    return copy


def run_in(copy: Path, *command: str, status: int = 0) -> str:
    """The output of a Python command in that folder; its exit status must be `status`."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "SPECDEC_CUDA": "0"}
    done = subprocess.run([sys.executable, *command], cwd=copy, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.xdist_group("patches")  # one process builds
@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patch")
@pytest.mark.parametrize("page", EXAMPLES)
def test_an_examples_patch_is_all_that_it_takes(page: str, patched: Path) -> None:
    """What the page's patch adds works on every backend, and no test that finds it asks for more than the page does."""
    tests, left = EXAMPLES[page]
    options = "-m pytest -v -p no:cacheprovider --tier=all --cases=60 --tb=short python_tests -k".split()
    report = run_in(patched, *options, tests, status=int(bool(left)))
    assert set(re.findall(r"^(?:FAILED|ERROR) ([\w/.]+)", report, re.MULTILINE)) == left, report
    built = [backend for backend in present("verify_chain") if backend.name != "cuda"]  # for `run_in`
    for backend in (*built, *present_emulated("verify_chain", 0)):
        assert re.search(rf"\[{backend}(-.*)?\] PASSED", report), f"no test ran on {backend}\n{report}"
