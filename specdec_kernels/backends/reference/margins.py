"""What float64 decides, and how far each decision is from flipping: see `specdec_kernels.margins` for what that means.

Every decision is taken once more with rows that may be off by m (`intervals`): it is decided at m if both ends of all
intervals agree with what was decided. A margin is the largest such m, found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...flat import FlatParams
from ...ops.arguments import Processing, SampleArguments, VerifyArguments, VerifyChainArguments
from ...types import Status
from .coins import with_numbers
from .draft import can_give
from .intervals import Ends, LooseRows, surely_best, surely_drawn, unless_empty
from .law import RowKind, block_threshold, make_params
from .loose_laws import LooseLaws, LooseStep
from .packed import indexed, padded, widened
from .processors import processed
from .random import gumbel
from .reads import clean_uniforms
from .rows import named, slots_upto, with_rows
from .sample import draw_rows
from .verify_chain import BLOCK, GREEDY, MATCH, TOKEN, Chain, Walk, decide, finished, prepared, whole_with_bonus

SMALLEST, LARGEST = -40.0, 5.0  # binary logarithms: margins below count as 0, above as infinity
TOLERANCE = 2.0**-6  # of such a logarithm
CELLS = 1 << 20  # of rows that are looked at together: at least one sequence's


def verify_chain(args: VerifyChainArguments) -> tuple[Tensor, ...]:
    """What the op gives, decided in float64, and margins ``[batch, num_draft + 1]`` float64."""
    bad: Tensor | int = 0
    width = args.num_draft
    if args.cu_num_draft_tokens is not None:
        args, bad = padded(args)
    args = args._replace(shared=with_numbers(args.shared, args.num_draft + 1))
    batch, rows, vocab = args.shared.target_logits.shape
    parts = [of_chains(sequences(args, part)) for part in split(batch, rows * vocab)]
    tokens, num_accepted, num_tokens, status, overlap, margins = map(torch.cat, zip(*parts, strict=True))
    overlap = widened(overlap, width) if args.return_acceptance else overlap
    tokens, margins = widened(tokens, width + 1), widened(margins, width + 1, math.inf)
    return tokens, num_accepted, num_tokens, status | bad, overlap, margins


def sample(args: SampleArguments) -> tuple[Tensor, ...]:
    """What the op gives, decided in float64, and margins of the tokens' shape."""

    def run(args: SampleArguments) -> tuple[Tensor, ...]:
        _, n, vocab = args.logits.shape
        batch = len(args.logits if args.row_index is None else args.row_index)
        parts = []
        for part in split(batch, n * vocab):
            logits, index = args.logits[part], None
            if args.row_index is not None:
                logits, none = named(args.logits, args.row_index[part])
                index = torch.where(none, -1, slots_upto(len(none), none))
            own = args._replace(
                logits=logits.double(), row_index=index, params=params_of(args.params, part),
                uniform_samples=None if args.uniform_samples is None else args.uniform_samples[part],
                noise_keys=None if args.noise_keys is None else args.noise_keys[part],
                processors=processing_of(args.processors, part),
            )  # fmt: skip
            drawn = draw_rows(own)
            parts.append((*drawn, of_draws(own, drawn[0])))
        token, log_prob, *stats, margins = map(torch.cat, zip(*parts, strict=True))
        return token, log_prob, margins, *stats

    token, log_prob, margins, *stats = args.rowwise(run)
    return token, log_prob, *stats, margins[..., 0] if args.num_samples == 1 else margins


# --- a part of the batch ----------------------------------------------------------------------------------------------


def split(batch: int, cells: int) -> Iterator[slice]:
    """Parts of a batch whose sequences have so many cells each; for an empty batch, one empty part."""
    size = max(1, CELLS // max(1, cells))
    return (slice(first, first + size) for first in range(0, max(1, batch), size))


def params_of(params: FlatParams, part: slice) -> FlatParams:
    return FlatParams._make(p[part] if isinstance(p, Tensor) else p for p in params)


def processing_of(given: Processing, part: slice) -> Processing:
    """Lists that are one for all sequences stay as they are."""
    if given is None:
        return None
    mask, *lists = given
    return [mask if mask is None else mask[part], *(t if t is None or t.shape[0] == 1 else t[part] for t in lists)]


def sequences(args: VerifyChainArguments, part: slice) -> VerifyChainArguments:
    """The step of some sequences."""
    counts, index, bonus = args.num_draft_tokens, args.draft_index, args.bonus_tokens
    return args._replace(
        shared=part_of(args.shared, part, index is not None),
        draft_tokens=args.draft_tokens[part], num_draft_tokens=None if counts is None else counts[part],
        draft_index=None if index is None else index[part], bonus_tokens=None if bonus is None else bonus[part],
    )  # fmt: skip


def part_of(shared: VerifyArguments, part: slice, indexed: bool = False) -> VerifyArguments:
    """What some sequences share, without stats kept from drafting: they are those of the draft's rows. Draft rows that
    are `indexed` stay.
    """
    shared = shared._replace(draft_values=None, draft_argmax=None, draft_status=None)
    processors = processing_of(shared.processors, part)
    shared = with_rows(shared, lambda rows: rows[part], lambda rows: rows if indexed else rows[part])
    return shared._replace(
        params=params_of(shared.params, part), draft_params=params_of(shared.draft_params, part), processors=processors
    )


def in_float64(args: VerifyArguments) -> VerifyArguments:
    return args._replace(
        target_logits=args.target_logits.double(),
        draft_logits=None if args.draft_logits is None else args.draft_logits.double(),
        draft_probs=None if args.draft_probs is None else args.draft_probs.double(),
    )


# --- margins ----------------------------------------------------------------------------------------------------------

Decided = Callable[[Tensor], Tensor]
"""Of m ``[batch]``: whether decisions of each sequence ``[batch, n]`` surely stay."""


def of_chains(args: VerifyChainArguments) -> tuple[Tensor, ...]:
    bad: Tensor | int = 0
    if args.draft_index is not None:
        args, bad = indexed(args)
    args, flags = prepared(args._replace(shared=in_float64(args.shared)))
    chain, walk, rest = decide(args, flags)
    tokens, num_accepted, num_tokens, status, overlap = finished(args, chain, walk, rest)
    emitted = slots_upto(tokens.shape[1], tokens) < num_tokens[:, None]
    margins = LooseChain(args, chain, walk, tokens.clamp_min(0)).margins(emitted)
    return tokens, num_accepted, num_tokens, status | bad, overlap, torch.where(emitted, margins, math.inf)


def of_draws(args: SampleArguments, tokens: Tensor) -> Tensor:
    """``[batch, n, num_samples]``, of tokens that `sample` drew."""
    logits, _ = processed(args.logits, args.processors)
    params = make_params(logits.shape[0], logits, args.params, 0, RowKind.WEIGHTS if args.probs else RowKind.LOGITS)
    ids, index = slots_upto(logits.shape[-1], tokens), tokens
    if args.draft_to_target is not None:
        ids = args.draft_to_target
        order = ids.sort()
        index = torch.where(tokens < 0, -1, order.indices[torch.searchsorted(order.values, tokens.clamp_min(0))])
    margins = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device)
    for j in range(tokens.shape[1]):
        rows = LooseRows(logits[:, j], params)
        uniforms = None if args.uniform_samples is None else clean_uniforms(args.uniform_samples[:, j])
        keys = None if args.noise_keys is None else args.noise_keys[:, j]
        margins[:, j] = largest(drawn_from(rows, index[:, j], uniforms, keys, ids), margins[:, j])
    return torch.where(tokens[..., :1] < 0, math.inf, margins)


def drawn_from(rows: LooseRows, tokens: Tensor, uniforms: Tensor | None, keys: Tensor | None, ids: Tensor) -> Decided:
    """Tokens ``[rows, n]`` drawn by the noise of keys ``[rows]`` and target ids, one after the other; the one that
    uniforms draw; without either, the argmax.
    """
    if uniforms is not None:
        token = tokens[:, 0].clamp_min(0)  # where there is none, its margin is not looked at
        return lambda m: surely_drawn(rows.weights(m), uniforms, token)[:, None]
    noise = None if keys is None else gumbel(keys[:, None], ids.expand(rows.scores.shape), rows.scores.dtype)
    return lambda m: surely_best(rows, noise, m, tokens)


def largest(decided: Decided, like: Tensor) -> Tensor:
    """The largest m ``[batch, n]`` at which decisions are what they were, rounded down; 0 and infinity beyond
    `SMALLEST` and `LARGEST`. What one column's m shows about the others is used.
    """
    low, high = torch.full_like(like, SMALLEST), torch.full_like(like, LARGEST)
    never, always = (~decided(low[:, 0].exp2()), decided(high[:, 0].exp2()))
    high, low = torch.where(never, low, high), torch.where(always, high, low)
    for j in range(like.shape[1]):
        while bool((wide := (high - low)[:, j, None] > TOLERANCE).any()):
            middle = (low + high)[:, j, None] / 2
            so = decided(middle[:, 0].exp2())
            low = torch.where(wide & so, low.maximum(middle), low)
            high = torch.where(wide & ~so, high.minimum(middle), high)
    return torch.where(never, 0.0, torch.where(always, math.inf, low.exp2()))


def each_alone(decided: Callable[[int], Decided], emitted: Tensor) -> Tensor:
    """The same of decisions that are found one column at a time, where any is `emitted` ``[batch, n]``."""
    margins = torch.full(emitted.shape, math.inf, dtype=torch.float64, device=emitted.device)
    for j in range(emitted.shape[1]):
        if bool(emitted[:, j].any()):
            margins[:, [j]] = largest(decided(j), margins[:, [j]])
    return margins


NO_MARGINS = "decision_margins: acceptance must be a rule that has margins, got another"


class LooseChain:
    """A chain whose rows may be off by m, and what was decided on it."""

    def __init__(self, args: VerifyChainArguments, chain: Chain, walk: Walk, tokens: Tensor) -> None:
        self.args, self.chain, self.walk, self.tokens = args, chain, walk, tokens
        self.step = LooseStep(args.shared, chain.params, chain.draft_params, chain.Q)
        self.ended = chain.span.status & int(Status.BAD_DRAFT) != 0  # before a token that Q cannot have given

    def margins(self, emitted: Tensor) -> Tensor:
        """Of the tokens that are `emitted` ``[batch, num_draft + 1]``."""
        if self.args.acceptance not in (TOKEN, BLOCK, MATCH, GREEDY):
            raise NotImplementedError(NO_MARGINS)
        sampled, like = self.chain.sampled, self.chain.uniforms.double()
        by_block = self.args.acceptance == BLOCK and bool(sampled.any())
        of_block = largest(self.by_block, like) if by_block else like
        if by_block and bool(sampled.all()):
            return of_block
        alone = each_alone(self.decided, emitted)
        return torch.where(sampled[:, None], of_block, alone) if by_block else alone

    def decided(self, j: int) -> Decided:
        """Token j of each sequence, by the rules that decide each alone."""
        if self.args.acceptance in (MATCH, GREEDY):
            rows, keys = self.step.targets[j], self.args.shared.noise_keys
            drawn = drawn_from(rows, self.tokens[:, j, None], None, None if keys is None else keys[:, j], rows.ids)
            return lambda m: drawn(m) | whole_with_bonus(self.chain.span, j)[:, None]
        return lambda m: self.by_token(j, m)[:, None]

    def final(self, j: int, laws: LooseLaws, w: Ends) -> Tensor:
        """Whether the final token is surely drawn where it was, from what was left after j tokens or else from P; one
        that is given surely is.
        """
        chain, law = self.chain, self.args.shared.law
        rejected = j < chain.span.length
        mixed = rejected & law.is_cascade | law.cascade_bonus
        ends = unless_empty(mixed, laws.pi(), laws.weights)
        rest = laws.left(w)
        if self.step.point and law.beta >= 1:  # (w P / β − Q)+ is as P, without the token
            rest = torch.where(laws.Q[0] > 0, 0.0, laws.weights[0]), torch.where(laws.Q[0] > 0, 0.0, laws.weights[1])
        ends = unless_empty(rejected & (mixed | ~chain.target.one_hot[:, j]), rest, ends)
        drawn = surely_drawn(ends, chain.uniforms[:, 0], self.tokens[:, j])
        return drawn | whole_with_bonus(chain.span, j)

    def by_token(self, j: int, m: Tensor) -> Tensor:
        """An accepted token: its coin. The final one: the coin that ended the draft, and the draw."""
        chain, one, laws = self.chain, torch.ones_like(m), self.step.at(j, m)
        drawn = self.final(j, laws, (one, one))
        if j == self.args.num_draft:
            return drawn
        gives, never = laws.gives(chain.tokens[:, j], chain.q[:, j])
        gives, never = gives | ~chain.reads_draft[:, j], never & chain.reads_draft[:, j]
        tossed = chain.needs_coin[:, j] | chain.mixtures.is_cascade
        accepts, rejects = laws.coin(chain.tokens[:, j], torch.where(tossed, chain.uniforms[:, j + 1], 0.0))
        stops = torch.where(j < chain.span.length, gives & rejects, never | ~self.ended)
        return torch.where(j < self.walk.accepted, gives & accepts, stops & drawn)

    def by_block(self, m: Tensor) -> Tensor:
        """``[batch, num_draft + 1]``. An accepted token: any coin after it that accepts. The final one: all coins after
        it, and the draw.
        """
        chain, num_draft, accepted = self.chain, self.args.num_draft, self.walk.accepted
        slots = slots_upto(num_draft + 1, m)
        impossible = torch.where(can_give(chain.q), num_draft, slots[:-1])
        length = torch.nn.functional.pad(impossible, (0, 1), value=num_draft).amin(-1).minimum(chain.span.length)
        one = torch.ones_like(m)
        w, known, final = (one, one), one > 0, one < 0
        sure, maybe = [], []  # of w_i: whether its coin accepts
        for i in range(num_draft + 1):
            laws = self.step.at(i, m)
            if i < num_draft:
                gives, never = laws.gives(chain.tokens[:, i], chain.q[:, i])
                known = known & (gives | never | (i >= chain.span.length + self.ended.int()))
            if i > 0:
                surely, possibly = self.coin_of_block(i, length, w, laws.left(w))
                sure.append(known & surely)
                maybe.append((possibly | ~known & (w[1] > 0)) & (i > accepted))
            if bool((here := accepted == i).any()):
                final = torch.where(here, known & self.final(i, laws, w), final)
            if i < num_draft:
                w = laws.next_weights(chain.tokens[:, i], w)
        for late in maybe:
            final = final & ~late
        behind = torch.stack([*sure, final], 1).flip(-1)
        behind[:, 0] = False
        return torch.where(slots < accepted[:, None], behind.cummax(-1).values.flip(-1), final[:, None])

    def coin_of_block(self, i: int, length: Tensor, w: Ends, rest: Ends) -> tuple[Tensor, Tensor]:
        """Whether coin i accepts for sure, and whether it may: u < h, at the last token w instead of h."""
        low, high = (
            torch.where(i < length, block_threshold(end, mass.sum(-1)), end) for end, mass in zip(w, rest, strict=True)
        )
        u, inside = self.chain.uniforms[:, i], i <= length
        return inside & (w[0] > 0) & (u < low), inside & (w[1] > 0) & (u < high)
