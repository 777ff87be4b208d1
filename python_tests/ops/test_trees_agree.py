"""Random verify steps of token trees: every backend gives the reference's paths and tokens, or a predicted exception.

As in test_backends_agree.py for chains: a sequence may differ where the reference in float64, run with uniforms and
bounds moved down and up by the error, differs from itself. That is looked at only where a sequence differs.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import random

import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.ops import trees
from python_tests.ops.borderline import close_scores, shared_in_float64
from python_tests.ops.chains import mixed, spoil
from python_tests.ops.inputs import DTYPES
from python_tests.support import Backend
from specdec_kernels.ops.arguments import TREE_ACCEPTANCES, VerifyTreeArguments

OP = "verify_tree"
ERROR = 1e-5  # as a share of the whole: what is left after several rejections has lost digits
CELLS = 60_000  # logits of an example
reference = importlib.import_module("specdec_kernels.backends.reference.verify_tree").verify_tree


@functools.lru_cache(600)
def example(seed: int, most: int) -> tuple[trees.Arguments, sk.VerifyOutput]:
    """The arguments of at most so many sequences, and what the reference makes of them."""
    choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    acceptance = choose.choice([*trees.ACCEPTANCES, *trees.NEED_DRAFT])
    num_nodes, vocab = choose.choice([1, 2, 3, 5, 8, 13]), choose.choice([2, 5, 17, 60, 1023, 1025])
    batch = max(1, min(most, CELLS // (num_nodes * vocab)))

    def parameters() -> sk.SamplingParams:
        some = [
            {
                "temperature": choose.choice([1.0, 0.7, 1.3, 0.0]), "top_k": choose.choice([0, 0, 2, 7]),
                "top_p": choose.choice([1.0, 0.9, 0.5]), "min_p": choose.choice([0.0, 0.0, 0.05]),
            }
            for _ in range(choose.randint(1, 3))
        ]  # fmt: skip
        return mixed(some, batch, choose.random() < 0.3, rng)

    kind = choose.choice(["full", "reduced", "probs", "stats", *([] if acceptance in trees.NEED_DRAFT else ["none"])])
    law = None
    if acceptance == "sample" and kind in ("full", "stats") and choose.random() < 0.7:
        law = choose.choice(trees.LAWS)
    made = trees.make(
        seed, batch, num_nodes, vocab, acceptance=acceptance, kind=kind, dtype=choose.choice(DTYPES),
        params=parameters(), draft_params=parameters(), spread=choose.choice([0.1, 1.0, 3.0]), law=law,
        per_sequence=choose.random() < 0.7, spoil_tokens=choose.choice([0.0, 0.05]),
    )  # fmt: skip
    if acceptance == "typical":
        made |= {"epsilon": choose.choice([0.09, 0.3]), "delta": choose.choice([0.3, 0.9])}
    if choose.random() < 0.4:
        made["eos_token_ids"] = torch.tensor([0, 3])
    if choose.random() < 0.2:
        made["node_tokens"][0, 0] = -1
    if choose.random() < 0.1 and "uniform_samples" in made:
        made["uniform_samples"][-1, 0] = choose.choice([math.nan, 1.0, -0.5])
    if choose.random() < 0.2 and kind not in ("stats", "probs"):
        made |= {name: spoil(made[name], rng) for name in ("target_logits", "draft_logits") if name in made}
    return made, sk.verify_tree(**made, backend="reference")


def in_float64(arguments: trees.Arguments, by: float) -> tuple[Tensor, ...]:
    """The float64 reference with everything moved by `by`."""
    tree, given = arguments["tree"], arguments.get
    out: tuple[Tensor, ...] = reference(
        VerifyTreeArguments(
            shared_in_float64(arguments, by, by), arguments["node_tokens"], tree.links, tree.status, tree.max_depth,
            TREE_ACCEPTANCES[arguments["acceptance"]], given("epsilon", 0.09) * (1 + 10 * by),
            given("delta", 0.3) * (1 + 10 * by),
        )
    )  # fmt: skip
    return out


def borderline(arguments: trees.Arguments) -> Tensor:
    """``[batch]`` bool: which sequences the contract excepts."""
    low, high = in_float64(arguments, -ERROR), in_float64(arguments, ERROR)
    out = (low[0] != high[0]).any(-1) | (low[4] != high[4]).any(-1)
    if arguments["acceptance"] == "match":
        out |= close_scores(arguments)
    return out


def differing(arguments: trees.Arguments, got: sk.VerifyOutput, expected: sk.VerifyOutput) -> Tensor:
    """``[batch]`` bool: sequences with any other output; AssertionError where no border is near."""
    batch = len(expected.tokens)
    pairs = [(getattr(got, name).cpu(), getattr(expected, name)) for name in trees.OUTPUTS]
    different = torch.stack([(a != b).view(batch, -1).any(-1) for a, b in pairs]).any(0)
    if different.any():
        worst = (different & ~borderline(arguments)).nonzero().flatten().tolist()
        assert not worst, (
            f"sequences {worst[:5]} differ and are not borderline: {[(a[worst], b[worst]) for a, b in pairs]}"
        )
    return different


def test_every_backend_agrees_with_the_reference(backend: Backend, pytestconfig: pytest.Config) -> None:
    wanted, done, different = backend.cases(pytestconfig.getoption("cases")), 0, 0
    most = backend.batch(max(8, min(64, pytestconfig.getoption("cases") // 200)))
    for seed in itertools.count(10**6 * pytestconfig.getoption("seed")):
        arguments, expected = example(seed, most)
        try:
            different += int(differing(arguments, trees.run(backend, arguments), expected).sum())
        except AssertionError as error:
            raise AssertionError(f"{backend}: example {seed}, {arguments['acceptance']}: {error}") from None
        done += len(expected.tokens)
        if done >= wanted:
            break
    print(f"\n{backend}: {done} sequences, {different} different", end="")
    assert different <= 1 + done * 2e-4


@pytest.mark.parametrize("acceptance", ["sample", "match", "typical", "recursive", "traversal"])
def test_a_small_error_would_be_seen(acceptance: str) -> None:
    """The exception does not swallow defects: uniforms off by 1e-3, a temperature by 1 %."""
    one = {"temperature": 0.9, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    params = mixed([one], 400, False, torch.Generator())
    arguments = trees.make(5, 400, 8, 30, acceptance=acceptance, params=params, draft_params=params, spread=1.0)
    wrong = dict(arguments)
    if acceptance in ("match", "typical"):
        wrong["params"] = sk.SamplingParams(params.temperature * 1.01, params.top_k, params.top_p, params.min_p)
    else:
        wrong["uniform_samples"] = (arguments["uniform_samples"] + 1e-3).clamp_max(1 - 2.0**-24)
    off, right = (sk.verify_tree(**a, backend="reference") for a in (wrong, arguments))
    with pytest.raises(AssertionError, match="differ and are not borderline"):
        differing(arguments, off, right)
