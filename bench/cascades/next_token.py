"""The curves of SmolLM2-135M-Instruct with an n-gram draft on held-out code, without sampling noise.

At positions of HumanEval's canonical solutions (after their prompts) both models' distributions are computed once. The
distribution π that a rule produces is known in closed form, and so are the log-loss −log π(x) and the chance π(x) of
the true token x, and the rate TV(π, Q) at which a draft token is rejected. The text up to the position is always the
true one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from bench.cascades.results import DRAFT, TARGET, Row, clustered_error
from bench.cascades.rules import LOG_RULES, RULES, SETTINGS, Float64, Laws, spread_alphas, total_variation
from specdec_kernels import SamplingParams, assets
from specdec_kernels.assets import corpus
from specdec_kernels.drafters import NgramLMDrafter
from specdec_kernels.testing import float64_law, float64_target_law

SHARES = (0.95, 0.8, 0.65, 0.5, 0.35, 0.2, 0.05)  # of what lossless verification rejects: α is chosen to reach these
_CHUNK = 32  # positions looked at together: 12 MB per law
_CALIBRATION = 64  # positions that α is chosen on


def ngram_laws(drafter: NgramLMDrafter, tokens: Sequence[int], positions: Sequence[int], vocab: int) -> Float64:
    """``[positions, vocab]``: the drafter's law of the token at each of `positions`, after the true ones before it.

    What the counts leave over is spread evenly over the vocabulary, which is how Witten and Bell's estimate ends.
    """
    out = np.zeros((len(positions), vocab))
    for row, position in zip(out, positions, strict=True):
        ids, seen = drafter.law_after(tokens[:position])
        row[ids] = seen
        row += max(1 - row.sum(), 0) / vocab
        row /= row.sum()
    return out


def held_out(
    positions: int,
) -> tuple[torch.Tensor, Float64, NDArray[np.int64], NDArray[np.int64]]:
    """Target logits ``[positions, vocab]`` float32, the draft's law ``[positions, vocab]``, the true tokens, and the
    problem that each position belongs to.

    The last problems of HumanEval: the n-gram model's constants were chosen on the first.
    """
    model, tokenizer = assets.load_model(assets.print_to_stderr)
    drafter = NgramLMDrafter(corpus.ngram_table(tokenizer, assets.print_to_stderr))
    logits, laws, truth, problems = [], [], [], []
    found = 0
    bar = tqdm(assets.human_eval(assets.print_to_stderr)[::-1], desc="HumanEval", mininterval=5.0, disable=None)
    for number, problem in enumerate(bar):
        prompt = tokenizer.encode(problem["prompt"], add_special_tokens=False)
        text = [*prompt, *tokenizer.encode(problem["canonical_solution"], add_special_tokens=False)]
        places = list(range(len(prompt), len(text)))[: positions - found]
        with torch.inference_mode():
            rows = model(torch.tensor([text[:-1]])).logits[0]
        logits.append(rows[[place - 1 for place in places]].float())
        laws.append(ngram_laws(drafter, text, places, rows.shape[1]))
        truth += [text[place] for place in places]
        problems += [number] * len(places)
        found += len(places)
        if found == positions:
            break
    return torch.cat(logits), np.concatenate(laws), np.array(truth), np.array(problems)


def sweep(
    logits: torch.Tensor, draft: Float64, truth: NDArray[np.int64], problems: NDArray[np.int64],
    settings: Sequence[str], *, shares: Sequence[float], save: Callable[[list[Row]], Any],
) -> list[Row]:  # fmt: skip
    """All curves, from what `held_out` returns; `save` is called with all rows so far, after every setting."""
    rows: list[Row] = []
    texts, text_of, lengths = np.unique(problems, return_inverse=True, return_counts=True)
    for setting in settings:
        every = max(len(truth) // _CALIBRATION, 1)
        sample = slice(None, None, every)
        calibration = _laws(logits[sample], draft[sample], SETTINGS[setting])
        log_loss = setting == "T = 1"  # elsewhere tokens that occur can have probability 0
        points: list[tuple[str, float | None, Any]] = [(TARGET, None, None), (DRAFT, None, None)]
        for rule in (*RULES, *(LOG_RULES if log_loss else ())):
            if setting in rule.settings:
                points += [(rule.name, a, rule.make(a)) for a in spread_alphas(rule, calibration, shares)]
        sums = np.zeros((len(points), 3, len(texts)))
        for start in tqdm(range(0, len(truth), _CHUNK), desc=setting, mininterval=5.0, disable=None):
            part = slice(start, start + _CHUNK)
            x = _laws(logits[part], draft[part], SETTINGS[setting])
            for i, (name, _, law) in enumerate(points):
                if law is None:
                    made = x.Q if name == DRAFT else x.P
                else:
                    made = float64_target_law(law, x.P, x.Q, x.p, x.q)
                chance = made[np.arange(len(made)), truth[part]]
                numbers = np.stack([-np.log(np.maximum(chance, 1e-300)), chance, total_variation(made, x.Q)], 1)
                np.add.at(sums[i].T, text_of[part], numbers)
        means, errors = sums.sum(-1) / len(truth), clustered_error(sums, lengths)
        rows += [
            {
                "setting": setting,
                "rule": name,
                "alpha": alpha,
                "log_loss": float(mean[0]) if log_loss else None,
                "log_loss_standard_error": float(error[0]) if log_loss else None,
                "accuracy": float(mean[1]),
                "standard_error": float(error[1]),
                "rejection_rate": float(mean[2]),
            }
            for (name, alpha, _), mean, error in zip(points, means, errors, strict=True)
        ]
        save(rows)
    return rows


def _laws(logits: torch.Tensor, draft: Float64, sampling: SamplingParams) -> Laws:
    """`draft` holds probabilities, which enter the sampling transform as the logits log q."""
    q_logits = torch.from_numpy(np.log(draft))
    raw = SamplingParams()
    return Laws(*(float64_law(rows, params) for params in (sampling, raw) for rows in (logits, q_logits)))
