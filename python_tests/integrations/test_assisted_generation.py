"""transformers' assisted generation by this package: against plain generation of transformers itself."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    TopKLogitsWarper,
)
from transformers.generation import logits_process as hf
from transformers.generation import utils
from transformers.generation.utils import GenerationMixin

import specdec_kernels as sk
from python_tests.decoding.models import VOCAB, near, prompts, tiny
from python_tests.integrations.assistants import DRAFTED, ENDS, OF_DECODERS, PAIRS, Along, NoEvenAfterOdd
from specdec_kernels.integrations.transformers import (
    assisted,
    assisted_generation,
    generate,
    patch,
    versions,
)
from specdec_kernels.integrations.transformers.models import DECODERS, ENCODER_DECODERS


class Stop(StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], torch.tensor(ENDS))


class OwnEnds(Stop):
    eos_token_id = ENDS


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ends": {"eos_token_id": ENDS},
    "ends and padding": {"eos_token_id": ENDS, "pad_token_id": 5},
    "never ends": {"eos_token_id": None},
    "ends that are no ids": {"eos_token_id": [-1, VOCAB]},
    "max_length": {"max_new_tokens": None, "max_length": 17},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder penalties": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[9], [11, 12]], "suppress_tokens": [8], "begin_suppress_tokens": [10, 4]},
    "sequence_bias": {"sequence_bias": {(9,): 2.0, (11, 12): 5.0}},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(2, 40))},
    "forced_eos_token_id": {"forced_eos_token_id": 2, "max_new_tokens": 11},
    "decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": ENDS},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "one's own": {"logits_processor": [NoEvenAfterOdd()], "repetition_penalty": 1.3},
    "warpers by hand": {"logits_processor": [hf.TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, text: list(range(3 + row, VOCAB, 1 + int(text[-1]) % 3))},
    "stopping_criteria": {"stopping_criteria": [Stop()], "eos_token_id": 96 % VOCAB},
    "stopping_criteria, no end": {"stopping_criteria": [Stop()], "eos_token_id": None},
    "stopping_criteria, no id": {"stopping_criteria": [Stop()], "eos_token_id": [-1, VOCAB], "pad_token_id": 5},
    "ends of one's own": {"stopping_criteria": [OwnEnds()], "eos_token_id": None, "pad_token_id": 5},
    "a shorter length of one's own": {"stopping_criteria": [MaxLengthCriteria(15), MaxLengthCriteria(13)]},
    "a length of the prompt": {"stopping_criteria": [MaxLengthCriteria(5)]},
    "long matches": {"max_matching_ngram_size": 100},
    "an end of one's own": {"stopping_criteria": [EosTokenCriteria(torch.tensor(ENDS[0]))]},
}


def same(model: Any, drafting: dict[str, Any], ids: Tensor, mask: Tensor | None, **options: Any) -> None:
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask} | options
    expected = model.generate(ids, **options)
    with assisted_generation(num_speculative_tokens=4):
        found = model.generate(ids, **options, **drafting)
    assert found.tolist() == expected.tolist()


@pytest.mark.short(cases=18)
@pytest.mark.parametrize("drafted", OF_DECODERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_output_is_plain_generation_s(name: str, drafted: str) -> None:
    model, assistant = PAIRS["llama"]()
    same(model, OF_DECODERS[drafted](assistant), *prompts(4, 9, 6, 7), **OPTIONS[name])


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["nothing", "ends and padding", "repetition_penalty", "encoder penalties", "allowed"])
@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("family", PAIRS)
def test_of_every_kind_of_model(family: str, drafted: str, name: str, batch: int) -> None:
    model, assistant = PAIRS[family]()
    same(model, DRAFTED[drafted](assistant), *prompts(*(4, 9, 6)[:batch]), **OPTIONS[name])


@pytest.mark.long
@pytest.mark.parametrize("drafted", DRAFTED)
@pytest.mark.parametrize("model_type", sorted(DECODERS | ENCODER_DECODERS))
def test_of_every_family(model_type: str, drafted: str) -> None:
    model = tiny(model_type, 1)
    assistant = near(model_type, 1, 0.15)
    same(model, DRAFTED[drafted](assistant), *prompts(4, 9))
    same(model, DRAFTED[drafted](assistant), *prompts(7), eos_token_id=ENDS, repetition_penalty=1.5)


def test_no_mask_and_one_sequence() -> None:
    model, assistant = PAIRS["llama"]()
    same(model, {"assistant_model": assistant}, prompts(7)[0], None)
    same(model, {"prompt_lookup_num_tokens": 3}, prompts(7, 7)[0], None, repetition_penalty=1.4)


def test_drafts_are_accepted_and_more_with_the_target_s_processors() -> None:
    model, _ = PAIRS["llama"]()
    forwards = []
    count = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for options in ({}, {"repetition_penalty": 1.8}, {"logits_processor": [NoEvenAfterOdd()]}):
        forwards.clear()
        with assisted_generation(num_speculative_tokens=4):  # drafts for itself: target and draft are called alike
            model.generate(prompts(6)[0], assistant_model=model, max_new_tokens=20, do_sample=False, **options)
        assert len(forwards) <= 2 * 2 + 4 * 6, options  # prefills; four steps of five forwards and one
    count.remove()


@pytest.mark.parametrize("name", ["ends and padding", "stopping_criteria", "stopping_criteria, no end"])
def test_ends_within_an_accepted_block(name: str) -> None:
    model, _ = PAIRS["llama"]()
    same(model, {"assistant_model": model}, *prompts(4, 9, 6, 7), **OPTIONS[name])


@pytest.mark.parametrize("option", [{"min_new_tokens": 9}, {"return_dict_in_generate": True, "output_scores": True}])
def test_prompts_of_int32(option: dict[str, Any]) -> None:
    model, _ = PAIRS["llama"]()
    ids = prompts(7)[0].int()
    how = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True} | option
    plain = model.generate(ids, **how)
    with assisted_generation():
        found = model.generate(ids, prompt_lookup_num_tokens=3, **how)
    assert torch.equal(found.sequences, plain.sequences)


def test_padding_anywhere() -> None:
    """A prompt padded on the right continues after its last real token, as it would alone."""
    model, _ = PAIRS["llama"]()
    ids, mask = prompts(4, 9, 6, 7)
    for moved, where in ((ids.flip(1), mask.flip(1)), (ids.roll(-2, 1), mask.roll(-2, 1))):
        texts = [row[keep == 1] for row, keep in zip(moved, where, strict=True)]
        alone = [model.generate(text[None], max_new_tokens=12, do_sample=False)[0, len(text) :] for text in texts]
        with assisted_generation():
            got = model.generate(
                moved, attention_mask=where, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4
            )
        assert torch.equal(got[:, : ids.shape[1]], moved)
        for row, text in zip(got[:, ids.shape[1] :], alone, strict=True):
            assert row[: len(text)].tolist() == text.tolist() and (row[len(text) :] == 0).all()


# --- what else is returned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.6}, {"do_sample": True, "top_k": 7}], ids=str)
@pytest.mark.parametrize(("family", "drafted"), [("llama", "assistant"), ("llama", "trees"), ("t5", "assistant")])
def test_scores_and_logits(family: str, drafted: str, options: dict[str, Any]) -> None:
    model, assistant = PAIRS[family]()
    ids, mask = prompts(4, 9, 6)
    wanted = {
        "attention_mask": mask, "max_new_tokens": 12, "eos_token_id": ENDS, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True, "temperature": 0.7, "do_sample": False,
    } | options  # fmt: skip
    torch.manual_seed(3)
    with assisted_generation(num_speculative_tokens=3):
        out = model.generate(ids, **OF_DECODERS[drafted](assistant), **wanted)
    along = Along(out.sequences)
    expected = model.generate(ids, **wanted, logits_processor=[along])
    kind = "GenerateEncoderDecoderOutput" if family == "t5" else "GenerateDecoderOnlyOutput"
    assert type(out).__name__ == kind and out.sequences.tolist() == expected.sequences.tolist()
    assert len(out.scores) == len(out.logits) == len(expected.logits)
    new, done = out.sequences[:, -len(out.logits) :], torch.zeros(3, dtype=torch.bool)
    for t, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        penalised = along.seen[t]
        made = TopKLogitsWarper(7)(ids, penalised / 0.7) if options.get("do_sample") else penalised
        assert torch.allclose(logits[~done], expected.logits[t][~done], atol=1e-3)
        assert torch.allclose(scores[~done], made[~done], atol=1e-3)
        assert not scores[done].any() and not logits[done].any()
        done |= torch.isin(new[:, t], torch.tensor(ENDS))
    assert done.any()


class Streamer:
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("lengths", [(6,), (4, 9, 6)], ids=str)
@pytest.mark.parametrize("name", ["ends", "stopping_criteria, no end", "stopping_criteria, no id"])
def test_a_streamer_gets_what_plain_generation_gives_it(lengths: tuple[int, ...], name: str) -> None:
    model, _ = PAIRS["llama"]()
    ids, mask = prompts(*lengths)
    plain, ours = Streamer(), Streamer()
    wanted = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False} | OPTIONS[name]
    model.generate(ids, streamer=plain, **wanted)
    with assisted_generation(num_speculative_tokens=4):
        model.generate(ids, streamer=ours, prompt_lookup_num_tokens=4, **wanted)
    assert ours.got == plain.got and ours.ended == plain.ended == 1


# --- how it is called -------------------------------------------------------------------------------------------------


def test_a_custom_generate() -> None:
    model, assistant = PAIRS["llama"]()
    ids, mask = prompts(4, 9, 6)
    kw: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 15}
    expected, streamer = model.generate(ids, **kw), Streamer()
    for drafter in (sk.ModelDrafter(assistant), sk.NgramDrafter(), sk.NgramTreeDrafter()):
        assert torch.equal(expected, model.generate(ids, custom_generate=generate, drafter=drafter, **kw))
    assert torch.equal(expected, model.generate(ids, custom_generate=generate, prompt_lookup_num_tokens=3, **kw))
    bound = functools.partial(generate, assistant_model=assistant, streamer=streamer)
    assert torch.equal(expected, model.generate(ids, custom_generate=bound, streamer=streamer, **kw))
    assert streamer.got[1:] == expected[:, ids.shape[1] :].T.tolist()
    several = model.generate(
        ids, custom_generate=generate, drafter=sk.NgramDrafter(), num_return_sequences=2,
        **kw | {"do_sample": True, "encoder_repetition_penalty": 1.2},
    )  # fmt: skip
    assert several.shape[0] == 6
    with pytest.raises(ValueError, match="nothing to draft with: transformers hands no assistant_model"):
        model.generate(ids, custom_generate=generate, assistant_model=assistant, **kw)
    with pytest.raises(ValueError, match="drafter and assistant_model exclude each other"):
        model.generate(ids, custom_generate=bound, drafter=sk.NgramDrafter(), **kw)


def test_a_prompt_that_begins_with_the_padding_id() -> None:
    """As a beginning of text may be: transformers leaves out a mask that is all ones."""
    for family in ("llama", "t5"):
        model = tiny(family, 1)
        pad = model.generation_config.pad_token_id = model.config.pad_token_id or 0
        ids = torch.tensor([[pad, 3, 4, 5], [pad, 9, 8, pad]])
        same(model, {"prompt_lookup_num_tokens": 3}, ids, torch.ones_like(ids))


def test_what_an_encoder_made_is_used_and_answers_may_be_several() -> None:
    model = tiny("t5", 1)
    (ids, mask), (other, _) = prompts(7, 4), prompts(7, 7, seed=9)
    kw: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    encoded = model.get_encoder()(input_ids=other)
    expected = model.generate(input_ids=ids, encoder_outputs=encoded, **kw)
    assert not torch.equal(expected, model.generate(input_ids=ids, **kw))
    drafted: dict[str, Any] = {"custom_generate": generate, "drafter": sk.NgramDrafter()}
    assert torch.equal(model.generate(input_ids=ids, encoder_outputs=encoded, **drafted, **kw), expected)
    several = model.generate(
        input_ids=ids, attention_mask=mask, num_return_sequences=2, top_k=1, **drafted, **kw | {"do_sample": True}
    )
    alone = model.generate(input_ids=ids, attention_mask=mask, **kw)
    assert torch.equal(several, alone.repeat_interleave(2, 0))


def test_greedy_calls_leave_torchs_generator_alone() -> None:
    model, _ = PAIRS["llama"]()
    before = torch.get_rng_state()
    model.generate(
        prompts(4)[0], custom_generate=generate, drafter=sk.NgramDrafter(), max_new_tokens=4, do_sample=False
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_how_many_tokens_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = tiny("llama", 1), tiny("llama", 2)
    asked: list[Any] = []
    decode = assisted.decode

    def noted(*args: Any, **kw: Any) -> Any:
        asked.append(kw["num_speculative_tokens"])
        return decode(*args, **kw)

    monkeypatch.setattr(assisted, "decode", noted)
    run = functools.partial(model.generate, prompts(4)[0], max_new_tokens=3, do_sample=False)
    run(custom_generate=generate, drafter=sk.NgramDrafter())
    with assisted_generation():
        run(prompt_lookup_num_tokens=3)
        run(assistant_model=assistant)
        for most in (7, 7.0, 7.9, 64, 100, 0):
            assistant.generation_config.num_assistant_tokens = most
            run(assistant_model=assistant)
        for most in (64, 65, 10**6):
            run(prompt_lookup_num_tokens=most)
    with assisted_generation(num_speculative_tokens="auto"):
        run(assistant_model=assistant)
    assert asked == [5, 3, 5, 7, 7, 7, 64, 64, 0, 64, 64, 64, "auto"] and all(type(one) is not float for one in asked)


@pytest.mark.parametrize(("threshold", "most"), [(None, 1), (0.4, 1), (1.5, 1), (0.0, 5), (-1, 5)])
def test_an_assistant_that_is_unsure_drafts_no_further(
    threshold: float | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does transformers' own; without a threshold it has the default of a generation config."""
    model, assistant = tiny("llama", 1), tiny("llama", 2)  # random: no token has a probability of 0.4
    assistant.generation_config.assistant_confidence_threshold = threshold
    drafted: list[int] = []
    propose = sk.ModelDrafter.propose

    def noted(*args: Any) -> Any:
        drafted.append(propose(*args).tokens.shape[1])
        return propose(*args)

    monkeypatch.setattr(sk.ModelDrafter, "propose", noted)
    with assisted_generation():
        model.generate(prompts(4)[0], max_new_tokens=8, do_sample=False, assistant_model=assistant)
    assert max(drafted) == most


def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every call that comes in, which goes no further."""
    calls: list[Any] = []
    monkeypatch.setattr(patch, "generate", lambda *_, **given: calls.append(given["num_speculative_tokens"]))
    return calls


def test_blocks_nest_and_put_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = PAIRS["llama"]()
    stock, calls = GenerationMixin._assisted_decoding, chosen(monkeypatch)
    run = functools.partial(model.generate, prompts(4)[0], prompt_lookup_num_tokens=2, max_new_tokens=2)
    with assisted_generation(num_speculative_tokens=1):
        run()
        with contextlib.suppress(KeyError), assisted_generation(num_speculative_tokens=2):
            run()
            raise KeyError
        run()
        plain = model.generate(prompts(4, 5)[0], max_new_tokens=2)  # not assisted: transformers' own
    assert calls == [1, 2, 1] and plain.shape == (2, 7)
    assert GenerationMixin._assisted_decoding is stock and not patch._entered and not patch._stock


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the options of the block it is in; one that is in none has those entered last."""
    model, _ = PAIRS["llama"]()
    stock, calls = GenerationMixin._assisted_decoding, chosen(monkeypatch)
    run = functools.partial(model.generate, prompts(4)[0], prompt_lookup_num_tokens=2, max_new_tokens=2)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with assisted_generation(num_speculative_tokens=7):
            inside.set()
            leave.wait(60)
            run()

    thread = threading.Thread(target=other)
    with assisted_generation(num_speculative_tokens=1):
        thread.start()
        assert inside.wait(60)
        run()
        for in_none in [threading.Thread(target=run)]:
            in_none.start()
            in_none.join()
    leave.set()  # the other is still within: transformers' method must not be back yet
    thread.join()
    assert calls == [1, 7, 7] and GenerationMixin._assisted_decoding is stock


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no weights": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions of attention implementation 'sdpa'",
    ),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "a cache": ({versions.CACHE: DynamicCache()}, versions.CACHE),
    "token healing": ({"token_healing": True}, "token_healing"),
    "mtp": ({"use_mtp": True}, "use_mtp"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
    "dflash": ({"speculation_type": "dflash"}, "speculation_type"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
    "beams": ({"num_beams": 3}, "num_beams"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds"),
    "positions": ({"position_ids": torch.tensor([[0, 2, 4, 6]])}, "position_ids other than those of attention_mask"),
    "no drafts": ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens must be >= 1, got 0"),
    "broken drafts": ({"prompt_lookup_num_tokens": 2.5}, "prompt_lookup_num_tokens must be an integer, got float"),
    "short matches": ({"max_matching_ngram_size": -1}, "max_matching_ngram_size must be in .*, got -1"),
}


@pytest.fixture
def heals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Token healing would need a tokenizer; what counts is what comes after it."""
    monkeypatch.setattr(GenerationMixin, "heal_tokens", lambda self, ids, tokenizer=None: ids)
    yield


@pytest.mark.usefixtures("heals")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    model, _ = PAIRS["llama"]()
    options, message = REFUSED[name]
    options = {"prompt_lookup_num_tokens": 2, "max_new_tokens": 3, "do_sample": False} | options
    if name == "beams":  # transformers' own mode for them is another; a custom_generate has all modes
        options["custom_generate"] = generate
    error = TypeError if message.endswith("got float") else ValueError
    with assisted_generation(), pytest.raises(error, match=f"^generate: .*{message}"):
        model.generate(prompts(4)[0], **options)


def test_ranks_that_wait_for_one_another_are_refused_in_a_custom_generate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers withholds `synced_gpus` from it."""
    model, _ = PAIRS["llama"]()
    options = {"custom_generate": generate, "drafter": sk.NgramDrafter(), "max_new_tokens": 3}
    monkeypatch.setattr(utils, "is_fsdp_managed_module", lambda module: module is model)
    model.generate(prompts(4)[0], **options)  # one process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="^generate: not served by specdec_kernels: synced_gpus$"):
        model.generate(prompts(4)[0], **options)


def test_nodes_that_are_missing_take_no_time() -> None:
    """Lookups rarely fill a tree: what is left of it has one id, and is processed once."""
    model, _ = PAIRS["llama"]()
    calls = []

    class Counting(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            calls.append(1)
            return scores

    kw = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "logits_processor": [Counting()]}
    model.generate(prompts(4)[0], custom_generate=generate, drafter=sk.NgramTreeDrafter(), **kw)
    assert len(calls) < 10 * 8  # of 16 nodes


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
def test_states_are_not_of_trees(option: str) -> None:
    model, _ = PAIRS["llama"]()
    trees = {"custom_generate": generate, "drafter": sk.NgramTreeDrafter()}
    with pytest.raises(ValueError, match=f"^generate: not served by specdec_kernels: {option} with a drafter of trees"):
        model.generate(prompts(4)[0], max_new_tokens=3, return_dict_in_generate=True, **{option: True}, **trees)


def test_models_that_do_not_fit() -> None:
    model, _ = PAIRS["llama"]()
    t5, ids = PAIRS["t5"]()[0], prompts(4)[0]
    with assisted_generation():
        with pytest.raises(ValueError, match="must both be decoders, or both encoder-decoders"):
            t5.generate(ids, assistant_model=model, max_new_tokens=3)
        with pytest.raises(
            ValueError, match="decoder_input_ids or decoder_start_token_id other than the model's \\(0\\)"
        ):
            t5.generate(ids, decoder_input_ids=torch.tensor([[0, 5]]), prompt_lookup_num_tokens=2, max_new_tokens=3)
        with pytest.raises(ValueError, match="MambaForCausalLM cannot be served"):
            mamba = tiny("mamba")
            mamba._is_stateful = False  # or transformers refuses it first
            mamba.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=3)


def test_positions_behind_those_of_a_model_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers, where positions are computed; a table of them ends."""
    model, assistant = PAIRS["llama"]()
    same(model, {"assistant_model": assistant}, prompts(4)[0], None, max_new_tokens=800, eos_token_id=ENDS)
    most = model.config.max_position_embeddings
    assert f"LlamaForCausalLM was made for {most} positions, and may write worse text behind them" in caplog.text
    model, assistant = PAIRS["gpt2"]()
    with assisted_generation(), pytest.raises(ValueError, match="GPT2LMHeadModel holds .* positions"):
        model.generate(prompts(4)[0], assistant_model=assistant, max_new_tokens=800)


def test_transformers_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("5.16.4", "5.25.0", "4.57.1"):
        monkeypatch.setattr(versions.transformers, "__version__", version)
        with (
            pytest.raises(ImportError, match=f"must be 5.17 … 5.24, got {version}"),
            assisted_generation(),
        ):
            pass
    for version in ("5.17.0", "5.24.1.dev0"):
        monkeypatch.setattr(versions.transformers, "__version__", version)
        versions.check_version("here")


def test_the_same_range_everywhere() -> None:
    (major, oldest), (_, newest) = versions.OLDEST, versions.NEWEST
    root = Path(__file__).resolve().parents[2]
    assert f'"transformers>={major}.{oldest},<{major}.{newest + 1}"' in (root / "pyproject.toml").read_text()
    tested = re.search(r"^HF_VERSIONS := (.*)", (root / "Makefile").read_text(), re.MULTILINE)
    assert tested and [v.rpartition(".")[0] for v in tested[1].split()] == [f"{major}.{oldest}", f"{major}.{newest}"]


def test_leaving_another_threads_block_keeps_ones_own() -> None:
    """And one that was entered later."""
    first, second = (assisted_generation(num_speculative_tokens=number) for number in (1, 2))
    thread = threading.Thread(target=first.__enter__)
    thread.start()
    thread.join()
    with assisted_generation(num_speculative_tokens=7):
        first.__exit__(None, None, None)
        own = patch._mine.get()
        assert own is not None and own["num_speculative_tokens"] == 7
    first = assisted_generation(num_speculative_tokens=1)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    own = patch._mine.get()
    assert own is not None and own["num_speculative_tokens"] == 2
    second.__exit__(None, None, None)


def test_a_block_may_be_left_by_another_thread() -> None:
    """As an asynchronous context does: afterwards transformers is as it was, in the thread that entered it too."""
    from transformers import GenerationMixin

    stock = GenerationMixin._assisted_decoding
    block = assisted_generation(acceptance="greedy")
    block.__enter__()
    raised: list[BaseException] = []

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert not raised and GenerationMixin._assisted_decoding is stock
    with assisted_generation(acceptance="match"):  # another one's options are its own
        assert GenerationMixin._assisted_decoding is not stock
    assert GenerationMixin._assisted_decoding is stock
