"""What `specdec_kernels.testing` refuses: outputs of a verifier that are none, and arguments out of their range."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import laws
from specdec_kernels.testing import (
    LATTICE,
    ChainProblem,
    TreeProblem,
    exact_law,
    float64_target_law,
    joint_of,
    philox4x32,
    pieces,
    total_variation,
)

CHAIN = ChainProblem([torch.zeros(3), torch.zeros(3, 3)], [torch.tensor([1.0, 0.0, 0.0])])
TREE = TreeProblem([-1, 0], [torch.zeros(3), torch.zeros(3, 3)])


def ints(*values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


# Of a right output (tokens [n, 2], num_tokens [n]) what a verifier gives in its place.
OUTPUTS: dict[str, tuple[Callable[[sk.VerifyOutput], Any], str]] = {
    "none": (lambda out: None, "must give tensors tokens and num_tokens, got NoneType"),
    "tuple": (lambda out: (out.tokens, out.num_tokens), "must give tensors tokens and num_tokens, got tuple"),
    "lists": (
        lambda out: SimpleNamespace(tokens=out.tokens.tolist(), num_tokens=out.num_tokens),
        "must give tensors tokens and num_tokens, got SimpleNamespace",
    ),
    "wider": (
        lambda out: out._replace(tokens=torch.nn.functional.pad(out.tokens, (0, 1), value=-1)),
        r"must give integer tokens \[\d+, 2\] and num_tokens \[\d+\], got \[\d+, 3\] torch.int64 and \[\d+\]",
    ),
    "narrower": (lambda out: out._replace(tokens=out.tokens[:, :1]), r"must give integer tokens .*, got \[\d+, 1\] "),
    "fewer rows": (lambda out: out._replace(tokens=out.tokens[:1]), r"must give integer tokens .*, got \[1, 2\] "),
    "a count for all": (
        lambda out: out._replace(num_tokens=out.num_tokens[0]),
        r"must give integer tokens .* and \[\]$",
    ),
    "no ids": (lambda out: out._replace(tokens=out.tokens.float()), "must give integer tokens .* torch.float32 and"),
    "nothing": (
        lambda out: out._replace(tokens=out.tokens * 0 - 1, num_tokens=out.num_tokens * 0),
        "must give a token or more of each step",
    ),
    "now and then nothing": (
        lambda out: out._replace(
            tokens=out.tokens.masked_fill((out.num_tokens == 1)[:, None], -1),
            num_tokens=out.num_tokens.masked_fill(out.num_tokens == 1, 0),
        ),
        "must give a token or more of each step",
    ),
    "more than there are": (
        lambda out: out._replace(num_tokens=torch.where(out.num_tokens == 2, 9, out.num_tokens)),
        "must give as many tokens as num_tokens says",
    ),
    "no number": (
        lambda out: out._replace(tokens=out.tokens * 0 - 1, num_tokens=out.num_tokens * torch.nan),
        "must give a token or more of each step",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_no_output_is_an_assertion_of_exact_law(name: str) -> None:
    spoil, message = OUTPUTS[name]

    def verify(*rows: Any, **given: Any) -> Any:
        return spoil(sk.verify_chain(*rows, **given))

    with pytest.raises(AssertionError, match=f"^verify {message}"):
        exact_law(verify, CHAIN, "token")


def test_a_tree_s_step_without_tokens_is_an_assertion() -> None:
    def verify(*rows: Any, **given: Any) -> Any:
        out = sk.verify_tree(*rows, **given)
        return out._replace(tokens=out.tokens * 0 - 1, num_tokens=out.num_tokens * 0)

    with pytest.raises(AssertionError, match="^verify must give a token or more"):
        exact_law(verify, TREE, "sample")


ONE = np.ones(1)
PIECES = pieces(lambda path, uniforms: path, 2, 2)
P = np.array([[0.5, 0.3, 0.2]])
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    *[
        (
            lambda emitted=emitted: joint_of(CHAIN, [emitted], ONE, ints(0)),  # type: ignore[misc]
            ValueError,
            f"joint_of: emitted must be tuples of 1 to 2 ids in [0, 2], got {emitted}",
        )
        for emitted in ((), (0, 1, 2), (-1,), (0, -2), (3,))
    ],
    (
        lambda: joint_of(CHAIN, [([0],)], ONE, ints(0)),  # type: ignore[list-item]
        TypeError,
        "joint_of: emitted must be a sequence of tuples of integers",
    ),
    (lambda: joint_of(CHAIN, [(0,)], ONE, ints(3)), ValueError, "joint_of: path must be in [0, 2], got 3"),
    (lambda: joint_of(CHAIN, [(0,)], ONE, ints(-1)), ValueError, "joint_of: path must be in [0, 2], got -1"),
    (lambda: joint_of(CHAIN, [(0,)], ONE[0], ints(0)), TypeError, "joint_of: volume must be an array"),
    (
        lambda: joint_of(CHAIN, [(0,)], np.ones(()), ints(0)),
        ValueError,
        "joint_of: volume must be [boxes] float64, got []",
    ),
    (
        lambda: joint_of(CHAIN, [(0,)], np.ones((1, 2)), ints(0)),
        ValueError,
        "joint_of: volume must be [boxes] float64, got [1, 2]",
    ),
    (
        lambda: joint_of(CHAIN, [(0,)], ONE, ints([0])),
        ValueError,
        "joint_of: path must be [boxes] int64, got [1, 1]",
    ),
    (lambda: PIECES.box(ints(2), ints([0, 0])), ValueError, "Pieces: path must be in [0, 1], got 2"),
    (lambda: PIECES.box(ints(-1), ints([0, 0])), ValueError, "Pieces: path must be in [0, 1], got -1"),
    (lambda: PIECES.box(np.array(0), ints([0, 0])), ValueError, "Pieces: path must be [n] int64, got []"),
    (lambda: PIECES.box(ints([0]), ints([0, 0])), ValueError, "Pieces: path must be [n] int64, got [1, 1]"),
    (
        lambda: PIECES.box(ints(0), ints([0, LATTICE])),
        ValueError,
        f"Pieces: points must be in [0, {LATTICE - 1}], got {LATTICE}",
    ),
    (
        lambda: PIECES.box(ints(0), ints([-1, 0])),
        ValueError,
        f"Pieces: points must be in [0, {LATTICE - 1}], got -1",
    ),
    (
        lambda: pieces(lambda path, uniforms: None, 1, 1),  # type: ignore[arg-type,return-value]
        ValueError,
        "pieces: run must give an array [9] of outcomes, got NoneType",
    ),
    (
        lambda: pieces(lambda path, uniforms: path[:1], 1, 1),
        ValueError,
        "pieces: run must give an array [9] of outcomes, got [1]",
    ),
    (
        lambda: total_variation(np.ones((0, 2)), np.ones(2)),
        ValueError,
        "total_variation: laws must be [n >= 1, ...], and not empty, got [0, 2]",
    ),
    (lambda: total_variation(np.ones((1, 0)), np.ones(0)), ValueError, "total_variation: laws must be [n >= 1"),
    (lambda: total_variation(np.ones(()), np.ones(())), ValueError, "total_variation: laws must be [n >= 1"),
    *[
        (
            lambda law=law, shape=shape: float64_target_law(law, *[np.ones(shape)] * 4),  # type: ignore[misc]
            ValueError,
            f"float64_target_law: P must be [..., vocab], got {list(shape)}",
        )
        for law in (laws.Lossy(0.3), laws.Chow(0.5))
        for shape in ((), (2, 0))
    ],
    (
        lambda: philox4x32(np.zeros((3, 2), np.uint64), np.zeros((2, 4), np.uint64)),
        ValueError,
        "philox4x32: counter must be [..., 4] that broadcasts with a key [3, 2], got [2, 4]",
    ),
    *[
        (
            lambda token=token: ChainProblem(CHAIN.target, CHAIN.draft, stop=0, stop_token=token),  # type: ignore[misc]
            ValueError,
            f"ChainProblem: stop_token must be outside [0, 2], got {token}",
        )
        for token in (0, 2)
    ],
    *[
        (
            lambda paths=paths: CHAIN.call(sk.verify_chain, paths, ints([0, 0]), "token"),  # type: ignore[misc]
            ValueError,
            f"ChainProblem: paths must be {said}",
        )
        for paths, said in (
            (ints([3]), "in [0, 2], got 3"),
            (ints([-1]), "in [0, 2], got -1"),
            (ints(0), "[n, 1], got [1]"),
        )
    ],
    (
        lambda: TREE.call(sk.verify_tree, ints([-2]), ints([0, 0]), "sample"),
        ValueError,
        "TreeProblem: paths must be in [-1, 2], got -2",
    ),
    *[
        (
            lambda uniforms=uniforms: CHAIN.call(sk.verify_chain, ints([0]), uniforms, "token"),  # type: ignore[misc]
            ValueError,
            f"ChainProblem: uniforms must be {said}",
        )
        for uniforms, said in (
            (ints([0, LATTICE]), f"in [0, {LATTICE - 1}], got {LATTICE}"),
            (ints([0, -1]), f"in [0, {LATTICE - 1}], got -1"),
            (ints([0, 0], [0, 0]), "[n=1, num_uniforms], got [2, 2]"),
            (ints(0, 0), "[n=1, num_uniforms], got [2]"),
        )
    ],
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_is_refused(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error and str(raised.value).startswith(message)


def test_what_is_at_the_ends_of_a_range_is_taken() -> None:
    joint = joint_of(CHAIN, [(0,), (2, 2)], np.array([0.5, 0.5]), ints(0, 2))
    assert joint.shape == (1, 3, 3) and joint[0, 2, 2] == pytest.approx(0.5 * CHAIN.paths()[1][2])
    assert PIECES.box(ints(0, 1), ints([0, 0], [LATTICE - 1, LATTICE - 1])).tolist() == [0, 1]
    assert total_variation(P, P[0]) == 0
    for token in (-1, -7, 3):
        assert ChainProblem(CHAIN.target, CHAIN.draft, stop=0, stop_token=token).length == 0
    out = TREE.call(sk.verify_tree, ints([-1], [2]), ints([0, 0], [LATTICE - 1, 0]), "sample")
    assert out.num_tokens.tolist()[0] == 1
