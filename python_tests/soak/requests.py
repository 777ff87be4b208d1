"""Random requests to `generate`, and what is looked at in each answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import TableRunner, full_law, near, tiny
from specdec_kernels.drafters import Draft, Drafter
from specdec_kernels.medusa import MedusaHeads
from specdec_kernels.testing import float64_law
from specdec_kernels.types import TokenMap

from .uniformity import Stream, transformed

VOCAB = 13
FAMILIES = ("llama", "gpt2", "qwen2", "t5", "table")
TREES = ("medusa", "lookup tree", "model tree")  # drafters
TIE = 1e-3  # in logits: another number of rows is rounded otherwise, so that either of two as close may win
SMALLER = {"vocab_size": VOCAB, "num_hidden_layers": 2}


class CancelledError(Exception):
    """Raised by a request's own streamer: its caller has gone."""


class Careless(Drafter):
    """Ids that are none, distributions that are none, tokens that their distribution cannot give; sometimes a true
    draft, sometimes none at all.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.answer: Draft | None = None

    def start(self, state: Any) -> None:
        self.answer = None

    def propose(self, state: Any, num_tokens: int) -> Draft:
        if self.answer is None:  # the same one until `commit`
            self.answer = self._draft(state.batch_size, int(self.rng.integers(num_tokens + 1)))
        return self.answer

    def _draft(self, batch: int, width: int) -> Draft:
        fault = self.rng.choice(["none", "ids", "values", "cut off"])
        if fault == "ids":
            return Draft(torch.from_numpy(self.rng.integers(-2, VOCAB + 2, (batch, width))))
        probs = self.rng.dirichlet(np.ones(VOCAB), (batch, width)).astype(np.float32)
        tokens = (probs.cumsum(-1) > self.rng.random((batch, width, 1))).argmax(-1)
        row = int(self.rng.integers(batch))
        if fault == "values":
            probs[row, :, int(self.rng.integers(VOCAB))] = self.rng.choice([np.nan, -1.0, np.inf, 3.0])
        elif fault == "cut off":
            np.put_along_axis(probs[row], tokens[row][:, None], 0.0, axis=-1)
            probs[row] /= probs[row].sum(-1, keepdims=True)
        return Draft(torch.from_numpy(tokens), probs=torch.from_numpy(probs))

    def commit(self, state: Any, result: Any) -> None:
        self.answer = None


@dataclass
class Tally:
    """What happened."""

    counts: Counter[str] = field(default_factory=Counter)
    streams: dict[str, Stream] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        self.counts += other.counts
        self.wrong += other.wrong
        for name, stream in other.streams.items():
            self.streams.setdefault(name, Stream()).merge(stream)


class Requests:
    """Requests of one caller, with models and drafters that it uses again and again.

    Parameters
    ----------
    seed : int
        Of everything that is random in them.
    lie : bool
        Plant a drafter that does not tell the truth: the soak must see it.
    """

    def __init__(self, seed: int, lie: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.tally = Tally()
        self.models = {name: self._target(name) for name in FAMILIES}
        self.drafters: dict[str, dict[str, Drafter]] = {name: self._drafters(name, lie) for name in FAMILIES}

    @staticmethod
    def _target(family: str) -> Any:
        return TableRunner.random(VOCAB) if family == "table" else tiny(family, 1, **SMALLER)

    def _drafters(self, family: str, lie: bool) -> dict[str, Drafter]:
        found: dict[str, Drafter] = {
            "none": sk.NoDrafter(), "lookup": sk.NgramDrafter(), "n-gram model": sk.NgramLMDrafter(),
            "careless": Careless(self.rng),
        }  # fmt: skip
        if family == "table":
            draft: Any = TableRunner(self.models[family].table + TableRunner.random(VOCAB, 1, spread=0.7).table)
        else:
            draft = near(family, 1, 0.15, **SMALLER)
        found["model"] = Liar(draft, sk.SamplingParams(0.05)) if lie else sk.ModelDrafter(draft)
        if family == "table":
            return found
        found["model, top-k 3"] = sk.ModelDrafter(draft, sk.SamplingParams(1.3, top_k=3))
        if family == "t5":
            return found
        found["model tree"] = sk.ModelTreeDrafter(draft, num_nodes=6, max_depth=3, width=2)
        found["lookup tree"] = sk.NgramTreeDrafter(num_nodes=6, max_depth=4)
        heads = MedusaHeads.of_model(self.models[family], 3, TokenMap(torch.arange(1, VOCAB)))
        found["medusa"] = sk.MedusaDrafter(heads, sk.DraftTree.cartesian([2, 2, 1]))
        return found

    def run(self) -> None:
        """One request, of any kind."""
        family = str(self.rng.choice(FAMILIES))
        name = str(self.rng.choice(list(self.drafters[family])))
        rules = ["token", "match", "greedy"] + ([] if name in TREES else ["block"])
        self.ask(family, name, str(self.rng.choice(rules)))

    def ask(self, family: str, name: str, rule: str) -> None:
        """One request to a model, with a drafter and an acceptance rule."""
        model, rng = self.models[family], self.rng
        batch = int(rng.integers(1, 5))
        ids, mask = self._prompts(family, batch)
        params = [self._params() for _ in range(batch)]
        ends = [] if rng.random() < 0.5 else [int(rng.integers(2, VOCAB))]
        patience = int(rng.integers(1, 6)) if rng.random() < 0.05 else None
        heard: list[list[int]] = [[] for _ in range(batch)]

        def listen(new: list[np.ndarray[Any, Any]]) -> None:
            for said, more in zip(heard, new, strict=True):
                said += more.tolist()
            if patience is not None and len(heard[0]) >= patience:
                raise CancelledError

        asked = {
            "drafter": self.drafters[family][name], "attention_mask": mask, "sampling": together(params),
            "eos_token_id": ends, "max_new_tokens": int(rng.integers(1, 17)), "acceptance": rule, "streamer": listen,
            "seeds": torch.from_numpy(rng.integers(0, 2**62, batch)),
            "num_speculative_tokens": "auto" if rng.random() < 0.1 else int(rng.integers(0, 7)),
        }  # fmt: skip
        self.tally.counts["requests"] += 1
        try:
            out = sk.generate(model, ids, **asked)
        except CancelledError:
            self.tally.counts["cancelled"] += 1
            out = None
        kind = f"{family}, {name}, {rule}"
        if out is not None:
            for row, said in enumerate(heard):
                if out.tokens[row].tolist()[: len(said)] != said:
                    self.tally.wrong.append(f"{kind}: streamed {said}, returned {out.tokens[row].tolist()}")
        for row, said in enumerate(heard):
            self._check(kind, model, ids[row][mask[row].bool()], said, params[row], rule == "greedy")

    def _prompts(self, family: str, batch: int) -> tuple[Tensor, Tensor]:
        lengths = self.rng.integers(2, 12, batch)
        width = int(lengths.max())
        ids = torch.from_numpy(self.rng.integers(3, VOCAB, (batch, width)))
        mask = (torch.arange(width) >= width - torch.from_numpy(lengths)[:, None]).long()
        return ids, mask

    def _params(self) -> sk.SamplingParams:
        rng = self.rng
        return sk.SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.4], p=[0.1, 0.3, 0.3, 0.3])),
            top_k=int(rng.choice([0, 3, 6])), top_p=float(rng.choice([1.0, 0.8])), min_p=float(rng.choice([0.0, 0.05])),
        )  # fmt: skip

    def _check(
        self, kind: str, model: Any, prompt: Tensor, said: list[int], params: sk.SamplingParams, greedy: bool
    ) -> None:
        """Each token of an answer against its distribution, given the text before it."""
        if not said:
            return
        if isinstance(model, TableRunner):
            text = torch.tensor([0, *prompt.tolist(), *said])
            rows = model.table[text[len(prompt) - 1 : -2], text[len(prompt) : -1]].double()
        else:
            rows = torch.from_numpy(full_law(model, prompt, said)[:-1].log().numpy())
        laws, numbers = float64_law(rows, params), []
        for row, law, token in zip(rows.numpy(), laws, said, strict=True):
            least = row.max() if greedy or params.temperature == 0 else row[law > 0].min()
            if not 0 <= token < VOCAB or row[token] < least - TIE:
                self.tally.wrong.append(f"{kind}: impossible token {token} of {np.round(law, 4).tolist()}")
            elif not greedy and params.temperature != 0 and law[token] > 0:
                numbers.append(transformed(law, token, self.rng.random()))
        self.tally.counts["tokens"] += len(said)
        if numbers:
            self.tally.streams.setdefault(kind, Stream()).add(numbers)


class Liar(sk.ModelDrafter):
    """Draws with other parameters than it says."""

    def propose(self, state: Any, num_tokens: int) -> Draft:
        draft = super().propose(state, num_tokens)
        return Draft(draft.tokens, logits=draft.logits)


def together(params: list[sk.SamplingParams]) -> sk.SamplingParams:
    """One value a sequence."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return sk.SamplingParams(**{name: torch.tensor([getattr(p, name) for p in params]) for name in names})
