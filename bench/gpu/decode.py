"""A decoding loop on a GPU with random weights: ``python -m bench.gpu.decode --budget 280 --folder FOLDER``.

Llama models of 1 and 8 billion parameters are made on the device; their text means nothing, but the time of a step
does. Greedy steps with drafts made on the host at every step, and steps at temperature 1 with a smaller model's drafts,
captured in CUDA graphs and op by op, are compared with plain decoding and with transformers' own assisted generation
with as many draft tokens. (A lookup alone, as transformers' prompt lookup, would hardly ever find something in the text
of a random model.) The acceptance is that of two random models, so look at the time of a step.

A step's time is the difference between two lengths of text, the longer one run once before, so that it contains neither
prefill nor capture: both lengths capture the same shapes. It is the median of a few pairs of runs, with the least and
the most. transformers' loops run op by op, without the static cache for which it compiles a model. A way by graphs
whose steps were not captured is a failure.
For drafts by a model, the verify step's share is the time of `uniform_samples` and `verify_chain` on logits of that
shape, by graph replay.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sk
from specdec_kernels.decoding import DecodingState, graph
from specdec_kernels.drafters import Draft, Drafter, ModelDrafter, ModelTreeDrafter, NgramDrafter, NoDrafter
from specdec_kernels.integrations.runners import as_runner
from specdec_kernels.options import SECONDS

from .. import machine
from ..inputs import Case
from ..providers import PROVIDERS
from . import clock, hardware, measure, process, rehearsal
from .clock import Clock

NUM_DRAFT = 5
BATCHES = (1, 8)
PROMPT = 32
LENGTHS = (140, 200)
"""New tokens of the two runs."""
PAIRS, PAIRS_S = 3, 8.0
"""Pairs of runs, after so many seconds no further one."""
HEADS: Mapping[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
        **HEADS,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        **HEADS,
    },
}
"""Those of Llama 3.2 1B and Llama 3.1 8B."""
DRAFTS = {"1B": {"num_hidden_layers": 2}, "8B": SHAPES["1B"]}
"""What the draft's shape has instead of the target's."""
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """One run: seconds, steps of the target for the batch, tokens of all sequences."""

    seconds: float
    steps: int
    tokens: int


def llama(shape: Mapping[str, Any], device: str) -> Any:
    """A random model in bfloat16, in evaluation mode, that never ends a text."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None, **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model.eval()


class EveryStep(NgramDrafter):
    """A lookup that fills its drafts up with the last token: texts of random models repeat too little for it to find
    something at every step.
    """

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        found = super().propose(state, num_tokens).tokens
        found = torch.nn.functional.pad(found, (0, num_tokens - found.shape[1]), value=-1)
        return Draft(torch.where(found < 0, state.last_tokens(), found))


def ours(model: Any, drafter: Drafter, prompt: torch.Tensor, captured: bool, greedy: bool) -> Callable[[int], Ran]:
    """`sk.generate`, with its steps captured or op by op."""
    runner = as_runner(model, "bench")
    runner.capturable = captured

    def run(length: int) -> Ran:
        graph.forget_refusals()
        out = sk.generate(
            runner, prompt, drafter=drafter, num_speculative_tokens=0 if isinstance(drafter, NoDrafter) else NUM_DRAFT,
            max_new_tokens=length, acceptance="greedy" if greedy else "token", eos_token_id=[],
            sampling=sk.SamplingParams(), seeds=torch.arange(prompt.shape[0], device=prompt.device),
        )  # fmt: skip
        if captured and (refused := graph.refusals()):
            raise RuntimeError(f"not captured: {'; '.join(refused)}")
        stats = out.stats
        return Ran(stats.seconds_prefill + stats.seconds_decode, stats.target_forwards, stats.num_tokens)

    return run


def theirs(model: Any, prompt: torch.Tensor, greedy: bool, **options: Any) -> Callable[[int], Ran]:
    """transformers' `generate`."""

    def run(length: int) -> Ran:
        steps = 0

        def count(*arguments: Any) -> None:
            nonlocal steps
            steps += 1

        handle = model.register_forward_pre_hook(count)
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length,
                do_sample=not greedy,
                top_k=0,
                **options,
            )
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        finally:
            handle.remove()
        return Ran(seconds, steps, tokens.numel() - prompt.numel())

    return run


def ways(model: Any, draft: Any, batch: int, device: str) -> Iterator[tuple[str, Callable[[int], Ran]]]:
    """Everything that is compared, the most telling first; transformers' loops take one sequence."""
    generator = torch.Generator(device).manual_seed(0)
    prompt = torch.randint(2, model.config.vocab_size, (batch, PROMPT), generator=generator, device=device)
    for how, captured in (("graph", True), ("op by op", False)):
        yield f"plain, {how}", ours(model, NoDrafter(), prompt, captured, True)
        for name, drafter in (("model", ModelDrafter(draft)), ("tree", ModelTreeDrafter(draft))):
            yield f"draft {name}, {how}", ours(model, drafter, prompt, captured, False)
        yield f"host draft, {how}", ours(model, EveryStep(), prompt, captured, True)
    yield "transformers: plain", theirs(model, prompt, True)
    if batch == 1:
        draft.generation_config.num_assistant_tokens = NUM_DRAFT
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        yield "transformers: assisted", theirs(model, prompt, False, assistant_model=draft)


def steady(run: Callable[[int], Ran], lengths: tuple[int, int]) -> Row:
    """Milliseconds of a step, and its tokens, from two lengths of text."""
    run(lengths[1])  # for what is set up once, including graphs for every length of text
    began, found = time.monotonic(), list[Row]()
    for _ in range(PAIRS):
        if found and time.monotonic() - began >= PAIRS_S:
            break
        short, long = run(lengths[0]), run(lengths[1])
        steps, tokens = long.steps - short.steps, long.tokens - short.tokens
        seconds = long.seconds - short.seconds
        if steps < 1 or seconds <= 0:  # something else held up the shorter one
            continue
        found.append({"ms_a_step": 1e3 * seconds / steps, "tokens_a_step": tokens / steps,
                      "tokens_per_s": tokens / seconds, "steps": steps})  # fmt: skip
    if not found:
        raise ValueError(f"{steps} steps in {seconds:.3g} s: no difference to measure")
    took = [pair["ms_a_step"] for pair in found]
    usual = {name: statistics.median(pair[name] for pair in found) for name in found[0]}
    return {**usual, "ms_min": min(took), "ms_max": max(took), "pairs": len(found)}


def verify_us(vocab: int, batch: int, device: str, device_clock: Clock, cache_bytes: int) -> float:
    """The ops of a verify step at temperature 1, by graph replay on a cold cache; the median of nine."""
    case = Case("verify_chain", "T=1", vocab, batch, torch.bfloat16, num_draft=NUM_DRAFT, device=device)
    call = PROVIDERS["cuda"].builders["verify_chain"](case)
    assert call is not None
    sets = measure.input_sets(case, cache_bytes)
    call(sets[0])
    replay = clock.capture(call, sets)
    seconds = sorted(device_clock.seconds(replay, len(sets), "cold", "graph") for _ in range(9))
    return 1e6 * seconds[4]


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m bench.gpu.decode", description=__doc__)
    parse.add_argument("--budget", type=SECONDS, default=280.0, help="seconds; default: 280")
    parse.add_argument("--folder", type=Path, help="default: bench/results/<the GPU>")
    parse.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parse.add_argument("--rehearse", action="store_true", help="one tiny model on the CPU; nothing is timed")
    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    folder = rehearsal.folder(options.folder, options.rehearse)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rehearsal.device(options.rehearse))
        if options.rehearse:
            print(rehearsal.NOTICE)
            stack.enter_context(rehearsal.untimed(sys.modules[__name__]))
        return run(
            options.models[:1] if options.rehearse else options.models,
            folder,
            time.monotonic() + options.budget,
            options.rehearse,
        )


def run(models: Sequence[str], folder: Path, deadline: float, rehearsing: bool) -> int:
    """Every model, batch size and way; the file is rewritten after each."""
    device, lengths = ("cpu", (6, 13)) if rehearsing else ("cuda", LENGTHS)
    cache_bytes = hardware.cache_bytes()
    device_clock = Clock(device, cache_bytes)
    rows: list[Row] = []
    failed: list[str] = []
    left_out: list[str] = []
    ours_failed = False
    settings: dict[str, Any] = {
        "gpu": hardware.describe(), "num_draft": NUM_DRAFT, "prompt": PROMPT, "lengths": lengths, "failed": failed,
        "left_out": left_out,
    }  # fmt: skip
    print(f"{'':46}{'ms a step':>10}{'tokens':>8}{'tokens/s':>10}{'verify µs':>11}{'share':>8}")
    for name in models:
        if time.monotonic() > deadline:
            left_out.append(name)
            continue
        shape = {**SHAPES[name], **(TINY if rehearsing else {})}
        target, draft = (llama({**shape, **more}, device) for more in ({}, {} if rehearsing else DRAFTS[name]))
        for batch in BATCHES:
            took = None
            try:
                took = verify_us(target.config.vocab_size, batch, device, device_clock, cache_bytes)
            except Exception as error:  # a build without that kernel can still time its steps
                failed.append(f"{name}, {batch}: verify_chain: {measure.describe(error)}")
                ours_failed = True
            for way, function in ways(target, draft, batch, device):
                label = f"{name}, {batch} sequence{'s' * (batch > 1)}: {way}"
                if time.monotonic() > deadline:
                    left_out.append(label)
                    continue
                try:
                    found = steady(function, lengths)
                except Exception as error:  # transformers changes; a way that fails is just one row less
                    failed.append(f"{label}: {measure.describe(error)}")
                    ours_failed |= not way.startswith("transformers")
                    print("FAILED", failed[-1], flush=True)
                    continue
                share = took / 1e3 / found["ms_a_step"] if took and way.startswith("draft model") else None
                row = {"model": name, "batch": batch, "way": way, **found, "verify_us": took, "verify_share": share}
                rows.append(row)
                print(line(label, row), flush=True)
                machine.save(folder, "decode", rows, settings)
        del target, draft
        torch.cuda.empty_cache()
    if left_out:
        print("left out:", "; ".join(left_out))
    machine.save(folder, "decode", rows, settings)
    return 1 if ours_failed or not rows else process.UNFINISHED if left_out else 0


def line(label: str, row: Row) -> str:
    """A row of the table."""
    share = "" if row["verify_share"] is None else f"{row['verify_us']:11.1f}{row['verify_share']:8.1%}"
    return f"{label:46}{row['ms_a_step']:10.3f}{row['tokens_a_step']:8.2f}{row['tokens_per_s']:10.1f}{share}"


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
