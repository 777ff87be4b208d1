"""Decoding with a drafter: the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Drafter, Foresight, TreeDrafter
from ..drafters.none import NoDrafter
from ..integrations.runners import as_runner
from ..laws import TargetLaw
from ..ops.verify_tree import DELTA, EPSILON
from ..processors import Processors
from ..sampling import SamplingParams
from .arguments import (
    check_grammar,
    check_listeners,
    check_logprobs,
    check_processors,
    check_speculation,
    check_streamer,
)
from .claims import claimed
from .costs import AUTO_DRAFT_LENGTHS, CostTable, LearnedCosts
from .foresight import ForesightSchedule
from .grammar import Grammar, Masks
from .graph import begin_steps
from .known_costs import begin_costs
from .launching import Steps, synchronize
from .listeners import emitter, progress_bar
from .output import GenerationOutput, Recorder, Seconds, of_each
from .request import DRAFT_LENGTH, Request
from .runner import Runner
from .schedule import AutoSchedule, FixedSchedule, Schedule
from .state import DecodingState, Speculation
from .stopping import Stopper


def generate(
    model: Any,
    input_ids: Tensor,
    *,
    drafter: Drafter,
    attention_mask: Tensor | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    processors: Processors | None = None,
    grammar: Grammar | None = None,
    seeds: Tensor | None = None,
    max_new_tokens: int = 128,
    num_speculative_tokens: int | str | CostTable = "auto",
    acceptance: str = "token",
    target_law: TargetLaw | None = None,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    eos_token_id: int | Iterable[int] | None = None,
    stop: Callable[[list[np.ndarray]], Sequence[int | None]] | None = None,
    streamer: Any = None,
    return_logprobs: int | None = None,
    progress: bool = False,
) -> GenerationOutput:
    """Generate with a drafter that proposes and a target that verifies; the output has the target's distribution.

    Every sequence of the batch keeps its own length and step counter: none waits for another's rejections. The host
    reads each step's outcome once: to see whether all sequences are done, for the streamer and for statistics.

    On a GPU a step is captured in a CUDA graph and replayed (see `specdec_kernels.decoding.graph`): draft and
    verification together for drafters that work on the device (`ModelDrafter`, `ModelTreeDrafter`, `MedusaDrafter`,
    `NoDrafter`), whose next step is launched before the host looks at the last one if the draft length is fixed; the
    verification alone for drafters of chains that work on the host. The tokens are the same (tested with a stand-in for
    a GPU: no run on one is on record). What cannot be captured runs op by op, and the log says why.

    With greedy sampling, and with ``acceptance="match"`` and the same `seeds`, the tokens are those of plain decoding
    (`NoDrafter`), whatever the drafter, `num_speculative_tokens`, batch or padding, except where the model's forward
    itself rounds differently for another number of rows and the two likeliest ids are closer than that.

    With a `target_law` the output has that distribution instead, greedy decoding included.

    Parameters
    ----------
    model : PreTrainedModel or Runner
        A transformers model with a language-model head (decoder-only, or T5) in evaluation mode, or your own `Runner`.
    input_ids : Tensor
        ``[batch, prompt]`` int32 or int64 on the model's device, both sizes >= 1, ids of its vocabulary; the encoder's
        input for an encoder-decoder.
    drafter : Drafter
        `ModelDrafter`, `NgramDrafter`, `NgramLMDrafter`, `NoDrafter` (plain decoding) or your own; of trees,
        `MedusaDrafter`, `ModelTreeDrafter` and `NgramTreeDrafter`. It serves one call at a time, as does a `Runner` of
        your own.
    attention_mask : Tensor, optional
        ``[batch, prompt]`` of 0 and 1 on the model's device, zeros on the left (an encoder-decoder: anywhere), a 1 in
        every row. None: no padding; then no row may begin (for an encoder-decoder, begin or end) with the model's
        padding id.
    sampling : SamplingParams
        Of the target; tensor fields ``[batch]`` on the model's device.
    processors : Processors, optional
        Penalties, biases, allowed and banned ids of the target's logits, before `sampling`; no `token_bitmask`. Emitted
        tokens are added to its `token_counts` (including those that `stop` cuts off a sequence's last step and, on a
        GPU, off a step launched before `stop` was asked). The counts begin with the prompt: ``TokenCounts(input_ids,
        max_new_tokens, attention_mask)``, made anew for each call; with an encoder-decoder, its decoder's start token,
        ``[batch, 1]``. `ModelDrafter` also draws with the processors, `MedusaDrafter` ranks its heads' tokens by them,
        and no other drafter proposes what they bar. With a cascade as `target_law` they act on the target's logits
        alone: ids that they bar can be emitted where the draft's token is kept.
    grammar : Grammar, optional
        An engine on the host that bars, at every position and every node of a tree, the tokens that may not come next.
        Make a new one for each call, as it follows that call's texts; one that another call is using is refused. The
        drafters here propose nothing that it bars. A step then waits for its draft, and is not captured. Not with a
        cascade as `target_law`.
    seeds : Tensor, optional
        ``[batch]`` int64. None: drawn from torch's default generator. Except with "match", a call that continues a text
        needs new seeds: each call counts its steps from 0, and would repeat the draws of the one before.
    max_new_tokens : int
        Most new tokens of each sequence, >= 1.
    num_speculative_tokens : int, "auto" or CostTable
        Draft tokens a step, 0 … 64. "auto": 0, 1, 3 or 7, chosen for the batch at each step so that it is done soonest,
        by what its drafts have yielded so far (those of lookups and of `NgramLMDrafter` by the length of the match that
        each continued) and by what steps have cost, in this call and those before it with this model, kind of drafter
        and batch size; where drafting does not pay, nothing is drafted. Where `acceptance` is "token" or "block",
        sampling is not greedy and `seeds` are given, the draws depend on that choice: then costs are nominal ones
        (`CostTable.nominal`), so that the seeds reproduce the tokens. A `CostTable`: as "auto", by these costs; a
        call's ``stats.costs`` are those that it chose by, and with its seeds they reproduce its tokens. A tree drafter
        sets its own size: an integer > 0 is its tree at every step, "auto" the tree or nothing. With a `target_law`, or
        "typical", the distribution depends on how much is drafted: there "auto" is 5, or the tree, while a `CostTable`
        still chooses, and the distribution depends on its choices.
    acceptance : {"token", "block", "match", "greedy", "typical"}
        See `verify_chain`, and for trees `verify_tree`, where "token" and "block" are its "sample". "greedy" decodes
        greedily whatever `sampling` says. "typical" is for trees and not lossless.
    target_law : one of `sk.laws`, optional
        See `verify_chain`; all but `Lossy` need a drafter that gives logits (`ModelDrafter`), and none goes with a
        drafter of trees. The token after a fully accepted draft, or after no draft, has the target's distribution
        unless ``bonus="cascade"``.
    epsilon, delta : float
        Of "typical" alone: a token of probability p is accepted where ``p > min(epsilon, delta * exp(-entropy))``; p
        and the entropy, in nats, are of the target's distribution at the sampling temperature, before any truncation
        (Cai et al., arXiv 2401.10774, section 2.3.1).
    eos_token_id : int or iterable of int, optional
        End a sequence after any of these. None: those of the model's generation config, or of its config where it has
        none (of a `Runner`, its `end_ids`); an empty list: never.
    stop : callable, optional
        Called after every step with a list of ``[n]`` int64 arrays, the new tokens of each sequence (empty for one that
        has ended); returns for each how many to keep if it ends there, else None. What earlier steps emitted stays.
    streamer : optional
        A transformers streamer (``put`` / ``end``; batch 1 only), or a callable that is called after every step with a
        list of ``[n]`` int64 arrays: the new tokens of each sequence. If the object has a method ``step``, that is
        called instead, with a second list of ``[n]`` int64 arrays: where each of those tokens came from, as
        `Provenance`. With `return_logprobs` its method ``logprobs``, if it has one, is called just before, with a list
        of `TokenLogprobs` on the CPU: ``[n]`` each, of those tokens.
    return_logprobs : int, optional
        0 … 20: also return the log-probability and rank of each token and of so many likeliest ids (`TokenLogprobs`):
        raw and, after `processors` and `sampling`, processed (with ``acceptance="greedy"``: after processors, and
        greedily). Both are the target's, whatever the `target_law`.
    progress : bool
        Show a progress bar (needs tqdm).

    Returns
    -------
    GenerationOutput
        ``.sequences``, ``.tokens``, ``.provenance``, ``.stats``, ``.logprobs`` …

    Raises
    ------
    ValueError, TypeError
        A model that cannot be served (by name, with the reason), a draft with another vocabulary, a drafter or grammar
        that another call is using, bad shapes, dtypes or ranges; before any work. (Wrong results of your own `Runner`,
        drafter, grammar or `stop` end the call where they occur.)
    ModuleNotFoundError
        ``progress=True`` without tqdm.
    """
    runner = as_runner(model, "generate")
    request = Request(input_ids, attention_mask, sampling, seeds, max_new_tokens, eos_token_id)
    request.check("generate", runner)
    check_speculation(runner, drafter, num_speculative_tokens, acceptance, target_law, epsilon, delta)
    check_processors(runner, processors, request.batch_size, max_new_tokens)
    check_grammar(grammar, target_law)
    check_streamer(streamer, request.batch_size)
    check_listeners(stop, progress)
    check_logprobs(return_logprobs)
    ends = request.ends("generate", runner)
    own: dict[str, object] = {"drafter": drafter, "model": runner}
    if drafter.runner is not None:
        own["drafter.runner"] = drafter.runner
    if processors is not None and processors.token_counts is not None:
        own["processors.token_counts"] = processors.token_counts
    if grammar is not None:
        own["grammar"] = grammar
    with torch.inference_mode(), ExitStack() as cleanup:
        cleanup.enter_context(claimed("generate", **own))
        advance = progress_bar(progress, request.batch_size * max_new_tokens, cleanup)  # first: it may fail
        prompt = request.prompt(runner)
        longest_draft, hidden_size = _extent(drafter, runner, num_speculative_tokens)
        speculation = Speculation(acceptance, longest_draft, target_law, hidden_size, epsilon, delta)
        seeds = request.make_seeds(runner)
        state = DecodingState.begin(
            prompt, runner, sampling, seeds, max_new_tokens, speculation, processors, return_logprobs,
            None if grammar is None else Masks(grammar, runner.vocab_size, ends),
        )  # fmt: skip
        recorder = Recorder(state.batch_size, max_new_tokens, longest_draft, return_logprobs)
        stopper = Stopper(stop, state.batch_size)
        began = time.perf_counter()
        cleanup.callback(drafter.finish)
        drafter.start(state)  # may refuse the call, and then the streamer must not hear of it
        emit = emitter(streamer, prompt.host_tokens, cleanup)
        cleanup.callback(runner.finish)
        runner.start(prompt, state.capacity)
        if runner.gives_rows and not isinstance(drafter, TreeDrafter):
            state.unread_from = prompt.last_piece
        runner.prefill(prompt if state.unread_from is None else prompt.up_to(state.unread_from + 1))
        steps = cleanup.enter_context(begin_steps(state, runner, drafter, ends))
        synchronize(state.device)
        started = time.perf_counter()
        costs = _costs(steps, num_speculative_tokens, reproducible=request.seeds is not None)
        schedule = _schedule(steps, max_new_tokens, num_speculative_tokens, costs)

        while state.host_active.any():
            if isinstance(schedule, ForesightSchedule):
                schedule.look(_foresight(state, drafter))
            reads, launched = state.unread_from is not None, time.perf_counter()
            result, asked = steps.next_result(schedule)
            over = time.perf_counter()
            result = stopper.cut(state, result)
            if state.masks is not None:
                state.masks.commit(of_each(result.tokens, result))
            drafter.commit(state, result)
            schedule.note(result, over - launched if steps.steady and not reads else None)
            recorder.add(result)
            recorder.target_forwards += 1
            if reads:
                started, recorder.num_tokens_prefill = over, int(result.num_tokens.sum())
            recorder.draft_steps += asked
            emit(result)
            advance(result)
        ended = time.perf_counter()
    times = Seconds(started - began, ended - started)
    return recorder.output(runner, input_ids, times, None if costs is None else costs.table)


def _extent(drafter: Drafter, runner: Runner, num_speculative_tokens: int | str | CostTable) -> tuple[int, int | None]:
    """How many tokens a draft has at most, and the width of hidden states that are kept."""
    if isinstance(drafter, TreeDrafter):
        return max(drafter.num_nodes - 1, drafter.max_depth), runner.hidden_size if drafter.reads_hidden else None
    return num_speculative_tokens if isinstance(num_speculative_tokens, int) else AUTO_DRAFT_LENGTHS[-1], None


def _costs(
    steps: Steps, num_speculative_tokens: int | str | CostTable, *, reproducible: bool
) -> CostTable | LearnedCosts | None:
    """What draft lengths are chosen by; None where they are fixed."""
    state, drafter = steps.state, steps.drafter
    if isinstance(drafter, NoDrafter) or isinstance(num_speculative_tokens, int):
        return None
    if isinstance(num_speculative_tokens, CostTable):
        return num_speculative_tokens
    if state.target_law is not None or state.acceptance == "typical":
        return None
    draws = state.acceptance in ("token", "block") and not state.sampling.is_greedy
    if reproducible and draws:
        tree = (drafter.num_nodes, drafter.max_depth) if isinstance(drafter, TreeDrafter) else ()
        return CostTable.nominal(drafter.runner is not None, state.batch_size, *tree)
    return begin_costs(steps)


def _lengths(drafter: Drafter) -> tuple[int, ...]:
    """The draft lengths to choose from."""
    return (0, drafter.max_depth) if isinstance(drafter, TreeDrafter) else AUTO_DRAFT_LENGTHS


def _foresee(state: DecodingState, drafter: Drafter) -> Foresight | None:
    return drafter.foresee(state.at_step(state.draft_limits(_lengths(drafter)[-1]), state.longest))


def _foresight(state: DecodingState, drafter: Drafter) -> Foresight:
    """What a drafter that foresees says of the coming step."""
    foresight, name = _foresee(state, drafter), f"generate: {type(drafter).__name__}.foresee"
    if not isinstance(foresight, Foresight):
        raise TypeError(f"{name} must give a Foresight at every step or None at all, got {type(foresight).__name__}")
    if len(foresight.tokens) != state.batch_size:
        raise ValueError(f"{name} must give [batch={state.batch_size}] tokens, got {list(foresight.tokens.shape)}")
    return foresight


def _schedule(
    steps: Steps,
    max_new_tokens: int,
    num_speculative_tokens: int | str | CostTable,
    costs: CostTable | LearnedCosts | None,
) -> Schedule:
    state, drafter = steps.state, steps.drafter
    first_plain = isinstance(drafter, TreeDrafter) and drafter.reads_hidden  # there are no states to read yet
    if costs is not None:
        # Where a token may be accepted more often than a plain step emits it, plain steps judge no draft.
        exact = state.target_law is None and state.acceptance != "typical"
        how = state.batch_size, max_new_tokens, costs, _lengths(drafter)
        if exact and not first_plain and _foresee(state, drafter) is not None:
            return ForesightSchedule(*how)
        reads_late = drafter.runner is not None and not state.asks_drafter(0)
        return AutoSchedule(*how, first_plain, reads_late)
    length = num_speculative_tokens if isinstance(num_speculative_tokens, int) else DRAFT_LENGTH
    return FixedSchedule(drafter.max_depth if length and isinstance(drafter, TreeDrafter) else length, first_plain)
