"""Train the pair of the rewriting task: a deep T5 and a shallow one, from scratch, once; the cache keeps them."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import trange

from bench.cascades.rewriting import EOS, PAD, VOCAB_SIZE, Corpus, Pair, pad, paragraphs, train_tokenizer
from specdec_kernels import assets
from specdec_kernels.assets.fetch import cached

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

_BATCH = 64
_POOL = 8  # batches drawn together and sorted by length, which halves the padding
_HEAD_DIM = 32


@dataclass(frozen=True)
class Recipe:
    """A T5 and the length of its training."""

    name: str
    width: int
    encoder_layers: int
    decoder_layers: int
    steps: int
    learning_rate: float


TARGET = Recipe("target", 128, 2, 6, 5000, 1.5e-3)
DRAFT = Recipe("draft", 64, 1, 1, 3000, 3e-3)


def quick(recipe: Recipe) -> Recipe:
    """`recipe` for a rehearsal: trained for very few steps."""
    return replace(recipe, steps=60)


def new_model(recipe: Recipe) -> T5ForConditionalGeneration:
    """Untrained, from torch's default generator."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=recipe.width,
            d_kv=_HEAD_DIM,
            d_ff=4 * recipe.width,
            num_heads=recipe.width // _HEAD_DIM,
            num_layers=recipe.encoder_layers,
            num_decoder_layers=recipe.decoder_layers,
            dropout_rate=0.0,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=PAD,
        )
    )


def loss_of(model: T5ForConditionalGeneration, pairs: list[Pair]) -> torch.Tensor:
    """Mean negative log-likelihood of a target token, in nats."""
    source = pad([pair.source for pair in pairs], PAD)
    labels = pad([pair.target for pair in pairs], -100)
    loss: torch.Tensor = model(input_ids=source, attention_mask=(source != PAD).long(), labels=labels).loss
    return loss


def fit(recipe: Recipe, corpus: Corpus) -> T5ForConditionalGeneration:
    """Train on runs drawn anew for every step: AdamW, a warm-up of 300 steps, a linear decay over the last third."""
    torch.manual_seed(0)
    model = new_model(recipe).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 300, 1.0, (recipe.steps - step) * 3 / recipe.steps)
    )
    recent = None
    bar = trange(recipe.steps, desc=f"training the {recipe.name}", mininterval=5.0, disable=None, file=sys.stderr)
    for step in bar:
        turn = step % _POOL
        if turn == 0:
            drawn = corpus.draw(corpus.train, _POOL * _BATCH, [1, step])
            drawn.sort(key=lambda pair: (len(pair.target), len(pair.source)))
            # shuffled, or the optimiser would see lengths grow within every eight steps
            order = torch.randperm(_POOL).tolist()
        first = order[turn] * _BATCH
        loss = loss_of(model, drawn[first : first + _BATCH])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        value = float(loss.detach())
        recent = value if recent is None else recent + 0.02 * (value - recent)
        if step % 50 == 0:
            bar.set_postfix_str(f"loss {recent:.2f}", refresh=False)
    return model.eval().requires_grad_(False)


def load_corpus(say: assets.Say = assets.print_to_stderr) -> Corpus:
    """The task's texts with their tokenizer (kept in the cache; the texts are read anew, in ten seconds)."""
    from tokenizers import Tokenizer

    texts = paragraphs()
    digest = _digest(texts)

    def build(path: Path) -> None:
        say("training the tokenizer of the rewriting task ...")
        train_tokenizer(texts).save(str(path))

    return Corpus(texts, Tokenizer.from_file(str(cached(f"rewriting-tokenizer-{digest}.json", build, say=say))))


def load_model(recipe: Recipe, corpus: Corpus, say: assets.Say = assets.print_to_stderr) -> T5ForConditionalGeneration:
    """The trained model of `recipe`, in evaluation mode; if the cache has none, it is trained first."""
    from transformers import T5ForConditionalGeneration
    from transformers.utils import logging

    def build(folder: Path) -> None:
        fit(recipe, corpus).save_pretrained(folder)

    folder = cached(f"rewriting-{recipe.name}-{_digest(corpus.train, recipe)}", build, say=say)
    logging.disable_progress_bar()
    model: T5ForConditionalGeneration = T5ForConditionalGeneration.from_pretrained(folder, local_files_only=True)
    return model.eval().requires_grad_(False)


def _digest(*parts: object) -> str:
    """Distinguishes results made from other texts (another Python) or with another recipe."""
    return hashlib.sha256(repr((VOCAB_SIZE, *parts)).encode()).hexdigest()[:12]
