"""A verify step with every processor on, compared with the same step without them, and with what engines do.

    python -m bench.processors

Prints one line per case and writes ``processors.json`` into the machine's folder of results: medians of calls that
alternate, so that a busy machine slows all of them alike, averaged over some random steps; with one thread, by that
thread's own clock, which stands still while other programs have the processor. Log-probabilities are those that
`token_logprobs` gives, with the five likeliest ids, for what the step emits. The steps are chosen so that as many draft
tokens are accepted with the processors as without, so that both read as many rows. The peers write out float32 logits
and change them in passes as wide as the vocabulary, by the formulae of vLLM (dense counts, a mask unpacked; also
compiled by torch) and of transformers (a row at a time), and then verify in eager PyTorch (`bench.providers.eager`).
For batch 128 it reports how much memory a step with everything on holds in addition to its inputs.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels.options import POSITIVE

from . import inputs, machine, real_model, timing
from .inputs import BIAS, FREQUENCY, PRESENCE, PROMPT, REPETITION, Case, Request
from .providers import eager

CASES: dict[str, dict[str, Any]] = {
    "T=1": {},
    "truncated": {"params": sk.SamplingParams(temperature=0.8, top_k=50, top_p=0.9)},
    "greedy": {"params": sk.SamplingParams(temperature=0.0), "acceptance": "greedy"},
}
OURS, PEERS = ("without", "all on", "and log-probabilities"), ("vLLM", "compiled", "transformers")
NUM_TOP = 5  # likeliest ids beside each emitted token
LARGEST_BATCH = 128  # of the step whose memory is reported


def as_transformers(request: Request) -> Callable[[Tensor, Tensor], Tensor]:
    """A row at a time, by transformers' own processors; what they lack (frequency and presence) by indexing. The
    processors are made once, as for a call of its `generate`.
    """
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    repeat = RepetitionPenaltyLogitsProcessor(REPETITION)
    biases = [SequenceBiasLogitsProcessor({(v,): BIAS for v in ids.tolist()}) for ids in request.biased]

    def process(logits: Tensor, drafted: Tensor) -> Tensor:
        x = logits.float().clone()
        for b, bias in enumerate(biases):
            for i in range(x.shape[1]):
                text = torch.cat([request.prompt[b], request.output[b], drafted[b, :i]])[None]
                row = x[b, i][None].masked_fill(~request.allowed[b, i], -math.inf)
                row = repeat(text, bias(text, row))
                ids, times = text[0, PROMPT:].unique(return_counts=True)
                row[0, ids] -= FREQUENCY * times + PRESENCE
                x[b, i] = row[0]
                x[b, i, 2] = -math.inf if i < 3 else x[b, i, 2]
        return x

    return process


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """vLLM's formulae through `torch.compile`, for each batch size anew."""
    return torch.compile(eager.as_vllm, dynamic=False)


def measured(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = timing.take_turns(calls, repeats, warm_up=1, clock=clock)
    return {name: statistics.median(each) for name, each in seconds.items()}


def comparable_calls(case: Case, rng: torch.Generator) -> tuple[dict[str, Callable[[], Any]], int]:
    """Calls of a random step, the first two of which accept equally many draft tokens, and that number."""
    while True:
        calls = calls_of(case, inputs.chain(case, rng), Request.random(case, rng))
        without, processed = (int(calls[name]().num_accepted.sum()) for name in OURS[:2])
        if without == processed:
            return calls, without


def calls_of(case: Case, step: inputs.ChainInputs, request: Request) -> dict[str, Callable[[], Any]]:
    """The step without processors and with all of them, and the peers' versions."""
    given = request.processors()
    words = given.token_bitmask
    assert words is not None

    def ours(processors: sk.Processors | None) -> Callable[[], sk.VerifyOutput]:
        noise: dict[str, Any] = {} if case.greedy else {"uniform_samples": step.uniform_samples}
        drafted = (step.draft_logits,) if not case.greedy else ()
        return lambda: sk.verify_chain(
            step.target_logits, step.draft_tokens, *drafted, params=case.params, draft_params=case.params,
            acceptance=case.acceptance, processors=processors, **noise,
        )  # fmt: skip

    def peer(process: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: eager.verify(
            process(step.target_logits, step.draft_tokens), step.draft_tokens, step.draft_logits, None, case, eager.warp
        )

    peers = {
        "vLLM": peer(functools.partial(eager.as_vllm, request, words)),
        "compiled": peer(functools.partial(compiled(), request, words)), "transformers": peer(as_transformers(request)),
    }  # fmt: skip
    on = ours(given)

    def with_logprobs() -> tuple[sk.VerifyOutput, sk.TokenLogprobs]:
        out = on()
        return out, sk.token_logprobs(
            step.target_logits, out.tokens, case.params, processors=given, num_tokens=out.num_tokens, num_top=NUM_TOP
        )

    return dict(zip(OURS, (ours(None), on, with_logprobs), strict=True)) | peers


def held(case: Case) -> dict[str, int | None]:
    """The most memory that a step with all processors holds in addition to its inputs (`timing.peak_memory`)."""
    rng = torch.Generator().manual_seed(0)
    call = calls_of(case, inputs.chain(case, rng), Request.random(case, rng))["all on"]
    call()  # for what threads keep for themselves
    return timing.peak_memory(call)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.processors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=POSITIVE, default=128256)
    parser.add_argument("--batch", type=POSITIVE, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=POSITIVE, default=8, help="how many (default: 8)")
    parser.add_argument("--repeats", type=POSITIVE, default=30)
    real_model.add_common(parser, threads=1)
    return real_model.run("processors", parser.parse_args(argv), _measured)


def _measured(given: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for batch in given.batch:
        for name, extra in CASES.items():
            case = Case("verify_chain", name, given.vocab, batch, **extra)
            rng, accepted = torch.Generator().manual_seed(0), 0
            seconds = dict.fromkeys(OURS + PEERS, 0.0)
            for _ in range(given.steps):
                with torch.inference_mode():
                    calls, more = comparable_calls(case, rng)
                    accepted += more
                    for names, repeats in ((OURS, given.repeats), (PEERS, max(given.repeats // 10, 3))):
                        for each, median in measured({each: calls[each] for each in names}, repeats).items():
                            seconds[each] += median / given.steps
            without, processed, likely = (seconds[each] for each in OURS)
            ratios = ", ".join(f"{each} {seconds[each] / processed:.1f}" for each in PEERS)
            print(
                f"B={batch} {name}, {accepted / given.steps / batch:.1f} accepted: without {without * 1e6:.0f} us, "
                f"all on {processed * 1e6:.0f} us ({processed / without:.2f}), and log-probabilities "
                f"{likely * 1e6:.0f} us ({likely / without:.2f}); peers by ours: {ratios}", flush=True,
            )  # fmt: skip
            of_each = {f"{each} us": 1e6 * median for each, median in seconds.items()}
            rows.append({"case": name, "batch": batch, "accepted": accepted / given.steps / batch, **of_each})
    with torch.inference_mode():
        for name, extra in CASES.items():
            case = Case("verify_chain", name, given.vocab, LARGEST_BATCH, **extra)
            rows.append({"case": name, "batch": LARGEST_BATCH, **held(case)})
    settings = {"vocab": given.vocab, "threads": given.threads, "steps": given.steps, "repeats": given.repeats}
    print(machine.save(given.output, "processors", rows, settings))


if __name__ == "__main__":
    sys.exit(main())
