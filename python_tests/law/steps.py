"""Several verify steps with production randomness, on laws that depend on the last two tokens: samples to be tested.

The loop is the plainest one that is right: fresh uniforms keyed by a step counter, the draft cut at min(num_draft, what
is left − 1), finished sequences idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.law.windows import WINDOW, check_windows, windows_of
from specdec_kernels.testing import Float64, Verify, float64_law

FAMILIES = 16  # backends × devices that may run the family in one suite: the level is shared out among them
LENGTH = 13  # with num_draft = 3, at least four verify steps
BATCH = 16384
CALL_ROWS = 2048


@dataclass(frozen=True)
class StepCase:
    """A loop to run; `keyed_by_position` and `accept_purpose` plant defects."""

    acceptance: str
    draft: str = "full"  # "full", "one_hot", "reduced", "probs"
    params: sk.SamplingParams = field(default_factory=sk.SamplingParams)
    draft_params: sk.SamplingParams = field(default_factory=sk.SamplingParams)
    vocab: int = 3
    num_draft: int = 3
    spread: float = 1.2
    keyed_by_position: bool = False
    accept_purpose: str = "accept"

    def tables(self) -> tuple[Tensor, Tensor]:
        """Target and draft logits ``[vocab, vocab, vocab]`` by the last two tokens."""
        rng = torch.Generator().manual_seed(7)
        target, draft = (torch.randn(*[self.vocab] * 3, generator=rng) * self.spread for _ in range(2))
        return target, draft[..., : self.vocab - 1].contiguous() if self.draft == "reduced" else draft

    def token_map(self, device: str) -> sk.TokenMap | None:
        made = sk.TokenMap(torch.arange(self.vocab - 1, 0, -1)) if self.draft == "reduced" else None
        return made and made.to(device)


CASES = {
    "token-full": StepCase("token"),
    "token-one_hot": StepCase("token", "one_hot"),
    "token-reduced": StepCase("token", "reduced", vocab=4),
    "token-probs": StepCase("token", "probs"),
    "token-truncated": StepCase(
        "token", params=sk.SamplingParams(0.8, top_p=0.9), draft_params=sk.SamplingParams(1.4, top_k=3), vocab=4
    ),
    "block-full": StepCase("block"),
    "block-one_hot": StepCase("block", "one_hot"),
    # nearly a point mass against a flat target: where noise that is re-used at a position does most harm
    "block-peaked": StepCase("block", draft_params=sk.SamplingParams(0.4), spread=0.3),
    "block-reduced": StepCase("block", "reduced", vocab=4),
    "block-truncated": StepCase(
        "block", params=sk.SamplingParams(0.8, min_p=0.1), draft_params=sk.SamplingParams(1.3, top_p=0.9), vocab=4
    ),
    "match-full": StepCase("match"),
    "match-one_hot": StepCase("match", "one_hot"),
    "match-truncated": StepCase("match", params=sk.SamplingParams(0.8, top_k=3), vocab=4),
}


def run_steps(verify: Verify, case: StepCase, device: str = "cpu", batch: int = BATCH) -> np.ndarray:
    """``[batch, LENGTH]`` emitted tokens; every sequence starts after the tokens 0, 0."""
    parts = [_run(verify, case, torch.arange(s, min(batch, s + CALL_ROWS)), device) for s in range(0, batch, CALL_ROWS)]
    return torch.cat(parts).numpy()


def _run(verify: Verify, case: StepCase, seeds: Tensor, device: str) -> Tensor:
    batch, K, V = len(seeds), case.num_draft, case.vocab
    target_table, draft_table = (t.to(device) for t in case.tables())
    seeds, rows = (seeds * 7919 + 13).to(device), torch.arange(batch, device=device)
    text = torch.zeros(
        batch, 3 + LENGTH + K, dtype=torch.int64, device=device
    )  # the two start tokens, then what is emitted
    count = torch.zeros(batch, dtype=torch.int64, device=device)
    token_map = case.token_map(device)
    step = 0
    while int(count.min()) < LENGTH:
        uniforms, draw = _noise(case, seeds, count, step)
        drafts = []
        for i in range(K):
            at = count + 2 + i
            logits = draft_table[text[rows, at - 2], text[rows, at - 1]]
            token = logits.argmax(-1) if case.draft == "one_hot" else draw(i, logits)
            text[rows, at] = token  # overwritten below where it is not accepted
            drafts.append(logits)
        place = count[:, None] + 2 + torch.arange(K + 1, device=device)
        target = target_table[text.gather(1, (place - 2)), text.gather(1, (place - 1))]
        given: dict[str, object] = {}
        if case.draft != "one_hot":
            logits = torch.stack(drafts, 1)
            given = {"draft_logits": logits, "draft_params": case.draft_params}
            if case.draft == "probs":
                given = {"draft_probs": logits.softmax(-1)}
            if token_map is not None:
                given["draft_token_map"] = token_map
        left = LENGTH - count
        out = verify(
            target,
            text.gather(1, place[:, :K]),
            num_draft_tokens=torch.where(left > 0, (left - 1).clamp_max(K), -1).int(),
            params=case.params,
            acceptance=case.acceptance,
            **uniforms,
            **given,
        )
        assert int(out.tokens.max()) < V
        emitted = torch.arange(K + 1, device=device) < out.num_tokens[:, None]
        text.scatter_(1, place, torch.where(emitted, out.tokens, text.gather(1, place)))
        count += out.num_tokens
        step += 1
    return text[:, 2 : 2 + LENGTH].cpu()


def _noise(
    case: StepCase, seeds: Tensor, count: Tensor, step: int
) -> tuple[dict[str, Tensor], Callable[[int, Tensor], Tensor]]:
    """The verifier's randomness of one step, and how its drafter draws the i-th token."""
    K, token_map = case.num_draft, case.token_map(str(seeds.device))
    if case.acceptance == "match":
        keys = sk.noise_keys(seeds, count[:, None] + torch.arange(K + 1, device=seeds.device))
        return {"noise_keys": keys}, lambda i, logits: sk.sample(logits, noise_keys=keys[:, i]).token
    if case.keyed_by_position:
        index = count[:, None] + torch.arange(K, device=seeds.device)
        drafting, coins, final = (sk.uniform_samples(seeds, 0, LENGTH + K, p) for p in ("draft", "accept", "final"))
        drafting, coins = drafting.gather(1, index), coins.gather(1, index)
        uniforms = torch.cat([final.gather(1, count[:, None]), coins], 1)
    else:
        drafting = sk.uniform_samples(seeds, step, K, purpose="draft")
        uniforms = sk.uniform_samples(seeds, step, K + 1, purpose=case.accept_purpose)

    def draw(i: int, logits: Tensor) -> Tensor:
        token: Tensor = sk.sample(
            logits, case.draft_params, uniform_samples=drafting[:, i].contiguous(), draft_token_map=token_map
        ).token
        return token

    return {"uniform_samples": uniforms}, draw


def expected_windows(case: StepCase) -> list[Float64]:
    """The target's, see `windows_of`."""
    return windows_of(float64_law(case.tables()[0], case.params), LENGTH)


def check_steps(verify: Verify, case: StepCase, device: str = "cpu") -> None:
    """No window of the emitted tokens rejects the target's joint law."""
    num_tests = FAMILIES * len(CASES) * (LENGTH - WINDOW + 1)
    check_windows(run_steps(verify, case, device), expected_windows(case), num_tests)
