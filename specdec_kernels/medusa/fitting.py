"""Training that survives being killed: the recipe, the order of the data, checkpoints.

A run is a function of its data, its recipe and its seed: the batch of a step is known from the step's number alone, and
a checkpoint holds all the rest, so a run that was killed resumes at its last checkpoint and ends with the losses that
it would have had.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..checks import check_flag, check_instance, check_int, check_model, check_number
from ..files import write_whole
from ..integrations.transformers.packing import is_packed
from .data import IGNORED, Features, digest_of

_BEHIND_THE_HEAD = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # what models do to its logits


@dataclass(frozen=True)
class Recipe:
    """How long and how fast.

    Attributes
    ----------
    steps : int
        >= 1.
    batch_size : int
        >= 1: tokens a step for Medusa-1, documents a step for Medusa-2 or a draft model.
    learning_rate, backbone_learning_rate : float
        Of AdamW, in [0, 1000]; the backbone, trained already, learns a quarter as fast. Both grow linearly over
        `warm_up_steps` and fall along a cosine to 0.
    warm_up_steps : int
        >= 0.
    ramp_steps : int
        >= 0. For Medusa-2: over how many steps the heads' weight λ0 grows.
    final_heads_weight : float
        λ0, in [0, 1000]; 0.01 for self-distilled text, 0.2 for given text.
    distilled : bool
        For Medusa-2: the backbone's loss is the KL divergence from the original, else cross-entropy with the text.
    checkpoint_every : int
        Steps, >= 1.
    seed : int
        >= 0. Of the order of the data.

    Raises
    ------
    TypeError, ValueError
        A field of another type, or out of its range.
    """

    steps: int = 3000
    batch_size: int = 512
    learning_rate: float = 2e-3
    backbone_learning_rate: float = 5e-4
    warm_up_steps: int = 100
    ramp_steps: int = 500
    final_heads_weight: float = 0.01
    distilled: bool = True
    checkpoint_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "checkpoint_every"):
            check_int("Recipe", name, getattr(self, name), 1, None)
        for name in ("warm_up_steps", "ramp_steps", "seed"):
            check_int("Recipe", name, getattr(self, name), 0, None)
        for name in ("learning_rate", "backbone_learning_rate", "final_heads_weight"):
            check_number("Recipe", name, getattr(self, name), 0, 1e3)
        check_flag("Recipe", "distilled", self.distilled)

    def rate(self, step: int) -> float:
        """The factor of the learning rates at step `step`.

        Raises
        ------
        TypeError, ValueError
            Not an integer from 0 to `steps`.
        """
        check_int("Recipe", "step", step, 0, self.steps)
        warm = min(1.0, (step + 1) / max(self.warm_up_steps, 1))
        return warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def product_dtype(device: torch.device) -> torch.dtype:
    """In which matrix products that may be rounded are fast: bfloat16, but float32 on a CPU that cannot multiply it,
    where bfloat16 takes several times as long.
    """
    known = getattr(torch.cpu, "get_capabilities", None)  # newer versions of torch have it
    if device.type == "cpu" and known is not None and not any(has for of, has in known().items() if "bf16" in of):
        return torch.float32
    return torch.bfloat16


def check_plain_logits(caller: str, name: str, model: Any) -> None:
    """Raise unless a model's logits are its LM head's weights times its last hidden states, and no more."""
    check_model(caller, name, model)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{caller}: {name} must have an LM head, got a {type(model).__name__}, which has none")
    config = model.config.get_text_config()
    odd = [of for of in _BEHIND_THE_HEAD if getattr(config, of, None) not in (None, 1)]
    if getattr(head, "bias", None) is not None:
        odd.append("a bias of the LM head")
    if odd:
        raise ValueError(f"{caller}: {name} must have logits that are its LM head's alone, got {', '.join(odd)}")


def check_run(
    caller: str, features: object, recipe: object, checkpoint: object, progress: object, **modules: nn.Module
) -> None:  # fmt: skip
    """Raise for the first wrong one of the arguments that all training shares; `modules` are to be trained."""
    check_instance(caller, "features", features, Features, "Features")
    check_instance(caller, "recipe", recipe, Recipe, "a Recipe")
    check_instance(caller, "checkpoint", checkpoint, (Path, type(None)), "a Path or None")
    check_flag(caller, "progress", progress)
    for name, module in modules.items():
        if is_packed(module):
            raise ValueError(
                f"{caller}: {name} must have weights that are not packed, as no gradient flows through those, got "
                "packed ones"
            )


class Order:
    """Which items each step sees: in every round, shuffled anew, as many whole batches as there are."""

    def __init__(self, caller: str, num_items: int, recipe: Recipe) -> None:
        if num_items == 0:
            raise ValueError(f"{caller}: features must have text to learn from, got none")
        self.num_items, self.recipe = num_items, recipe
        self._round, self._order = -1, torch.empty(0, dtype=torch.int64)

    @staticmethod
    def of_documents(caller: str, features: Features, labels: Tensor, recipe: Recipe) -> Order:
        """Documents are the items; ValueError where none has a token to predict, by `labels`, their ``next_tokens``."""
        return Order(caller, len(features.starts) if bool((labels != IGNORED).any()) else 0, recipe)

    def batch(self, step: int) -> Tensor:
        size = min(self.recipe.batch_size, self.num_items)
        turn, place = divmod(step, self.num_items // size)
        if turn != self._round:
            generator = torch.Generator("cpu").manual_seed((self.recipe.seed * 1_000_003 + turn) % 2**63)
            self._round, self._order = turn, torch.randperm(self.num_items, generator=generator, device="cpu")
        return self._order[place * size : (place + 1) * size]


def fit(
    loss_at: Callable[[int], Tensor],
    groups: Sequence[tuple[list[nn.Parameter], float]],
    modules: dict[str, nn.Module],
    order: Order,
    checkpoint: Path | None,
    progress: bool,
    data: str,
) -> list[float]:
    """Run AdamW on each group of parameters at its own learning rate, from the checkpoint on; a checkpoint that began
    with other weights or other `data` (a digest) is refused. Afterwards no parameter requires gradients.
    """
    recipe = order.recipe
    about = {**asdict(recipe), "items": order.num_items, "data": data, "weights": digest_of(*modules.values())}
    with _trainable(modules):
        optimizer = torch.optim.AdamW([{"params": p, "lr": rate} for p, rate in groups], weight_decay=0.0)
        losses: list[float] = []
        if checkpoint is not None and checkpoint.exists():
            kept = _kept(checkpoint)
            if kept["about"] != about:
                raise ValueError(
                    f"medusa: {checkpoint} must be of {about} (remove it to begin anew), got one of {kept['about']}"
                )
            for name, module in modules.items():
                module.load_state_dict(kept["modules"][name])
            optimizer.load_state_dict(kept["optimizer"])
            losses = kept["losses"]
        bar = tqdm(
            range(len(losses), recipe.steps), "training", recipe.steps, initial=len(losses), mininterval=2.0,
            disable=None if progress else True,
        )  # fmt: skip
        for step in bar:
            for group, (_, rate) in zip(optimizer.param_groups, groups, strict=True):
                group["lr"] = rate * recipe.rate(step)
            optimizer.zero_grad()
            loss = loss_at(step)
            torch.autograd.backward(loss)
            for parameters, _ in groups:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if progress:
                bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            if checkpoint is not None and ((step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.steps):
                _keep(
                    checkpoint,
                    {
                        "about": about,
                        "modules": {name: module.state_dict() for name, module in modules.items()},
                        "optimizer": optimizer.state_dict(),
                        "losses": losses,
                    },
                )
        return losses


@contextmanager
def _trainable(modules: dict[str, nn.Module]) -> Iterator[None]:
    """Within, every parameter requires gradients; afterwards none does, or after an error those that did before."""
    before = [(p, p.requires_grad) for module in modules.values() for p in module.parameters()]
    afterwards = before
    try:
        for parameter, _ in before:
            parameter.requires_grad_(True)
        yield
        afterwards = [(p, False) for p, _ in before]
    finally:
        for parameter, flag in afterwards:
            parameter.requires_grad_(flag)


def _kept(path: Path) -> dict[str, Any]:
    """What `_keep` wrote; ValueError if the file is something else or incomplete."""
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)  # a run may go on on another device
        if not {"about", "modules", "optimizer", "losses"} <= set(kept):
            raise ValueError("it holds something else")
    except (RuntimeError, EOFError, OSError, ValueError, TypeError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"medusa: {path} must be a whole checkpoint (remove it to begin anew), got {why}") from error
    assert isinstance(kept, dict)
    return kept


def _keep(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    write_whole(path, lambda unfinished: torch.save(state, unfinished))


def hidden_of(model: Any, features: Features, documents: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `features` that are in these documents ``[n]``, and the model's last hidden states there."""
    spans = [features.rows_of(d) for d in documents.tolist()]
    ids = nn.utils.rnn.pad_sequence([features.tokens[span] for span in spans], batch_first=True)
    padded = model.base_model(input_ids=ids.to(model.device), use_cache=False)[0]
    hidden = torch.cat([h[: span.stop - span.start] for h, span in zip(padded, spans, strict=True)])
    rows = [torch.arange(span.start, span.stop, device=features.tokens.device) for span in spans]
    return torch.cat(rows), hidden
