"""`generate` as a decoding method of transformers: what ``model.generate`` has prepared, in this package's terms."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as hf
from transformers.generation import utils
from transformers.generation.configuration_utils import GenerationMode

from ..._host_py import MAX_NGRAM
from ...checks import check_int, check_number
from ...decoding.arguments import check_acceptance
from ...decoding.costs import CostTable
from ...decoding.generate import generate as decode
from ...decoding.request import DRAFT_LENGTH, MAX_SPECULATIVE_TOKENS, check_real, draw_seeds
from ...decoding.runner import Runner
from ...drafters import Drafter, ModelDrafter, NgramDrafter, TreeDrafter
from ...types import Status, TokenMap
from ..runners import as_runner
from .decoder import TransformersRunner
from .encoder_decoder import EncoderDecoderRunner
from .following import Follower
from .models import positions_end, same_vocabulary
from .processors import ProcessedRunner, Processor, split_processors
from .states import States
from .versions import CACHE, check_version

logger = logging.getLogger("specdec_kernels")

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
_REFUSED = (
    "assistant_early_exit", "assistant_ensemble_weight", "dola_layers", "speculation_type", "token_healing",
    "use_mtp",
)  # fmt: skip
"""Fields of a GenerationConfig that must not be set."""
_STATES = ("output_attentions", "output_hidden_states")
_UNDERSTOOD = frozenset(
    [*_STATES, CACHE, "attention_mask", "encoder_outputs", "logits_to_keep", "position_ids", "use_cache"]
)
"""What may come among the model's arguments: made by transformers, or checked."""
_CONFIDENCE = 0.4  # transformers' own, where a generation config has none


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: Tensor | None = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    drafter: Drafter | None = None,
    num_speculative_tokens: int | str | CostTable | None = None,
    acceptance: str = "token",
    seeds: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Speculative decoding for ``model.generate(..., custom_generate=generate)``, at any batch size.

    transformers calls it with what it has prepared from the arguments of ``model.generate``; `drafter`,
    `num_speculative_tokens`, `acceptance` and `seeds` are given to ``model.generate`` too, which passes them on::

        model.generate(**inputs, custom_generate=generate, drafter=sk.ModelDrafter(assistant), do_sample=True)

    transformers does not pass its own ``assistant_model``, ``streamer``, ``synced_gpus`` and ``tokenizer`` to a
    ``custom_generate``; within `assisted_generation` they arrive. Here a streamer is bound beforehand,
    ``functools.partial(generate, streamer=streamer)``, and given to ``model.generate`` too, which puts the prompt.

    Greedy output is that of plain greedy generation; sampled output has the distribution of plain sampling with the
    same GenerationConfig (all ids that tie at the border of top-p are kept): temperature, top-k, top-p and min-p are
    applied by the ops, all other logits processors to each row with the text before it, in their order. They and
    stopping criteria see one sequence, ``[1, length]``, at a time, and must depend on their arguments alone.

    Parameters
    ----------
    model : PreTrainedModel
        One that `specdec_kernels.generate` serves: decoder-only, or T5.
    input_ids : Tensor
        ``[batch, prompt]`` int64; padding anywhere that ``attention_mask`` says. The new tokens follow it.
    logits_processor, stopping_criteria, generation_config, synced_gpus, inputs_tensor, model_kwargs
        As transformers prepares them.
    streamer : BaseStreamer, optional
        Given a column ``[batch]`` at a time, as in plain generation.
    assistant_model, assistant_tokenizer, tokenizer
        As ``model.generate`` takes them. The number of draft tokens is the assistant's ``num_assistant_tokens`` (at
        most 64) if its generation config has that, else 5. On a CPU, where it saves forwards, a draft ends after a
        token to which the assistant gave less than its ``assistant_confidence_threshold`` (0.4 where it has none). Its
        schedule is ignored.
    drafter : Drafter, optional
        Any of this package's, instead of ``assistant_model``, which excludes it, and of ``prompt_lookup_num_tokens``,
        whose number is then ignored. A drafter of trees does not go with ``output_hidden_states`` and
        ``output_attentions``.
    num_speculative_tokens : int, "auto" or CostTable, optional
        Draft tokens a step, see `specdec_kernels.generate`; None: 5 with a `drafter`, else as transformers' own options
        say: ``prompt_lookup_num_tokens`` and ``max_matching_ngram_size`` count as 64 where they are larger. "auto" goes
        by nominal costs where a result must be reproducible, with the rules "token" and "block" whenever it is sampled.
    acceptance : {"token", "block", "match", "greedy"}
        See `specdec_kernels.verify_chain`; greedy decoding is "greedy" whatever this says. With a `drafter` of trees
        "typical", too, as in `specdec_kernels.generate`.
    seeds : Tensor, optional
        ``[batch]`` int64. None: drawn from torch's default generator: ``torch.manual_seed`` reproduces a result.

    Returns
    -------
    Tensor, GenerateDecoderOnlyOutput or GenerateEncoderDecoderOutput
        As transformers returns them, without a cache; hidden states and attentions are
        those of the rows that emitted tokens were drawn from, zeros where there is padding or a sequence has ended.

    Raises
    ------
    ValueError
        An option that is not served, by name; a model that cannot be; nothing to draft with.
    TypeError
        An option, a `drafter` or `seeds` of a wrong type; a `streamer` without ``put`` and ``end``.
    ImportError
        An unknown version of transformers, with the range of known ones.
    RuntimeError
        Sampling from logits that are NaN, infinite or all −inf.
    """
    check_version("generate")
    config, is_seq2seq = generation_config, model.config.is_encoder_decoder
    runner = as_runner(model, "generate")
    check_real("generate", runner)
    _check_options(config, model_kwargs, synced_gpus or _is_sharded(model), tokenizer, assistant_tokenizer)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"generate: streamer must have put and end, got {type(streamer).__name__}")
    kept, folded, sampling = split_processors(logits_processor, config.do_sample)
    most, ends, criteria = _stops(stopping_criteria, runner.vocab_size)
    most = max(most - input_ids.shape[1], 1)  # plain generation looks at the length after a token
    _make_room(runner, model.config, input_ids.shape[1] + most)
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    wants = config.return_dict_in_generate
    wants_scores, wants_logits = bool(wants and config.output_scores), bool(wants and config.output_logits)
    asked = {name: getattr(config, name) for name in _STATES if wants and getattr(config, name)}

    if kept and input_ids.device != runner.device:  # they were made for the ids' device
        raise ValueError(f"generate: input_ids must be on {runner.device} beside processors, got {input_ids.device}")
    texts = input_ids.to(runner.device, torch.int64)
    if is_seq2seq:
        source, mask = _encoders_input(runner, inputs_tensor, input_ids, model_kwargs)
    else:
        source, mask = _padded_on_the_left(texts, model_kwargs)
    if asked and isinstance(drafter, TreeDrafter):
        raise ValueError(f"generate: not served by specdec_kernels: {', '.join(asked)} with a drafter of trees")
    states = _listener(runner, model.config, asked, texts, model_kwargs) if asked else None
    processed = None
    if kept or wants_scores or wants_logits or asked:
        runner = processed = ProcessedRunner(runner, kept, texts, ends)
    if drafter is None:
        drafter, drafted = _drafter(config, assistant_model, runner.vocab_size, kept, processed, texts, ends)
    elif assistant_model is None:
        drafted = DRAFT_LENGTH
    else:
        raise ValueError("generate: drafter and assistant_model exclude each other")
    check_acceptance("generate", acceptance, drafter)  # greedily it is not looked at again
    follower = None
    if criteria or streamer is not None or processed is not None:
        alone = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        follower = Follower(
            texts, most, criteria, ends, alone, pad, streamer, processed, folded, wants_scores, wants_logits, states
        )
    if seeds is None:  # here, so that "auto" knows that a result is reproduced; greedily torch's generator is not used
        seeds = draw_seeds(len(texts)) if config.do_sample else torch.zeros(len(texts), dtype=torch.int64, device="cpu")
    out = decode(
        runner,
        source.to(runner.device),
        drafter=drafter,
        attention_mask=mask.to(runner.device),
        sampling=sampling,
        seeds=seeds,
        max_new_tokens=most,
        num_speculative_tokens=drafted if num_speculative_tokens is None else num_speculative_tokens,
        acceptance=acceptance if config.do_sample else "greedy",
        eos_token_id=ends,
        stop=follower,
    )
    if config.do_sample:
        _check_status(out.status if follower is None else follower.judged(out.status))
    if streamer is not None:
        streamer.end()
    tokens = out.tokens if follower is None else out.tokens[:, : follower.width]
    sequences = torch.cat([input_ids, tokens.masked_fill(tokens < 0, pad).to(input_ids.device)], dim=1)
    if not wants:
        return sequences
    kind = utils.GenerateEncoderDecoderOutput if is_seq2seq else utils.GenerateDecoderOnlyOutput
    seen = {} if follower is None else {"scores": follower.scores(), "logits": follower.logits(), **follower.states()}
    return kind(sequences=sequences, **seen, **_encoders_states(asked, model_kwargs.get("encoder_outputs")))


def _is_sharded(model: Any) -> bool:
    """Whether ranks wait for one another in each forward. transformers would set ``synced_gpus``, but not for a
    ``custom_generate``.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_world_size() == 1:
        return False
    return bool(utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model))


def _check_options(
    config: Any, model_kwargs: Mapping[str, Any], synced_gpus: bool, tokenizer: Any, assistant_tokenizer: Any
) -> None:
    """Raise for what is not served, all of it by name."""
    bad = [name for name in _REFUSED if getattr(config, name, None)]
    mode = config.get_generation_mode(None)
    if mode not in _MODES:
        bad.append("num_beams" if (config.num_beams or 1) > 1 else f"generation mode {mode.value}")
    if config.cache_implementation not in (None, "dynamic"):
        bad.append(f"cache_implementation={config.cache_implementation!r}")
    if not config.use_cache:
        bad.append("use_cache=False")
    if getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        bad.append(CACHE)
    if synced_gpus:
        bad.append("synced_gpus")
    # transformers asks for both even where only the models differ, in how they pad one vocabulary
    if assistant_tokenizer is not None and not same_vocabulary(tokenizer, assistant_tokenizer):
        bad.append("assistant_tokenizer with another vocabulary")
    _lookup_length(config)
    bad += [name for name, value in model_kwargs.items() if name not in _UNDERSTOOD and value is not None]
    if bad:
        raise ValueError(f"generate: not served by specdec_kernels: {', '.join(dict.fromkeys(bad))}")


def _stops(criteria: Any, vocab: int) -> tuple[int, list[int], list[Any]]:
    """Length that ends a text, ids that do, and the criteria that have to be asked.

    Ids that the vocabulary does not have are left out: −1 is transformers' users' way of saying that none ends it.
    """
    lengths = [c.max_length for c in criteria if type(c) is hf.MaxLengthCriteria]
    ends = [id for c in criteria if type(c) is hf.EosTokenCriteria for id in c.eos_token_id.flatten().tolist()]
    others = [c for c in criteria if type(c) not in (hf.MaxLengthCriteria, hf.EosTokenCriteria)]
    return min(lengths), list(dict.fromkeys(end for end in ends if 0 <= end < vocab)), others


def _make_room(runner: Runner, config: Any, longest: int) -> None:
    """Let texts become `longest` tokens long, and warn where the target was not made for so many."""
    made_for = runner.max_length
    _lift_limit(runner, config)
    if runner.max_length is None and made_for is not None and longest > made_for:
        logger.warning(
            "generate: %s was made for %d positions, and may write worse text behind them (up to %d)",
            runner.name, made_for, longest,
        )  # fmt: skip


def _padded_on_the_left(ids: Tensor, model_kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The prompts with all their padding moved to the left, and their mask."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"generate: attention_mask must be {list(ids.shape)}, got {list(mask.shape)}")
    kept = torch.ones_like(ids) if mask is None else (mask != 0).to(ids)
    if positions is not None and bool(((kept.cumsum(1) - 1 - positions.to(ids)) * kept).any()):
        raise ValueError("generate: not served by specdec_kernels: position_ids other than those of attention_mask")
    if mask is None:  # where transformers was given none, or left one out that was all ones
        return ids, kept
    kept, order = kept.sort(dim=1, stable=True)
    return ids.gather(1, order), kept


def _encoders_input(
    runner: Runner, source: Tensor | None, decoder_ids: Tensor, model_kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The encoder's input and its mask; the runner is given the encoder's output."""
    assert source is not None and isinstance(runner, EncoderDecoderRunner)
    bad = ""
    if source.is_floating_point():
        bad = "inputs_embeds"
    elif int(source.min()) < 0:  # transformers' stand-in where it was not given ids
        bad = "encoder_outputs without the encoder's input_ids"
    elif decoder_ids.tolist() != [[runner.decoder_start]] * len(decoder_ids):
        bad = f"decoder_input_ids or decoder_start_token_id other than the model's ({runner.decoder_start})"
    if bad:
        raise ValueError(f"generate: not served by specdec_kernels: {bad}")
    source = source.repeat_interleave(len(decoder_ids) // len(source), dim=0)  # where several answer one prompt
    runner.encoded = model_kwargs.get("encoder_outputs")
    mask = model_kwargs.get("attention_mask")
    return source, torch.ones_like(source) if mask is None else mask


def _listener(
    runner: Runner, config: Any, asked: dict[str, Any], texts: Tensor, model_kwargs: Mapping[str, Any]
) -> States:
    """What receives the target's hidden states and attentions, as far as they are `asked` for."""
    assert isinstance(runner, TransformersRunner)
    real, mask = torch.ones_like(texts, dtype=torch.bool), model_kwargs.get("attention_mask")
    if mask is not None and not config.is_encoder_decoder:
        real = mask.to(texts.device) != 0
    runner.listener = states = States(config, asked, real)
    return states


def _encoders_states(asked: Mapping[str, Any], encoded: Any) -> dict[str, Any]:
    """What the encoder, which transformers has run, gave of what is asked for, by its name in the result."""
    names = [] if encoded is None else [option.removeprefix("output_") for option in asked]
    return {f"encoder_{name}": encoded.get(name) for name in names}


def _drafter(
    config: Any, assistant: Any, vocab: int, kept: list[Processor], processed: ProcessedRunner | None, texts: Tensor,
    ends: list[int],
) -> tuple[Drafter, int]:  # fmt: skip
    """The drafter that the arguments of ``model.generate`` ask for, and how many tokens it drafts."""
    looked_up = _lookup_length(config)
    if looked_up is not None:
        longest = check_int("generate", "max_matching_ngram_size", config.max_matching_ngram_size or 2, 1, 2**63 - 1)
        return NgramDrafter(min(longest, MAX_NGRAM)), looked_up
    if assistant is None:
        raise ValueError(
            "generate: there is nothing to draft with: transformers hands no assistant_model to a custom_generate; "
            "pass drafter, or call model.generate within assisted_generation()"
        )
    token_map = None if kept else _ids_of(assistant, vocab)  # processors take whole rows
    runner = as_runner(assistant, "generate: assistant_model", token_map=token_map)
    _lift_limit(runner, assistant.config)
    if kept:  # drafts what the target may accept
        assert processed is not None
        runner = ProcessedRunner(runner, kept, texts, ends, drafts=vocab)
        runner.ended = processed.ended
    given = assistant.generation_config
    drafted = DRAFT_LENGTH if given.num_assistant_tokens is None else given.num_assistant_tokens
    if isinstance(drafted, float) and math.isfinite(drafted):  # as in the configurations of older versions
        drafted = int(drafted)
    drafted = min(check_int("generate", "num_assistant_tokens", drafted, 0, None), MAX_SPECULATIVE_TOKENS)
    threshold = _CONFIDENCE if given.assistant_confidence_threshold is None else given.assistant_confidence_threshold
    check_number("generate", "assistant_confidence_threshold", threshold, -math.inf, math.inf)
    threshold = min(max(threshold, 0.0), 1.0)  # below 0 is off as 0 is, and what is above 1 no token reaches
    # elsewhere a draft's forwards are all enqueued before its first token is known
    confidence = threshold if runner.device.type == "cpu" else 0.0
    drafter = ModelDrafter(runner, min_confidence=confidence, token_map=token_map)
    return drafter, drafted


def _lookup_length(config: Any) -> int | None:
    """``prompt_lookup_num_tokens``, or as many as a step drafts at most; None: it is not given."""
    name = "prompt_lookup_num_tokens"
    given = getattr(config, name)
    return None if given is None else min(check_int("generate", name, given, 1, None), MAX_SPECULATIVE_TOKENS)


def _ids_of(assistant: Any, vocab: int) -> TokenMap | None:
    """The ids that an assistant drafts, of the `vocab` ids of a target; None: all."""
    ids = getattr(assistant.config, "draft_token_ids", None)
    if ids is not None:
        return TokenMap(torch.tensor(ids))
    own = assistant.config.get_text_config().vocab_size
    return None if own == vocab else TokenMap(torch.arange(min(own, vocab)))


def _lift_limit(runner: Runner, config: Any) -> None:
    """As in transformers, a text may go past the positions that a model was made for, but not past a table's end."""
    if not positions_end(config):
        runner.max_length = None


def _check_status(status: Tensor) -> None:
    bad = status & (Status.NAN | Status.INF | Status.EMPTY_ROW)
    if bool(bad.any()):
        row = int(bad.bool().int().argmax())
        flags = Status(int(bad[row])).name
        raise RuntimeError(
            f"generate: the logits of sequence {row} cannot be sampled from: {flags}, the model's or its assistant's"
        )
