"""The curves of the rewriting task: every rule decodes held-out pairs with the trained pair of models.

In every batch all configurations run one after the other, in an order shuffled each time, with several runs of plain
decoding among them. A time is a sum over the batches, stated as a multiple of plain decoding's in the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import specdec_kernels as sk
from bench.cascades.results import DRAFT, LOSSLESS, TARGET, Row, at_length, clustered_error
from bench.cascades.rewriting import PAD, Corpus, Pair, pad, word_edits
from bench.cascades.rules import DETAILED, RULES, SETTINGS, Laws, spread_alphas, with_cascade_bonus
from specdec_kernels import GenerationOutput, GenerationStats, ModelDrafter, NoDrafter, SamplingParams, laws
from specdec_kernels.testing import float64_law

DRAFT_LENGTH = 5
DRAFT_LENGTHS = (3, 5, 7)  # compared
SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)  # of what lossless verification rejects: α is chosen to reach these
MAX_NEW_TOKENS = 48
_CALIBRATION = 48  # pairs that α is chosen on
_PLAIN_RUNS = 6  # plain runs per batch: its time is in every ratio, its quality is what others must reach
_WITH_VARIANTS = ("Opt", "TokenV3")
_SEQUENCE_ALPHAS = (0.2, 0.35, 0.5, 0.65, 0.8)
_FALLBACKS, _ROLLBACKS = (0.3, 0.6, 0.9), (1.0, 3.0)  # of the original BiLD

Decode = Callable[[Tensor, Tensor, Tensor], GenerationOutput]
"""``(input_ids, attention_mask, seeds)`` → output."""


@dataclass
class Configuration:
    """One point of a curve, and what it has done so far.

    Attributes
    ----------
    rule : str
    alpha : float or None
    decode : callable
    runs : int
        How often it decodes each batch, with a new seed each time.
    calls : callable
        ``(statistics, sequences)`` → the number of target calls per sequence, summed over all of them.
    edits, words : ndarray
        ``[pairs]``, sums over the runs.
    stats : list of GenerationStats
        One for every batch.
    """

    rule: str
    alpha: float | None
    decode: Decode
    runs: int = 1
    calls: Callable[[GenerationStats, int], int] = lambda stats, sequences: stats.num_steps
    edits: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_calls: int = 0
    stats: list[GenerationStats] = field(default_factory=list)

    def total(self, name: str) -> float:
        """Sum of a field of the statistics."""
        return sum(getattr(stats, name) for stats in self.stats)

    @property
    def seconds_per_token(self) -> float:
        return self.total("seconds_decode") / self.total("num_tokens_decode")


def configurations(
    target: Any, draft: Any, setting: str, calibration: Laws, shares: Sequence[float], draft_length: int,
    variants: bool = True,
) -> list[Configuration]:  # fmt: skip
    """All that is compared at `setting`; without `variants`, one speculative form of each rule."""
    sampling = SETTINGS[setting]
    common: dict[str, Any] = {"sampling": sampling, "max_new_tokens": MAX_NEW_TOKENS}

    def plain(model: Any) -> Decode:
        return lambda ids, mask, seeds: sk.generate(
            model, ids, attention_mask=mask, seeds=seeds, drafter=NoDrafter(), **common
        )

    def speculative(law: laws.TargetLaw | None, acceptance: str = "token") -> Decode:
        return lambda ids, mask, seeds: sk.generate(
            target, ids, attention_mask=mask, seeds=seeds, drafter=ModelDrafter(draft), target_law=law,
            num_speculative_tokens=draft_length, acceptance=acceptance, **common,
        )  # fmt: skip

    def sequential(function: Any, **options: Any) -> Decode:
        return lambda ids, mask, seeds: function(
            target, ids, attention_mask=mask, seeds=seeds, draft_model=draft, **common, **options
        )

    found = [
        Configuration(TARGET, None, plain(target), _PLAIN_RUNS),
        Configuration(DRAFT, None, plain(draft), calls=lambda stats, sequences: 0),
        Configuration(LOSSLESS, None, speculative(None), 2),
    ]
    detailed = variants and setting in DETAILED
    for rule in RULES:
        if setting not in rule.settings:
            continue
        alphas = spread_alphas(rule, calibration, shares)
        curves = {rule.name: [speculative(rule.make(a)) for a in alphas]}
        if rule.name in _WITH_VARIANTS and detailed:
            cascade = with_cascade_bonus(rule)
            curves[cascade.name] = [speculative(cascade.make(a)) for a in alphas]
            if not sampling.is_greedy:
                curves[f"{rule.name}, block"] = [speculative(rule.make(a), "block") for a in alphas]
        if rule.name == "Diff" and detailed:
            curves["OracleCascade [Diff]"] = [sequential(sk.oracle_cascade, target_law=rule.make(a)) for a in alphas]
        for name, decoders in curves.items():
            found += [Configuration(name, a, decode) for a, decode in zip(alphas, decoders, strict=True)]
        if rule.name == "Chow" and detailed:
            found += [
                # a step of it is one token; the target is called for the tokens that the draft defers
                Configuration("TokenCascade [Chow]", a, sequential(sk.token_cascade, target_law=rule.make(a)),
                              calls=lambda stats, sequences: stats.num_rejected)
                for a in alphas
            ]  # fmt: skip
    if detailed:
        found += [
            # the draft's whole answer counts as a step too
            Configuration("SeqCascade [Chow]", a, sequential(sk.seq_cascade, alpha=a),
                          calls=lambda stats, sequences: stats.num_steps - sequences)
            for a in _SEQUENCE_ALPHAS
        ]  # fmt: skip
    if variants and sampling.is_greedy:
        found += [_original_bild(target, draft, f, r) for r in _ROLLBACKS for f in _FALLBACKS]
    return found


def _original_bild(target: Any, draft: Any, fallback: float, rollback: float) -> Configuration:
    """A point of the curve for a rollback threshold: `fallback` replaces α."""

    def decode(ids: Tensor, mask: Tensor, seeds: Tensor) -> GenerationOutput:
        return sk.bild(
            target, ids, attention_mask=mask, draft_model=draft, fallback=fallback, rollback=rollback,
            max_new_tokens=MAX_NEW_TOKENS,
        )  # fmt: skip

    return Configuration(f"BiLD, rollback {rollback:g}", fallback, decode)


def calibration_laws(target: Any, draft: Any, pairs: Sequence[Pair], sampling: SamplingParams) -> Laws:
    """Both models' laws at every position of the true targets of `pairs`."""
    source, labels = pad([pair.source for pair in pairs], PAD), pad([pair.target for pair in pairs], PAD)
    shifted = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=PAD)
    with torch.inference_mode():
        p, q = (
            model(input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=shifted).logits[
                labels != PAD
            ]
            for model in (target, draft)
        )
    return Laws(*(float64_law(rows, params) for params in (sampling, SamplingParams()) for rows in (p, q)))


def measure(
    chosen: Sequence[Configuration], pairs: Sequence[Pair], corpus: Corpus, batch: int, advance: Callable[[], Any]
) -> None:
    """Let all configurations decode all pairs."""
    for c in chosen:
        c.edits, c.words = np.zeros(len(pairs), dtype=np.int64), np.zeros(len(pairs), dtype=np.int64)
    order = [(c, run) for c in chosen for run in range(c.runs)]
    shuffle = random.Random(0)
    for start in range(0, len(pairs), batch):
        part = pairs[start : start + batch]
        ids = pad([pair.source for pair in part], PAD)
        mask = (ids != PAD).long()
        shuffle.shuffle(order)
        for c, run in order:
            out = c.decode(ids, mask, torch.arange(start, start + len(part)) + 100_000 * run)
            c.stats.append(out.stats)
            c.num_calls += c.calls(out.stats, len(part))
            for i, (tokens, pair) in enumerate(zip(out.tokens.tolist(), part, strict=True), start=start):
                c.edits[i] += word_edits(corpus.decode(tokens), pair.text)
                c.words[i] += len(pair.text.split())
            advance()


def rows_of(chosen: Sequence[Configuration], setting: str) -> list[Row]:
    """One row for every configuration; the first is plain decoding."""
    rows = []
    for c in chosen:
        judged = c.total("num_accepted") + c.total("num_rejected")
        error_rate = c.edits.sum() / c.words.sum()
        rows.append(
            {
                "setting": setting,
                "rule": c.rule,
                "alpha": c.alpha,
                "word_accuracy": float(1 - error_rate),
                "standard_error": float(clustered_error(c.edits, c.words)),
                "rejection_rate": c.total("num_rejected") / judged if judged else None,
                "target_calls_per_token": c.num_calls / c.total("num_tokens"),
                "relative_seconds": c.seconds_per_token / chosen[0].seconds_per_token,
            }
        )
    return rows


def sweep(
    target: Any, draft: Any, corpus: Corpus, settings: Sequence[str], *, pairs: int, batch: int, timed: int,
    shares: Sequence[float], save: Callable[[list[Row]], Any], draft_lengths: Sequence[int] = (DRAFT_LENGTH,),
) -> list[Row]:  # fmt: skip
    """All curves; with several draft lengths those of the rules alone, each row's "setting" with its γ.

    Parameters
    ----------
    target, draft : T5ForConditionalGeneration
    corpus : Corpus
    settings : sequence of str
        Out of `SETTINGS`.
    pairs, batch : int
        Held-out pairs decoded, and how many together.
    timed : int
        How many of the pairs are decoded once more one by one, for the wall clock.
    shares : sequence of float
        See `spread_alphas`.
    save : callable
        Called with all rows so far, after every setting.
    draft_lengths : sequence of int
    """
    drawn = corpus.draw(corpus.held_out, _CALIBRATION + pairs, 0)
    test = drawn[_CALIBRATION:]
    rows: list[Row] = []
    for setting, length in product(settings, draft_lengths):
        calibration = calibration_laws(target, draft, drawn[:_CALIBRATION], SETTINGS[setting])
        several = len(draft_lengths) > 1
        chosen = configurations(target, draft, setting, calibration, shares, length, variants=not several)
        label = at_length(setting, length) if several else setting
        runs = sum(c.runs for c in chosen)
        with tqdm(total=runs * -(-pairs // batch), desc=label, mininterval=5.0, disable=None) as bar:
            measure(chosen, test, corpus, batch, bar.update)
        fresh = rows_of(chosen, label)
        if timed:
            alone = [replace(c, stats=[], num_calls=0) for c in chosen]
            with tqdm(total=runs * timed, desc=f"{label}, one by one", mininterval=5.0, disable=None) as bar:
                measure(alone, test[:timed], corpus, 1, bar.update)
            for row, point in zip(fresh, rows_of(alone, label), strict=True):
                row["relative_seconds_alone"] = point["relative_seconds"]
        rows += fresh
        save(rows)
    return rows
