"""A smaller model as the drafter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..checks import check_instance, check_number
from ..decoding.grammar import Masks, allowed
from ..decoding.request import check_draft
from ..decoding.runner import Runner, forward_logits
from ..decoding.state import DecodingState, StepResult
from ..integrations.runners import as_runner
from ..laws import Lossy
from ..ops._common import raise_for_status, unchecked
from ..ops.noise_keys import noise_keys
from ..ops.row_stats import row_stats
from ..ops.sample import sample
from ..ops.uniform_samples import uniform_samples
from ..ops.warp_probs import warp_probs
from ..processors import Processors
from ..sampling import GREEDY, SMALLEST_TEMPERATURE, SamplingParams
from ..types import Draw, RowStats, Status, TokenMap
from .base import Draft, Drafter


class ModelBase(Drafter):
    """What drafters that run a model have in common: its runner, on a ragged cache of its own.

    Parameters
    ----------
    caller : str
        Its name, for messages.
    draft_model, token_map
        See `ModelDrafter`.
    """

    runner: Runner
    sampling: SamplingParams | None = None
    _fed: int
    """How many of the text's last tokens a draft feeds by itself: the most that a step adds, which may still be
    unread."""
    _started = False
    _behind = 0
    """Steps since the last one with drafting: as many tokens before those are not in our cache yet."""

    def __init__(self, caller: str, draft_model: Any, token_map: TokenMap | None) -> None:
        check_instance(caller, "token_map", token_map, (TokenMap, type(None)), "a TokenMap or None")
        ids = getattr(getattr(draft_model, "config", None), "draft_token_ids", None)
        if token_map is None and ids is not None:
            token_map = TokenMap(torch.tensor(ids))
        self._caller, self.draft_model, self.token_map = caller, draft_model, token_map
        self._num_known: int | None = None  # ids that it reads, where these are not all of the target's
        self.runner = as_runner(draft_model, caller, token_map=token_map)

    def start(self, state: DecodingState) -> None:
        """Check that target and draft fit, and feed the prompts."""
        self._behind = 0
        # It may have moved, or be training, by now.
        runner = self.runner = as_runner(self.draft_model, self._caller, "draft_model", self.token_map)
        check_draft("generate", runner, state, "drafter.sampling", self.sampling, self.token_map)
        if self.token_map is not None:
            self.token_map = self.token_map.to(state.device)
        known = runner.num_embeddings
        self._num_known = known if known is not None and known < state.vocab_size else None
        prompt = state.prompt if self._num_known is None else state.prompt.clamped(self._num_known)
        self._started = True
        runner.start(prompt, self._capacity(state))
        runner.prefill(prompt)

    def _capacity(self, state: DecodingState) -> int:
        """Rows of the cache that each sequence needs."""
        return state.capacity

    def _text(self, state: DecodingState, back: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, count]`` tokens from `back` before the text's end on, and where they begin, ``[batch]``.

        If a text is shorter than `back`, they are its first.
        """
        starts = (state.lengths - back).clamp_(min=0)
        tokens = state.tokens.gather(1, starts[:, None] + torch.arange(count, device=state.device))
        return self._known(tokens), starts

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens as the draft reads them: ids that it has no embedding for become its last one."""
        return tokens if self._num_known is None else tokens.clamp(max=self._num_known - 1)

    def prepare(self, state: DecodingState) -> None:
        """Feed the tokens of steps without drafting: one a step in every active sequence."""
        if self._behind == 0:
            return
        missed, starts = self._text(state, self._fed + self._behind, self._behind)
        self.runner.forward(missed, starts, state.longest - 1, need_logits=False)

    def commit(self, state: DecodingState, result: StepResult) -> None:
        """Note whether our cache has seen what was emitted: it has, wherever we drafted."""
        drafted = state.asks_drafter(result.tokens.shape[1] - 1)
        self._behind = 0 if drafted else self._behind + 1

    def finish(self) -> None:
        if self._started:  # or the call was refused
            self._started = False
            self.runner.finish()


class ModelDrafter(ModelBase):
    """Drafts with a model that shares the target's tokenizer, on a ragged cache of its own.

    A draft of K tokens takes K forwards. The first feeds the text's last two tokens, because the second-to-last is new
    to the draft's cache if the whole previous draft was accepted. (A target law that needs the draft's distribution at
    the bonus token takes one more forward.) Rejected tokens cost nothing: their rows are overwritten.

    The target's `processors` act on the draft's logits as well, counting the tokens drafted so far along with the
    text's, and so does the mask of a `grammar`: what they bar is not drafted, and tokens are drawn from the changed
    logits. A draft ends where they leave no id that it knows. (With a `target_law` that mixes both models'
    distributions they do not act: there the draft has its own.)

    Parameters
    ----------
    draft_model
        A transformers model that `generate` can serve, or a `specdec_kernels.decoding.Runner`.
    sampling : SamplingParams, optional
        How draft tokens are drawn; None: as the target's. Greedy (temperature 0) drafts are one-hot. Acceptance
        "greedy" always drafts greedily.
    min_confidence : float
        In [0, 1]: a sequence's draft ends after a token to which the draft model gave less than this probability (at
        temperature 1 if it drafts greedily). That token is still put to the test: dropping it after seeing it would
        bias the output, while the ones after it have not been drawn. On a CPU this saves their forwards.
    token_map : TokenMap, optional
        Draft these target ids alone. Of a transformers model's LM head, which is most of the work in a small model,
        only their rows are multiplied (FR-Spec: Zhao et al., arXiv 2502.14856); a `Runner` gives logits of that many
        ids. The output keeps the target's distribution. A draft whose vocabulary differs in size from the target's, as
        between Qwen2.5 models that are padded differently, needs a map of the ids that both have; it reads any other id
        in a text as its last id. None: the ids of ``draft_model.config.draft_token_ids``, if it has any, as `specdec
        medusa draft` writes them, else all.

    Raises
    ------
    ValueError
        A model that cannot be served (here), or one whose vocabulary, device or kind is not the target's, that is too
        short for the text, or `sampling` of another batch size (in `generate`); `min_confidence` out of its range; a
        `token_map` with ids that the model lacks, or of another size than the logits of a `Runner`.
    TypeError
        `sampling`, `min_confidence` or `token_map` is something else.
    """

    gives_logits = True
    _fed = 2

    def __init__(
        self,
        draft_model: Any,
        sampling: SamplingParams | None = None,
        min_confidence: float = 0.0,
        token_map: TokenMap | None = None,
    ) -> None:
        wanted = SamplingParams, type(None)
        check_instance("ModelDrafter", "sampling", sampling, wanted, "a SamplingParams or None")
        super().__init__("ModelDrafter", draft_model, token_map)
        self.sampling = sampling
        self.min_confidence = check_number("ModelDrafter", "min_confidence", min_confidence, 0.0, 1.0)

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """As the draft's `Runner`; False in a subclass with another `propose`, unless that says otherwise."""
        return self.runner.capturable and type(self).propose is ModelDrafter.propose

    def _next_logits(self, state: DecodingState, drafted: list[torch.Tensor], goes_on: torch.Tensor) -> torch.Tensor:
        """``[batch, 1, vocab_draft]``: what follows the text and these tokens, of which all but the last were fed.

        `goes_on` ``[batch, 1]``: whose draft has not ended yet.
        """
        last, i = state.lengths - 1, len(drafted)
        tokens, starts = (self._known(drafted[-1]), last + i) if drafted else self._text(state, self._fed, self._fed)

        def real() -> torch.Tensor:
            asked = state.active[:, None]
            if not state.cascade_bonus:  # which reads a row more, behind a draft's end
                asked = goes_on & (state.remaining - 1 > i)[:, None]
            # a text of one token has no second
            return asked if drafted else asked & (torch.arange(2, device=state.device) <= (last - starts)[:, None])

        self.runner.expect(real)
        logits = forward_logits(self.runner, tokens, starts, max(state.longest + i, 2))
        if drafted:
            return logits
        return logits[torch.arange(len(logits), device=state.device), last - starts][:, None]

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        """Draw `num_tokens` tokens one after the other; keeps their logits and stats for the verifier."""
        params = self.sampling if self.sampling is not None else state.sampling
        if state.acceptance == "greedy":
            params = GREEDY
        noise, keys = _noise(state, params, num_tokens)
        mixed = state.target_law is not None and not isinstance(state.target_law, Lossy)
        processors, masks = (None, None) if mixed else (state.processors, state.masks)
        grammar = None if masks is None else _Allowed(masks, self.token_map, state.batch_size)
        if grammar is not None:
            processors = processors or Processors()
        counts = None if processors is None else processors.token_counts
        if processors is not None and counts is not None:
            counts = counts.clone()
            processors = processors.with_counts(counts)
        tokens: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        stats: list[RowStats] = []
        goes_on = state.active[:, None]  # [batch, 1]: whether the next token still counts
        lengths = torch.zeros_like(state.lengths)
        for i in range(num_tokens):
            logits = self._next_logits(state, tokens, goes_on)
            if processors is not None and self.token_map is not None:  # processors know target ids alone
                narrow, logits = logits, logits.new_full((*logits.shape[:2], state.vocab_size), -torch.inf)
                logits[..., self.token_map.draft_to_target] = narrow
            if grammar is not None and processors is not None:
                mask, follows = grammar.next_mask(i, state.host_limits)
                processors = processors.with_bitmask(mask.to(state.device))
                goes_on = goes_on & follows.to(state.device)
            with unchecked():
                draw = sample(
                    logits, params, processors=processors,
                    uniform_samples=None if noise is None else noise[:, i : i + 1],
                    noise_keys=None if keys is None else keys[:, i : i + 1],
                    draft_token_map=self.token_map if processors is None else None,
                )  # fmt: skip
            some = draw.stats.status != Status.EMPTY_ROW  # processors may bar all that it knows: the end, no fault
            raise_for_status("sample", draw.stats.status * some)
            goes_on = goes_on & some
            if grammar is not None:
                grammar.add(draw.token)
            tokens.append(draw.token)
            rows.append(logits)
            stats.append(draw.stats)
            if processors is not None and noise is not None:
                probs.append(warp_probs(logits, params, processors=processors))
            lengths += goes_on[:, 0]
            if self.min_confidence > 0:
                log_prob = _confidence(params, draw, logits, processors)
                goes_on = goes_on & (log_prob.exp() >= self.min_confidence)
                if state.device.type == "cpu" and not np.any(goes_on[:, 0].numpy() & (state.host_limits > i + 1)):
                    break
            if counts is not None:
                with unchecked():  # a draft may run on beyond its sequence's end, where there is no room
                    counts.add_(draw.token)
        if state.cascade_bonus:
            bonus = self._next_logits(state, tokens, goes_on)
            rows.append(bonus)
            stats.append(row_stats(bonus, params))
        drafted = torch.cat([state.tokens[:, :0], *tokens], dim=1)
        if noise is None and not mixed:  # one-hot, or by a rule that needs no draft law
            return Draft(drafted, num_draft_tokens=lengths)
        if processors is not None:
            return Draft(drafted, probs=torch.cat(probs, dim=1), num_draft_tokens=lengths)
        kept = RowStats(*(torch.cat(parts, dim=1) for parts in zip(*stats, strict=True)))
        return Draft(
            drafted, logits=torch.cat(rows, dim=1), params=params, stats=kept, token_map=self.token_map,
            num_draft_tokens=lengths,
        )  # fmt: skip


def _noise(
    state: DecodingState, params: SamplingParams, num_tokens: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a draft is drawn with: uniforms, or keys that give it the target's own noise; neither where it is greedy."""
    if state.acceptance == "match":
        return None, noise_keys(state.seeds, state.next_positions(num_tokens))
    if params.is_greedy:
        return None, None
    return uniform_samples(state.seeds, state.step, num_tokens, purpose="draft"), None


class _Allowed:
    """What a grammar lets a draft draw, one token after the other."""

    def __init__(self, masks: Masks, token_map: TokenMap | None, batch: int) -> None:
        self._masks = masks
        self._among = None if token_map is None else token_map.draft_to_target.cpu()  # the ids that the draft knows
        self._drafts: list[np.ndarray | None] = [np.empty(0, dtype=np.int64)] * batch  # None: the grammar is not asked

    def next_mask(self, i: int, limits: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The bitmask of the i-th token ``[batch, 1, words]``, and where one may follow ``[batch, 1]``; on the host.
        `limits` are the most draft tokens of each sequence.
        """
        drafts = [draft if i < limit else None for draft, limit in zip(self._drafts, limits, strict=True)]
        self._rows, follows = self._masks.after(drafts, self._among)
        self._drafts = [draft if more else None for draft, more in zip(drafts, follows, strict=True)]
        return self._rows[:, None], torch.from_numpy(follows)[:, None]

    def add(self, token: torch.Tensor) -> None:
        """``[batch, 1]``: what was drawn. Where processors left nothing to draw, the grammar may bar it."""
        new = token.cpu()
        self._drafts = [
            np.append(draft, new[b]) if draft is not None and allowed(self._rows[b], new[b]) else None
            for b, draft in enumerate(self._drafts)
        ]


def _confidence(
    params: SamplingParams, draw: Draw, logits: torch.Tensor, processors: Processors | None
) -> torch.Tensor:
    """``[batch, 1]``: the log-probability of what was drawn, at temperature 1 where it was drawn greedily."""
    if not (params.is_greedy or isinstance(params.temperature, torch.Tensor)):
        return draw.log_prob
    with unchecked():  # `sample` was given the same row
        likeliest = -row_stats(logits, processors=processors).normalizer.log()
    if not isinstance(params.temperature, torch.Tensor):
        return likeliest
    return torch.where(params.temperature[:, None] < SMALLEST_TEMPERATURE, likeliest, draw.log_prob)
