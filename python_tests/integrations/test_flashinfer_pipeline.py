"""FlashInfer's pipelines by their names: what each run of processors gives, and which pipes there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels.integrations import flashinfer
from specdec_kernels.integrations.flashinfer_pipeline import (
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TensorType,
    TopK,
    TopP,
)

LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 2
PROBS = LOGITS.softmax(-1)
GIVEN: dict[str, Any] = {
    "temperature": 0.7, "top_k": torch.tensor([3, 9, 40, 1, 5]), "top_p": torch.tensor([0.5, 0.9, 0.8, 1.0, 0.3]),
    "min_p": torch.tensor([0.3, 0.1, 0.02, 1.0, 0.5]),
}  # fmt: skip
SCALED = flashinfer.softmax(LOGITS, 0.7)
CUTS = (PROBS, GIVEN["top_k"], GIVEN["top_p"])


def pipe(*processors: LogitsProcessor, of: TensorType | None = None, compile: bool = True) -> LogitsPipe:
    return LogitsPipe(processors, compile, of)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (pipe(Temperature()), LOGITS / 0.7),
        (pipe(Softmax()), flashinfer.softmax(LOGITS)),
        (pipe(Temperature(), Softmax(enable_pdl=True)), SCALED),
        (pipe(TopK(), of=TensorType.LOGITS), flashinfer.top_k_mask_logits(LOGITS, GIVEN["top_k"])),
        (pipe(TopK(), of=TensorType.PROBS), flashinfer.top_k_renorm_probs(PROBS, GIVEN["top_k"])),
        (pipe(TopP()), flashinfer.top_p_renorm_probs(PROBS, GIVEN["top_p"])),
        (pipe(Temperature(), Softmax(), TopP()), flashinfer.top_p_renorm_probs(SCALED, GIVEN["top_p"])),
    ],
)
def test_what_is_not_drawn_from_is_as_the_functions_make_it(made: LogitsPipe, expected: Tensor) -> None:
    x = LOGITS if made.initial_type is TensorType.LOGITS else PROBS
    assert torch.equal(made(x, **GIVEN), expected)
    apart = LogitsPipe(made.processors, compile=False, input_type=made.initial_type)
    torch.testing.assert_close(apart(x, **GIVEN), expected)
    apart.compile()
    assert torch.equal(apart(x, **GIVEN), expected)


def test_min_p_and_temperatures_of_rows() -> None:
    cut = pipe(MinP())(PROBS, min_p=GIVEN["min_p"])
    kept = PROBS >= GIVEN["min_p"][:, None] * PROBS.amax(-1, keepdim=True)
    torch.testing.assert_close(cut, (PROBS * kept) / (PROBS * kept).sum(-1, keepdim=True))
    each = torch.tensor([0.5, 1.0, 2.0, 0.1, 0.7])
    assert torch.equal(pipe(Temperature())(LOGITS, temperature=each), LOGITS / each[:, None])


TEMPERATURES = [0.0, 1e-40, 1.3e-38, 1e-5, 0.7, 1e30, 1e39, -1.0, torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_temperature_is_read_alike_compiled_or_not(dtype: torch.dtype, of: torch.dtype) -> None:
    """Those too that leave the likeliest alone, or are none; ties at them, and logits whose quotients are infinite."""
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-9.0, -5.0, -7.0, -5.0], [0.0, 40.0, 41.0, -torch.inf]])
    logits = rows.repeat_interleave(len(TEMPERATURES), 0).to(dtype)
    each = torch.tensor(TEMPERATURES * len(rows), dtype=torch.float64).to(of)
    made = pipe(Temperature(), Softmax())
    apart, last = LogitsPipe(made.processors, compile=False), pipe(Temperature(), TopK(), Sample())
    probs = made(logits, temperature=each)
    assert torch.equal(probs, flashinfer.softmax(logits, each))
    assert torch.equal(probs, made(logits, temperature=each[:, None]))
    torch.testing.assert_close(apart(logits, temperature=each), probs)
    scaled = pipe(Temperature())(logits, temperature=each)
    assert scaled.dtype == torch.promote_types(dtype, torch.float32) and not scaled.isnan().any()
    assert torch.equal(scaled, pipe(Temperature())(logits, temperature=each[:, None]))
    alone = (each.double() >= 0) & (each.double() < 2.0**-126)
    assert torch.equal(scaled[alone].exp(), probs[alone].to(scaled.dtype))
    assert probs[alone].unique().tolist() == [0, 1] and (probs[alone].sum(1) == 1).all()
    if dtype != torch.float64:  # of which top-k takes no logits
        assert torch.equal(last(logits, temperature=each, top_k=1)[alone].long(), probs[alone].argmax(1))
    for number in (1e-40, 1.3e-38, 1e-5, 0.7, 1e30):
        probs = made(logits, temperature=number)
        assert torch.equal(probs, flashinfer.softmax(logits, number))
        torch.testing.assert_close(apart(logits, temperature=number), probs)


def test_a_temperature_of_0_is_refused_compiled_or_not() -> None:
    for compiled in (True, False):
        for number in (0, 0.0, -0.0):
            with pytest.raises(ValueError, match=r"^Temperature: temperature must be > 0, got -?0"):
                pipe(Temperature(), Softmax(), Sample(), compile=compiled)(LOGITS, temperature=number)
        for wrong, message in ((-1.0, "must be finite and >= 0, got -1"), (torch.ones(5, 2), "Expected a 1D tensor")):
            with pytest.raises(ValueError, match=f"^Temperature: temperature:? {message}"):
                pipe(Temperature(), Softmax(), compile=compiled)(LOGITS, temperature=wrong)  # type: ignore[arg-type]


def test_parameters_of_other_names_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        pipe(Softmax())(LOGITS, temprature=0.5)  # type: ignore[call-arg]


DRAWN: list[tuple[LogitsPipe, Any, tuple[str, ...], int]] = [  # a pipe, its function and parameters; calls compiled
    (pipe(Sample(), of=TensorType.LOGITS), flashinfer.sampling_from_logits, (), 1),
    (pipe(Sample(False), of=TensorType.PROBS), flashinfer.sampling_from_probs, (), 1),
    (pipe(TopK(), Sample(), of=TensorType.LOGITS), flashinfer.top_k_sampling_from_probs, ("top_k",), 2),
    (pipe(TopK(), Sample(), of=TensorType.PROBS), flashinfer.top_k_sampling_from_probs, ("top_k",), 1),
    (pipe(TopP(), Sample()), flashinfer.top_p_sampling_from_probs, ("top_p",), 1),
    (pipe(MinP(), Sample()), flashinfer.min_p_sampling_from_probs, ("min_p",), 1),
    (pipe(Softmax(), TopK(), TopP(), Sample()), flashinfer.top_k_top_p_sampling_from_probs, ("top_k", "top_p"), 3),
]


@pytest.mark.parametrize(("made", "draw", "cuts", "calls"), DRAWN)
def test_tokens_are_those_of_the_functions(made: LogitsPipe, draw: Any, cuts: tuple[str, ...], calls: int) -> None:
    """Compiled or not, from rows or from those that indices name."""
    x, rows = LOGITS if made.initial_type is TensorType.LOGITS else PROBS, PROBS
    if draw is flashinfer.sampling_from_logits:
        rows = LOGITS
    apart = LogitsPipe(made.processors, compile=False, input_type=made.initial_type)
    for index in (None, torch.arange(200) % 5):
        given = {cut: value if index is None else value[0].item() for cut, value in GIVEN.items() if cut in cuts}
        expected = draw(rows, *given.values(), index, generator=torch.Generator().manual_seed(3))
        for one in (made, apart):
            found = one(x, **given, indices=index, generator=torch.Generator().manual_seed(3))
            assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert [len(made._runs), len(apart._runs)] == [calls, len(made.processors)]


def test_values_for_indices_are_those_of_outputs_right_before_the_draw() -> None:
    index, top_p = torch.tensor([0, 0, 0]), torch.tensor([1e-6, 0.5, 1.0])
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    drawn = torch.stack([pipe(TopP(), Sample())(probs, top_p=top_p, indices=index) for _ in range(60)])
    assert [len(column.unique()) for column in drawn.T] == [1, 1, 3]


def test_joint_filters_look_at_the_whole_row() -> None:
    """Where they are compiled: elsewhere top-p is of what top-k leaves."""
    probs, index = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.zeros(400, dtype=torch.int64)
    drawn = {}
    for joint in (False, True):
        for compiled in (False, True):
            made = pipe(TopK(joint), TopP(), Sample(), of=TensorType.PROBS, compile=compiled)
            tokens = made(probs, top_k=2, top_p=0.55, indices=index, generator=torch.Generator().manual_seed(0))
            drawn[joint, compiled] = tokens.unique().tolist()
    assert drawn == {(False, False): [0], (False, True): [0], (True, False): [0], (True, True): [0, 1]}


def test_which_pipes_there_are() -> None:
    made = pipe(Temperature(), Softmax(), TopK(), Sample())
    assert made.initial_type is TensorType.LOGITS and pipe(MinP()).initial_type is TensorType.PROBS
    assert repr(made) == "LogitsPipe([Temperature(), Softmax(), TopK(), Sample()])" and str(TensorType.PROBS) == "PROBS"

    class Own(TopP):
        pass

    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "processors must be 1 or more, got 0", {"processors": []}),
        (TypeError, "processors must be a sequence of Temperature", {"processors": [TopK]}),
        (TypeError, r"processors must be those of its module, got Own\(\)", {"processors": [Own()]}),
        (ValueError, r"input_type must be given .*, as TopK\(\) does, got None", {"processors": [TopK()]}),
        (TypeError, "input_type must be a TensorType or None, got str",
         {"processors": [TopK()], "input_type": "PROBS"}),
        (ValueError, r"processors\[0\] must take INDICES, got Sample\(\): it takes LOGITS or PROBS",
         {"processors": [Sample()], "input_type": TensorType.INDICES}),
        (ValueError, r"processors\[0\] must take LOGITS, got TopP\(\): it takes PROBS",
         {"processors": [TopP()], "input_type": TensorType.LOGITS}),
        (ValueError, r"processors\[1\] must take PROBS, got Softmax\(\)", {"processors": [Softmax(), Softmax()]}),
        (ValueError, r"processors\[2\] must take INDICES, got TopP\(\)", {"processors": [TopP(), Sample(), TopP()]}),
        (ValueError, r"processors\[1\] must take LOGITS, got MinP\(\)", {"processors": [Temperature(), MinP()]}),
        (TypeError, "custom_fusion_rules must be None: .*, got list",
         {"processors": [TopP()], "custom_fusion_rules": []}),
        (TypeError, "custom_validity_checks must be None: .*, got list",
         {"processors": [TopP()], "custom_validity_checks": [], "compile": False}),
    ]  # fmt: skip
    for error, message, options in wrong:
        with pytest.raises(error, match=f"^LogitsPipe: {message}"):
            LogitsPipe(**options)


def test_what_a_call_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^LogitsPipe: top_p must be given, as \[TopP\(\), .* needs it, got None"):
        pipe(TopP(), Sample())(PROBS, top_k=3)
    with pytest.raises(ValueError, match="^top_p_sampling_from_probs: top_p must be >= 0, got -1"):
        pipe(TopP(), Sample())(PROBS, top_p=-1)
    with pytest.raises(ValueError, match="^Temperature: temperature must be > 0, got 0"):
        pipe(Temperature())(LOGITS, temperature=0)
    with pytest.raises(ValueError, match="^Temperature: temperature: Sampling parameter tensor batch size mismatch"):
        pipe(Temperature())(LOGITS, temperature=torch.ones(3))
    with pytest.raises(TypeError, match="^Temperature: logits must be a tensor, got list"):
        pipe(Temperature())([1.0], temperature=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^MinP: min_p must be in .*, got 2"):
        pipe(MinP())(PROBS, min_p=2)
