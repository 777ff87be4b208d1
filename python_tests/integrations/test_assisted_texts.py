"""Which texts processors and stopping criteria see within transformers' assisted generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria

import specdec_kernels as sk
from python_tests.decoding.models import VOCAB, prompts
from python_tests.integrations.assistants import DRAFTED, OF_DECODERS, PAIRS
from specdec_kernels.integrations.transformers import assisted_generation, generate


@pytest.mark.parametrize("drafted", OF_DECODERS)
def test_a_processor_never_sees_a_text_that_it_has_excluded(drafted: str) -> None:
    """As a grammar would not know what may follow."""
    model, assistant = PAIRS["llama"]()
    ids, mask = prompts(4, 9)
    seen = []

    def allowed(row: int, text: Tensor) -> list[int]:
        def after(last: Tensor) -> list[int]:
            return list(range(3 + row, VOCAB, 2 + int(last) % 3))

        new = text[9:]
        assert all(int(token) in after(last) for last, token in zip(new, new[1:], strict=False))
        seen.append(row)
        return after(text[-1])

    with assisted_generation(num_speculative_tokens=4):
        model.generate(
            ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None,
            prefix_allowed_tokens_fn=allowed, **OF_DECODERS[drafted](assistant),
        )  # fmt: skip
    assert set(seen) == {0, 1}


@pytest.mark.parametrize("drafted", DRAFTED)
def test_stop_strings_end_texts_where_plain_generation_ends_them(drafted: str) -> None:
    model, assistant = PAIRS["llama"]()
    ids, mask = prompts(4, 9)
    letters = Tokenizer(models.BPE(vocab={chr(97 + i if i < 26 else 39 + i): i for i in range(VOCAB)}, merges=[]))
    letters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    asked = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    whole = model.generate(ids, **asked)
    stops = {"stop_strings": [tokenizer.decode(row[15:17]) for row in whole], "tokenizer": tokenizer}
    plain = model.generate(ids, **asked, **stops)
    assert plain.shape[1] < whole.shape[1]
    with assisted_generation(num_speculative_tokens=4):  # which passes the tokenizer on
        assert torch.equal(model.generate(ids, **asked, **stops, **DRAFTED[drafted](assistant)), plain)


def test_criteria_are_asked_token_by_token() -> None:
    """Within an accepted block too, each with the scores up to there."""
    model, _ = PAIRS["llama"]()
    seen: list[tuple[list[int], int]] = []

    class Watch(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
            assert scores[-1].shape == (1, VOCAB) and int(scores[-1].argmax()) == int(input_ids[0, -1])
            seen.append((input_ids[0, 6:].tolist(), len(scores)))
            return len(scores) == 7

    with assisted_generation(num_speculative_tokens=4):  # all drafts are accepted, the seventh token is in a block
        out = model.generate(
            prompts(6)[0], assistant_model=model, do_sample=False, max_new_tokens=20, stopping_criteria=[Watch()],
            return_dict_in_generate=True, output_scores=True, eos_token_id=None,
        )  # fmt: skip
    text = out.sequences[0, 6:].tolist()
    assert seen == [(text[:n], n) for n in range(1, 8)] and len(text) == len(out.scores) == 7


@pytest.mark.parametrize("ends", [False, True])
def test_criteria_are_asked_about_the_last_token_too(ends: bool) -> None:
    model, _ = PAIRS["llama"]()
    texts: list[list[int]] = []

    class Watch(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            texts.append(input_ids[0, 6:].tolist())
            return torch.zeros(1, dtype=torch.bool)

    ids = prompts(6)[0]
    plain = model.generate(ids, do_sample=False, max_new_tokens=9, eos_token_id=None)[0, 6:].tolist()
    end = plain[4] if ends else None
    with assisted_generation(num_speculative_tokens=4):
        out = model.generate(
            ids, assistant_model=model, do_sample=False, max_new_tokens=9, stopping_criteria=[Watch()], eos_token_id=end
        )[0, 6:].tolist()
    assert texts == [out[:n] for n in range(1, len(out) + 1)] and len(out) == (plain.index(end) + 1 if ends else 9)


def test_an_assistant_s_processors_see_no_text_that_cannot_go_on() -> None:
    """None behind an end that the assistant drafts, or as long as a sequence may become."""
    model, assistant = PAIRS["llama"]()
    ids, mask = prompts(6, 4, 5)
    seen: list[Tensor] = []

    def note(text: Tensor, scores: Tensor) -> Tensor:
        seen.append(text[0].clone())
        return scores

    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 9}
    plain = model.generate(ids, eos_token_id=None, **options)
    for drafter, end in ((model, int(plain[0, 8])), (assistant, None)):
        seen.clear()
        with assisted_generation(num_speculative_tokens=4):
            model.generate(ids, assistant_model=drafter, logits_processor=[note], eos_token_id=end, **options)
        assert len(seen) > 9 and all(len(text) < 6 + 9 and end not in text[6:].tolist() for text in seen)


def test_a_row_behind_the_end_of_a_criterion_may_have_nothing_possible() -> None:
    """As the last state of an automaton has; plain generation never comes there."""
    model, _ = PAIRS["llama"]()
    ids = prompts(6)[0]
    options: dict[str, Any] = {"do_sample": True, "top_k": 1, "eos_token_id": None, "max_new_tokens": 9}
    text = model.generate(ids, **options)[0, 6:].tolist()
    last = next(token for token in text[:4] if token not in ids[0].tolist())  # is drafted in the first step

    def automaton(text: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if int(text[0, -1]) == last else scores

    class Ends(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids[:, -1] == last

    options |= {"logits_processor": [automaton]}
    expected = model.generate(ids, stopping_criteria=[Ends()], **options)
    with assisted_generation(num_speculative_tokens=4):
        out = model.generate(ids, stopping_criteria=[Ends()], assistant_model=model, **options)
        assert torch.equal(expected, out) and int(out[0, -1]) == last
        with pytest.raises(RuntimeError, match="sequence 0 cannot be sampled from: EMPTY_ROW"):
            model.generate(ids, assistant_model=model, **options)


@pytest.mark.parametrize("drafted", ["lookup", "tree", "assistant"])
def test_processors_see_texts_that_can_be(drafted: str) -> None:
    """None that goes on behind an end, and none with what fills up the draft of a sequence that has none."""
    model, assistant = PAIRS["llama"]()
    ids = torch.tensor([[9, 5, 2, 7, 7, 2, 7, 9, 5], [1, 4, 6, 8, 10, 11, 12, 13, 14]])
    seen: list[Tensor] = []

    def note(text: Tensor, scores: Tensor) -> Tensor:
        seen.append(text[0].clone())
        scores = scores.clone()
        scores[:, 2] += 3 * (text[0, 0] == 9)  # which ends the first sequence, and is drafted for it before
        scores[:, 0] -= 99.0
        return scores

    options: dict[str, Any] = {"logits_processor": [note], "max_new_tokens": 12, "eos_token_id": 2}
    torch.manual_seed(1)
    if drafted == "tree":
        drafter = sk.NgramTreeDrafter(max_depth=4)
        model.generate(ids, custom_generate=generate, drafter=drafter, do_sample=True, **options)
    else:
        how = {"assistant_model": assistant} if drafted == "assistant" else {"prompt_lookup_num_tokens": 4}
        with assisted_generation(num_speculative_tokens=4):
            model.generate(ids, do_sample=True, **how, **options)
    assert len(seen) > 12 and any(len(text) > 11 and text[0] == 9 for text in seen)
    for text in seen:
        assert 2 not in text[9:], "it goes on behind an end"
        assert len(text) < 9 + 12, "no token can follow"
        assert 0 not in text[9:], "no draft has that"


def test_rows_of_a_sequence_that_goes_on_behind_its_criterion_are_judged() -> None:
    """Where none of the criteria has ids: all go on until each has met one."""
    model, _ = PAIRS["llama"]()
    ids = prompts(6, 6)[0]
    first = int(ids[0, 0])
    assert first != int(ids[1, 0])

    def breaks(text: Tensor, scores: Tensor) -> Tensor:
        bad = int(text[0, 0]) == first and text.shape[1] >= 6 + 4
        return torch.full_like(scores, torch.nan) if bad else scores

    class Ends(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids[:, 0] == first if input_ids.shape[1] == 6 + 2 else torch.zeros(1, dtype=torch.bool)

    with assisted_generation(), pytest.raises(RuntimeError, match="sequence 0 cannot be sampled from: NAN"):
        model.generate(
            ids, prompt_lookup_num_tokens=2, do_sample=True, max_new_tokens=12, eos_token_id=None,
            logits_processor=[breaks], stopping_criteria=[Ends()],
        )  # fmt: skip
