"""Decoding with a drafter: the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Drafter, TreeDrafter
from ..laws import TargetLaw
from ..sampling import SamplingParams
from .arguments import check_arguments, end_ids, make_prompt, make_seeds, padding_id
from .graph import begin_steps
from .output import GenerationOutput, GenerationStats, Recorder
from .runner import Runner, as_runner
from .schedule import AutoSchedule, FixedSchedule, Schedule, measure_costs, synchronize
from .state import DecodingState, StepResult


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    drafter: Drafter,
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    num_speculative_tokens: int | str = 5,
    acceptance: str = "token",
    target_law: TargetLaw | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    streamer: Any = None,
    progress: bool = False,
) -> GenerationOutput:
    """Generate with a drafter that proposes and a target that verifies; the output has the target's law.

    Every sequence of the batch keeps its own length and step counter: none waits for another's rejections. The host
    looks at a step once, at its outcome: to see whether all sequences are done, and for streamer and statistics.

    On a GPU a step is captured in a CUDA graph and replayed (see `specdec_kernels.decoding.graph`): draft and
    verification in one with `ModelDrafter` and `NoDrafter`, whose next step is launched before the host looks at the
    last; the verification alone with drafters that work on the host. The tokens are the same. A model that cannot be
    captured runs op by op, and the log says why.

    With greedy sampling, and with ``acceptance="match"`` and the same `seeds`, the tokens are those of plain decoding
    (`NoDrafter`), whatever the drafter, `num_speculative_tokens`, batch or padding, except where the model's forward
    itself rounds differently for another number of rows and the two likeliest ids are closer than that.

    With a `target_law` the output has that law instead, greedy decoding included.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        A transformers model with a language-model head (decoder-only, or T5) in evaluation mode, or your own `Runner`.
    input_ids : Tensor
        ``[batch, prompt]`` int32 or int64; the encoder's input for an encoder-decoder.
    drafter : Drafter
        `ModelDrafter`, `NgramDrafter`, `NgramLMDrafter`, `NoDrafter` (plain decoding) or your own; of trees,
        `MedusaDrafter` and `NgramTreeDrafter`.
    attention_mask : Tensor, optional
        ``[batch, prompt]`` of 0 and 1, zeros on the left (an encoder-decoder: anywhere). None: no padding.
    sampling : SamplingParams
        Of the target; tensor fields ``[batch]`` on the model's device.
    seeds : Tensor, optional
        ``[batch]`` int64. None: drawn from torch's default generator.
    max_new_tokens : int
        Tokens of each sequence at most, >= 1.
    num_speculative_tokens : int or "auto"
        Draft tokens a step, 0 … 64. "auto": each sequence chooses 0, 1, 3 or 7 at each step from what it has emitted so
        far and from costs measured at the first such call with this model, kind of drafter and batch size, so that
        drafting switches itself off where it does not pay. The choice depends on those times, so with "token" and
        "block" the draws of a seed are not reproducible (their law is the same, but for a `target_law` that leaves the
        bonus to the target). A drafter of trees has their size itself: an integer is not looked at.
    acceptance : {"token", "block", "match", "greedy", "typical"}
        See `verify_chain`, and for trees `verify_tree`, where "token" and "block" are its "sample". "greedy" decodes
        greedily whatever `sampling` says. "typical" is for trees and not lossless.
    target_law : one of `sk.laws`, optional
        See `verify_chain`; all but `Lossy` need a drafter that gives logits (`ModelDrafter`). What follows an accepted
        block, or no draft at all, has the target's law unless ``bonus="cascade"``.
    eos_token_id : int or iterable of int, optional
        End a sequence after any of these. None: the model's generation config; an empty list: never.
    streamer : optional
        A transformers streamer (``put`` / ``end``; batch 1 only), or a callable that is given, after every step, a list
        of ``[n]`` int64 arrays: the new tokens of each sequence.
    progress : bool
        Show a progress bar (needs tqdm).

    Returns
    -------
    GenerationOutput
        ``.sequences``, ``.tokens``, ``.provenance``, ``.stats`` …

    Raises
    ------
    ValueError, TypeError
        A model that cannot be served (by name, with the reason), a draft with another vocabulary, bad shapes, dtypes or
        ranges; before any work.
    ModuleNotFoundError
        ``progress=True`` without tqdm.
    """
    runner = as_runner(model, "generate")
    check_arguments(
        runner, input_ids, attention_mask, drafter, sampling, seeds, max_new_tokens, num_speculative_tokens, acceptance,
        target_law, streamer,
    )  # fmt: skip
    eos_token_ids = end_ids("generate", model, runner, eos_token_id)
    with torch.inference_mode(), ExitStack() as cleanup:
        prompt = make_prompt(runner, input_ids, attention_mask)
        seeds = make_seeds(seeds, runner, input_ids.shape[0])
        deepest = longest_draft = (
            AutoSchedule.max_draft_tokens if num_speculative_tokens == "auto" else int(num_speculative_tokens)
        )
        hidden_size = None
        if isinstance(drafter, TreeDrafter):
            deepest, longest_draft = drafter.max_depth, max(drafter.num_nodes - 1, drafter.max_depth)
            hidden_size = runner.hidden_size if drafter.reads_hidden else None
        state = DecodingState.begin(
            prompt, runner, acceptance, sampling, seeds, max_new_tokens, longest_draft, target_law, hidden_size
        )
        recorder = Recorder(state.batch_size, max_new_tokens, longest_draft)
        emit = _emitter(streamer, prompt.host_tokens, recorder, cleanup)
        advance = _progress_bar(progress, state.batch_size * max_new_tokens, cleanup)

        began = time.perf_counter()
        cleanup.callback(drafter.finish)
        drafter.start(state)
        cleanup.callback(runner.finish)
        runner.start(prompt, state.capacity)
        runner.prefill(prompt)
        steps = cleanup.enter_context(begin_steps(state, runner, drafter, eos_token_ids))
        schedule: Schedule
        if num_speculative_tokens == "auto":
            schedule = AutoSchedule(state.batch_size, measure_costs(steps))
        else:
            schedule = FixedSchedule(deepest)
        synchronize(state.device)
        started = time.perf_counter()

        forwards = draft_steps = 0
        while state.host_active.any():
            result, asked = steps.next_result(schedule)
            drafter.commit(state, result)
            schedule.note(result)
            recorder.add(result)
            forwards, draft_steps = forwards + 1, draft_steps + asked
            emit(result)
            advance(result)
        stats = recorder.stats(forwards, draft_steps, (started - began, time.perf_counter() - started))
    return make_output(model, runner, input_ids, recorder, stats)


def _emitter(
    streamer: Any, prompts: list[np.ndarray], recorder: Recorder, cleanup: ExitStack
) -> Callable[[StepResult], None]:
    """What hands each step's tokens to the streamer."""
    if streamer is None:
        return lambda result: None
    if not hasattr(streamer, "put"):
        return lambda result: streamer([row[:n] for row, n in zip(result.tokens, result.num_tokens, strict=True)])
    cleanup.callback(streamer.end)
    streamer.put(torch.from_numpy(prompts[0]))
    return lambda result: streamer.put(torch.from_numpy(result.tokens[0, : result.num_tokens[0]]))


def _progress_bar(progress: bool, total: int, cleanup: ExitStack) -> Callable[[StepResult], None]:
    if not progress:
        return lambda result: None
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        raise ModuleNotFoundError("generate: progress=True needs tqdm, which is not installed") from None
    bar = cleanup.enter_context(tqdm(total=total, unit="token", desc="generate"))
    return lambda result: bar.update(int(result.num_tokens.sum()))


def make_output(
    model: Any, runner: Runner, input_ids: Tensor, recorder: Recorder, stats: GenerationStats
) -> GenerationOutput:
    """What a loop returns, from what was recorded."""
    longest = int(recorder.num_tokens.max())
    tokens = torch.from_numpy(recorder.tokens[:, :longest].copy())
    padded = tokens.masked_fill(tokens < 0, padding_id(model)).to(runner.device)
    if runner.decoder_start is None:
        head = input_ids.to(runner.device, torch.int64)
    else:
        head = padded.new_full((input_ids.shape[0], 1), runner.decoder_start)
    return GenerationOutput(
        sequences=torch.cat([head, padded], dim=1),
        tokens=tokens,
        num_tokens=torch.from_numpy(recorder.num_tokens),
        provenance=torch.from_numpy(recorder.provenance[:, :longest].copy()),
        status=torch.from_numpy(recorder.status),
        stats=stats,
    )
