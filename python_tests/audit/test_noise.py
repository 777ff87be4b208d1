"""Given random numbers instead of torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_kernels.audit.noise import Noise, UnknownNoise

ROWS, VOCAB = 5, 3
LENGTHS = np.array([2, 1, 2, 1, 1])


def numbers(columns: int) -> np.ndarray:
    """Different ones for each row and column."""
    return (np.arange(ROWS * columns).reshape(ROWS, columns) + 0.5) / (ROWS * columns)


def test_each_call_takes_the_next_columns_of_its_rows() -> None:
    given = numbers(4)
    with Noise(given, LENGTHS, VOCAB) as noise:
        first, packed = torch.rand(ROWS), torch.rand(int(LENGTHS.sum()), dtype=torch.float64)
        last = torch.empty(ROWS, 1).uniform_(2.0, 4.0)
    assert torch.equal(first, torch.from_numpy(given[:, 0]).float())
    assert packed.tolist() == [given[row, 1 + i] for row, length in enumerate(LENGTHS) for i in range(length)]
    torch.testing.assert_close(last[:, 0].double(), torch.from_numpy(2 + 2 * given[:, 3]))
    assert noise.kinds == ["uniform"] * 4 and noise.dtypes == {torch.float32, torch.float64}


def test_choices_and_races() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0]]).repeat(ROWS, 1)
    given = np.array([[0.0, 0.0], [0.2499, 0.4], [0.2501, 0.99], [0.9, 0.5], [1 - 2.0**-24, 0.34]])
    with Noise(given, LENGTHS, VOCAB) as noise:
        drawn = torch.multinomial(weights, 1)[:, 0]
        winner = (torch.ones(ROWS, VOCAB) / torch.empty(ROWS, VOCAB).exponential_()).argmax(-1)
    assert drawn.tolist() == [1, 1, 2, 2, 2]
    assert winner.tolist() == [0, 1, 2, 1, 1] and noise.kinds == ["choice", "race"]
    with Noise(given, LENGTHS, VOCAB, {0: np.tile([4.0, 1.0, 2.0], (ROWS, 1))}):
        assert torch.empty(ROWS, VOCAB).exponential_().tolist() == [[4.0, 1.0, 2.0]] * ROWS


def test_rows_that_are_none_and_tensors_by_name() -> None:
    """As of a verifier that draws for rejected rows alone, asked for a row that none was rejected in."""
    with Noise(numbers(3)[:1], LENGTHS[:1], VOCAB) as noise:
        assert torch.multinomial(torch.ones(0, VOCAB), 1).shape == (0, 1)
        assert torch.empty(0, VOCAB).exponential_().shape == (0, VOCAB)
        assert noise.kinds == []
        by_name = torch.multinomial(input=torch.tensor([[0.0, 1.0]]), num_samples=1)
        flipped = torch.bernoulli(input=torch.tensor([1.0]))
    assert by_name.tolist() == [[1]] and flipped.tolist() == [1.0] and noise.kinds == ["choice", "uniform"]


def test_a_generator_that_is_set_back_gives_the_same_numbers() -> None:
    with Noise(numbers(2), LENGTHS, VOCAB) as noise:
        generator = torch.Generator().manual_seed(3)
        first, second = torch.rand(ROWS, generator=generator), torch.rand(ROWS, generator=generator)
        again = torch.rand(ROWS, generator=generator.manual_seed(3))
    assert torch.equal(first, again) and not torch.equal(first, second) and len(noise.kinds) == 2


def test_one_that_is_set_back_gives_them_to_other_functions_too() -> None:
    with Noise(numbers(1), LENGTHS, VOCAB) as noise:
        generator = torch.Generator().manual_seed(3)
        first = torch.rand(ROWS, generator=generator)
        again = torch.empty(ROWS).uniform_(generator=generator.manual_seed(3))
        assert torch.equal(first, again) and len(noise.kinds) == 1
        with pytest.raises(UnknownNoise, match="a race with the numbers of another draw"):
            torch.empty(ROWS, VOCAB).exponential_(generator=generator.manual_seed(3))


def test_what_it_cannot_answer_for() -> None:
    with Noise(numbers(1), LENGTHS, VOCAB):
        for call in (lambda: torch.randn(ROWS), lambda: torch.rand(11), lambda: torch.multinomial(torch.ones(4), 2)):
            with pytest.raises(UnknownNoise):
                call()
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            torch.multinomial(torch.zeros(ROWS, VOCAB), 1)
