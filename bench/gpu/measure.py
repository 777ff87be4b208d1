"""One case: prepare every provider, then time them in turns."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import inputs
from ..inputs import Case
from ..providers import PROVIDERS
from ..registry import REGISTRY
from ..timing import Call, summarize
from . import clock, drafts
from .clock import Clock, Run
from .grid import LAYOUTS, OWN, Traffic, traffic
from .journal import Journal

MOST_SETS = 8
LEAST_REPEATS = 3
PREPARE_S = {"flashinfer": 240.0, "compile": 150.0}
"""How long a provider may prepare: these compile first."""
USUAL_PREPARE_S = 60.0
TIMING_S = 60.0


class Broken(Exception):
    """The device no longer computes: only another process can go on."""


@dataclass
class Setup:
    """What a measuring process knows of its machine."""

    device: str
    clock: Clock
    cache_bytes: int
    gb_per_s: float
    """The best rate that the memory was seen at."""
    journal: Journal


@dataclass
class Prepared:
    """A provider whose output was valid: its runs by (cache, launch), with the number of calls in each."""

    accepted: Tensor  # [sets, batch]; zeros for ops that do not verify
    output: Any
    runs: dict[tuple[str, str], tuple[Run, int]]
    facts: dict[str, int | None]
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)


def name_of(case: Case) -> str:
    """A case without cache and launch, as the journal names it."""
    op = "" if case.op == "verify_chain" else f"{case.op} "
    return f"{op}{case.name} V={case.vocab} B={case.batch} K={case.num_draft}"


def make(case: Case, generator: torch.Generator) -> Any:
    """One input set."""
    if case.op == "verify_chain":
        return inputs.chain(case, generator, drafts.drafted)
    return REGISTRY[case.op].make(case, generator)


def num_bytes(step: Any) -> int:
    """Bytes of logits, or of a cache: what a call reads."""
    if isinstance(step, inputs.CacheInputs):
        return sum(t.nbytes for layer in step.cache for t in layer)
    logits: Tensor = step.logits if isinstance(step, inputs.RowInputs) else step.target_logits
    return logits.nbytes


def input_sets(case: Case, cache_bytes: int) -> list[Any]:
    """Enough sets that each call of a run finds its own set outside the cache: no set comes twice in a run."""
    generator = torch.Generator(case.device).manual_seed(0)
    first = make(case, generator)
    count = min(MOST_SETS, max(3, math.ceil(2 * cache_bytes / num_bytes(first))))
    return [first, *(make(case, generator) for _ in range(count - 1))]


def check(case: Case, step: Any, output: Any) -> Tensor:
    """The number of tokens accepted, ``[batch]``, in a verify call's output; zeros for another op.

    Raises
    ------
    ValueError
        A chain's output is not an accepted prefix of the draft followed by a token of the vocabulary; a tree's is not a
        path of its tokens followed by one; a sampled token is outside the vocabulary.
    """
    if case.op == "verify_tree":
        return check_tree(case, step, output)
    if case.op != "verify_chain":
        drawn = drawn_by(output) if case.op == "sample" else None
        if drawn is not None and not bool(((drawn >= 0) & (drawn < case.vocab)).all()):
            raise ValueError("a sampled token is outside the vocabulary")
        return torch.zeros(case.batch, device=case.device)
    tokens, accepted = output
    shape = (case.batch, case.num_draft + 1)
    if tuple(tokens.shape) != shape or tuple(accepted.shape) != shape[:1]:
        raise ValueError(f"output has shapes {list(tokens.shape)} and {list(accepted.shape)}, not {list(shape)}")
    if not bool(((accepted >= 0) & (accepted <= case.num_draft)).all()):
        raise ValueError(f"accepted is not within 0 and {case.num_draft}")
    slots = torch.arange(case.num_draft, device=tokens.device)
    if not bool(((tokens[:, :-1] == step.draft_tokens) | (slots >= accepted[:, None])).all()):
        raise ValueError("the accepted tokens are not the draft's")
    final = tokens.gather(1, accepted[:, None].long())
    if not bool(((final >= 0) & (final < case.vocab)).all()):
        raise ValueError("the last token is outside the vocabulary")
    return accepted.float()


def drawn_by(output: Any) -> Tensor:
    """The ids among what a sampler gives: a tensor, or a tuple that begins with one."""
    return output if isinstance(output, Tensor) else output[0]


def check_tree(case: Case, step: inputs.TreeInputs, output: tuple[Tensor, Tensor]) -> Tensor:
    """`check` for a tree."""
    tokens, accepted = output
    depth = step.tree.max_depth
    if tuple(tokens.shape) != (case.batch, depth + 1) or not bool(((accepted >= 0) & (accepted <= depth)).all()):
        raise ValueError(f"tokens are {list(tokens.shape)}, accepted {accepted.tolist()} of a tree of depth {depth}")
    emitted = tokens[torch.arange(depth + 1, device=tokens.device) <= accepted[:, None]]
    if not bool(((emitted >= 0) & (emitted < case.vocab)).all()):
        raise ValueError("an emitted token is outside the vocabulary")
    parents, drafted = step.tree.parents.tolist(), step.node_tokens.tolist()
    for b, (path, length) in enumerate(zip(tokens.tolist(), accepted.tolist(), strict=True)):
        at = {0}  # the nodes that the path so far may have reached
        for token in path[: int(length)]:
            at = {node for node, parent in enumerate(parents) if parent in at and drafted[b][node] == token}
        if not at:
            raise ValueError("the accepted tokens are no path of the tree")
    return accepted.float()


def prepare(case: Case, name: str, sets: Sequence[Any], setup: Setup) -> Prepared | None:
    """Warm a provider up, check its output and capture it; None if it does not offer this case."""
    builder = PROVIDERS[name].builders.get(case.op)
    call = builder(case) if builder is not None else None
    if builder is None or call is None:
        return None
    outputs = [call(step) for step in sets]
    accepted = torch.stack([check(case, step, output) for step, output in zip(sets, outputs, strict=True)])
    warm = 2 * num_bytes(sets[0]) <= setup.cache_bytes  # the draft's rows are no more; sets also hold what few read
    orders = {"cold": range(len(sets)), **({"warm": [0] * len(sets)} if warm else {})}
    runs: dict[tuple[str, str], tuple[Run, int]] = {}
    for cache, places in orders.items():
        order = [sets[place] for place in places]
        runs[cache, "eager"] = clock.eager(call, order), len(order)
        expected = None
        if is_own(name):  # with the random numbers of the same steps; others draw their own
            call, again = builder(case), builder(case)
            assert call is not None and again is not None
            expected = [again(step) for step in [order[0]] * clock.CALLS_BEFORE + order][clock.CALLS_BEFORE :]
        try:
            runs[cache, "graph"] = clock.capture(call, order, expected), len(order)
        except Exception as error:  # an error that a peer raises is its own affair
            if expected is not None and isinstance(error, ValueError):
                raise
            setup.journal.failed(name_of(case), name, "graph", describe(error))
            break
    facts = {"torch_peak_bytes": clock.peak_bytes(call, sets[0]), "rss_peak_bytes": None}
    return Prepared(accepted, outputs[0], runs, facts)


def is_own(name: str) -> bool:
    """Whether a provider is one of this package's backends."""
    return name.split(",")[0] in OWN


def describe(error: BaseException) -> str:
    """The error's type and first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def time_in_turns(prepared: Mapping[str, Prepared], setup: Setup, repeats: int, seconds_each: float) -> None:
    """Rounds of all providers, each in a new order; as many as fit in `seconds_each` per provider and way."""
    ways = [(name, way) for name, p in prepared.items() for way in p.runs]
    rounds: dict[tuple[str, tuple[str, str]], int] = {}
    for name, way in ways:
        run, calls = prepared[name].runs[way]
        once = setup.clock.seconds(run, calls, *way) * calls
        rounds[name, way] = min(repeats, max(LEAST_REPEATS, round(seconds_each / max(once, 1e-9))))
    order = random.Random(0)
    for turn in range(max(rounds.values(), default=0)):
        order.shuffle(ways)
        for name, way in ways:
            if turn < rounds[name, way]:
                run, calls = prepared[name].runs[way]
                seconds = setup.clock.seconds(run, calls, *way)
                prepared[name].seconds.setdefault(way, []).append(seconds)


def rows_of(
    case: Case, name: str, prepared: Prepared, needed: Traffic, tokens: float | None, setup: Setup
) -> list[dict[str, Any]]:
    """A row of results for each way."""
    full, exit_ = needed.floor_us(setup.gb_per_s)
    rows = []
    for (cache, launch), seconds in prepared.seconds.items():
        calls = prepared.runs[cache, launch][1]
        dtype = str(case.dtype).removeprefix("torch.")
        rows.append({
            "id": f"{name_of(case)} {dtype} {cache} {launch}", "op": case.op, "case": case.name, "vocab": case.vocab,
            "batch": case.batch, "num_draft": case.num_draft, "dtype": dtype, "cache": cache, "launch": launch,
            "input_sets": calls, "tokens_per_step": tokens, "provider": name, **summarize(seconds, calls),
            "gb_per_s": needed.exit / statistics.median(seconds) / 1e9, "needed_bytes": needed.exit,
            "full_read_bytes": needed.full, "floor_us": full, "floor_exit_us": exit_, **prepared.facts,
        })  # fmt: skip
    return [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def measure(
    case: Case, names: Sequence[str], setup: Setup, barred: set[tuple[str | None, str | None]], repeats: int,
    seconds_each: float, count_launches: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """`barred` holds pairs (case, provider) that failed before; case None means everywhere.

    Raises
    ------
    Broken
        A provider left the device unusable; what it did is in the journal.
    """
    journal, label = setup.journal, name_of(case)
    with journal.step(label, None, "inputs", TIMING_S):
        try:
            sets = input_sets(case, setup.cache_bytes)
        except Exception as error:  # too large for this device, say
            journal.failed(label, None, "inputs", describe(error))
            sets = []
        if not clock.healthy(case.device):
            raise Broken("inputs")
    if not sets:
        return []
    prepared: dict[str, Prepared] = {}
    for name in names:
        if (label, name) in barred or (None, name) in barred or PROVIDERS[name].why_missing(case.op, case.device):
            continue
        with journal.step(label, name, "prepare", PREPARE_S.get(name, USUAL_PREPARE_S)):
            try:
                ready = prepare(case, name, sets, setup)
                if ready is not None:
                    alike = prepared.get(LAYOUTS[0]) if name in LAYOUTS else None
                    if alike is not None and not clock.same(ready.output, alike.output):
                        raise ValueError(f"gives something else than {LAYOUTS[0]}")
                    prepared[name] = ready
            except Exception as error:  # a failing provider is just one row less
                journal.failed(label, name, "prepare", describe(error))
            if not clock.healthy(case.device):
                raise Broken(name)
    with journal.step(label, None, "timing", TIMING_S):
        time_in_turns(prepared, setup, repeats, seconds_each)
    if not prepared:
        return []
    first = next(iter(prepared.values()))
    needed = traffic_of(case, sets[0], first)
    if count_launches:
        for name, ready in prepared.items():
            ready.facts["launches"] = counted(case, name, sets[0], setup)
    tokens = first.accepted.mean().item() + 1 if case.op.startswith("verify") else None
    return [row for n, p in prepared.items() for row in rows_of(case, n, p, needed, tokens, setup)]


def traffic_of(case: Case, step: Any, prepared: Prepared) -> Traffic:
    """The fewest bytes: of a chain by its rule; of a tree every node's target row; else what the registry says."""
    if case.op == "verify_chain":
        rejecting = (prepared.accepted < case.num_draft).float().mean().item()
        return traffic(case, prepared.accepted.mean().item(), rejecting)
    useful = REGISTRY[case.op].bytes_read(case, step, prepared.output)
    if case.op == "gather_kv_":
        return Traffic(2 * useful, 2 * useful)  # read and written
    return Traffic(num_bytes(step) if case.op == "verify_tree" else useful, useful)


def counted(case: Case, name: str, step: Any, setup: Setup) -> int | None:
    """Launches of one call."""
    builder: Any = PROVIDERS[name].builders[case.op]
    call: Call = builder(case)
    with setup.journal.step(name_of(case), name, "launches", USUAL_PREPARE_S):
        try:
            call(step)
            return clock.launches(call, step)
        except Exception as error:  # the profiler is not available everywhere
            setup.journal.failed(name_of(case), name, "launches", describe(error))
            return None
