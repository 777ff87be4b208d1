"""``specdec medusa train``, ``specdec medusa calibrate`` and ``specdec medusa draft``."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import config
from ..commands import add_target, add_threads, load_target, model_name, read_text
from ..drafters.medusa_heads import MedusaHeads
from ..options import integer, number
from ..tree import DraftTree
from .calibrate import count_accuracy, falling
from .data import Features, digest_of, prepare
from .draft_model import acceptance_of, first_layers, train_draft
from .fitting import Recipe, check_plain_logits
from .train import choose_vocabulary, train_heads, train_jointly

TOKENS = 400_000
DRAFT = Recipe(steps=2400, batch_size=8, learning_rate=3e-3)
HELD_OUT_EVERY = 20
"""Every so many documents, one is held out of training; accuracies are counted there."""
_BACKBONE = "medusa_backbone"
"""Marks the configuration of a backbone that was trained here, as ``draft_token_ids`` marks a draft's."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``train``, ``calibrate`` or ``draft``."""
    arguments = _parser().parse_args(argv)
    report = arguments.run(arguments)
    print(json.dumps(report, indent=1) if arguments.json else arguments.text(report))


def _parser() -> argparse.ArgumentParser:
    size = integer(1, 2**40)
    parser = argparse.ArgumentParser(prog="specdec medusa", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="train | calibrate | draft")
    train = commands.add_parser(
        "train",
        help="write text with the model, and train heads on it; started again, it goes on where it was killed",
    )
    train.set_defaults(run=_train, text=_text)
    calibrate = commands.add_parser("calibrate", help="count how often heads are right, and make a tree of it")
    calibrate.set_defaults(run=_calibrate, text=_text)
    draft = commands.add_parser("draft", help="train a small draft model on the same text; it goes on likewise")
    draft.set_defaults(run=_draft, text=_draft_text)
    draft.add_argument("draft", type=Path, help="folder that the draft model is written to")
    for command in (train, calibrate, draft):
        if command is not draft:
            command.add_argument("heads", type=Path, help="the heads' safetensors file")
        add_target(command)
        command.add_argument(
            "--folder", type=Path, help="of text and checkpoints (default: medusa/MODEL-seedSEED in the cache)"
        )
        had = " (default: as the heads were trained)" if command is calibrate else ""
        command.add_argument("--tokens", type=size, help=f"of text{had or f' (default {TOKENS})'}")
        command.add_argument("--seed", type=integer(0, 2**40), help=f"of the text{had or ' (default 0)'}")
        add_threads(command)
        command.add_argument("--json", action="store_true", help="print what was found as one JSON document instead")
    train.add_argument("--num-heads", type=integer(1, 64), default=4, help="tokens ahead, a head for each (default 4)")
    for command in (train, draft):
        command.add_argument(
            "--vocab", type=integer(2, 2**40), default=8192, help="so many ids are drafted (default 8192)"
        )
    train.add_argument("--separate", action="store_true", help="a W2 for each head, not one for all")
    train.add_argument("--steps", type=size, default=Recipe.steps, help=f"of Medusa-1 (default {Recipe.steps})")
    train.add_argument("--batch", type=size, default=Recipe.batch_size, help=f"tokens (default {Recipe.batch_size})")
    for command, rate in ((train, Recipe.learning_rate), (draft, DRAFT.learning_rate)):
        command.add_argument(
            "--learning-rate", type=number(0, 1e3), default=rate, help=f"the highest, of AdamW (default {rate:g})"
        )
    train.add_argument(
        "--joint-steps", type=integer(0, 2**40), default=0, help="of Medusa-2, after those (default 0: none)"
    )
    train.add_argument("--joint-batch", type=size, default=8, help="documents of such a step (default 8)")
    train.add_argument("--backbone", type=Path, help="folder that Medusa-2 writes the trained backbone to")
    draft.add_argument(
        "--layers",
        type=integer(1, 1000),
        default=2,
        help="of the target, the first of them, that it begins as (default 2)",
    )
    draft.add_argument("--steps", type=size, default=DRAFT.steps, help=f"of training (default {DRAFT.steps})")
    draft.add_argument("--batch", type=size, default=DRAFT.batch_size, help=f"documents (default {DRAFT.batch_size})")
    calibrate.add_argument("--ranks", type=integer(1, 2**30), default=10, help="best tokens of a head (default 10)")
    calibrate.add_argument("--nodes", type=integer(2, 1024), default=16, help="of the tree shown (default 16)")
    return parser


def _text_folder(arguments: argparse.Namespace, card: Mapping[str, Any]) -> Path:
    """The folder of the text; amount and seed, if not given, are those that heads with this card were trained on."""
    if arguments.seed is None:
        arguments.seed = int(card.get("seed", 0))
    if arguments.tokens is None:
        arguments.tokens = int(card.get("tokens", 0)) + int(card.get("tokens held out", 0)) or TOKENS
    name = f"{model_name(arguments).lower()}-seed{arguments.seed}"
    return arguments.folder or config.settings().cache / "medusa" / name


def _features(arguments: argparse.Namespace, model: Any, tokenizer: Any, folder: Path) -> tuple[Features, Features]:
    """Text to train on, and text held out.

    The model writes and reads in bfloat16, twice as fast as in float32 on processors that multiply it: the training
    data are text, and hidden states that are rounded in any case.
    """
    from tqdm.auto import tqdm

    with tqdm(total=arguments.tokens, unit="token", desc="text", mininterval=2.0, disable=None) as bar:
        writer = copy.deepcopy(model).to(torch.bfloat16)
        paths = prepare(writer, tokenizer, folder, arguments.tokens, arguments.seed, advance=bar.update)
    return Features.join([Features.load(path) for path in paths]).split(HELD_OUT_EVERY)


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.joint_steps and arguments.backbone is None:
        raise ValueError("--joint-steps changes the backbone, which needs --backbone, a folder to write it to")
    if arguments.backbone is not None and not arguments.joint_steps:
        raise ValueError("--backbone must be given with --joint-steps, which changes it, got it alone")
    if not arguments.heads.absolute().parent.is_dir():
        raise ValueError(f"{arguments.heads} must be in a folder that is there")
    if arguments.heads.is_dir() or arguments.heads.suffix == ".md":
        raise ValueError(f"{arguments.heads} must be a file, and not the .md that is written beside it")
    if arguments.backbone is not None:
        _check_folder(arguments.backbone, arguments.model, "backbone")
    model, tokenizer = load_target(arguments)
    if arguments.joint_steps:  # which comes after hours
        check_plain_logits("medusa", "model", model)
    folder = _text_folder(arguments, {})
    train, held_out = _features(arguments, model, tokenizer, folder)
    heads = MedusaHeads.of_model(
        model, arguments.num_heads, choose_vocabulary(train, arguments.vocab), not arguments.separate
    )
    rate = arguments.learning_rate
    recipe = Recipe(
        steps=arguments.steps, batch_size=arguments.batch, learning_rate=rate, backbone_learning_rate=rate / 4,
        seed=arguments.seed,
    )  # fmt: skip
    losses = train_heads(heads, train, recipe, _checkpoint(folder, "heads", arguments.heads), progress=True)
    heads.card = _card(heads, arguments, train, held_out, recipe, losses)
    if _BACKBONE in vars(model.config):  # of other heads
        heads.card["backbone"] = getattr(model.config, _BACKBONE)
    if arguments.joint_steps:
        joint = replace(recipe, steps=arguments.joint_steps, batch_size=arguments.joint_batch)
        dtype = model.dtype  # bfloat16 would round small steps away; and heads are float32
        kept = _checkpoint(folder, "joint", arguments.heads)
        losses = train_jointly(model.float(), heads, train, joint, kept, progress=True)
        heads.card["joint"] = {"steps": joint.steps, "documents a step": joint.batch_size, "last loss": losses[-1]}
        heads.card["backbone"] = digest_of(heads)
        setattr(model.config, _BACKBONE, heads.card["backbone"])
        model.to(dtype).save_pretrained(arguments.backbone)
        tokenizer.save_pretrained(arguments.backbone)
    else:  # of the joint kind `calibrate` does it, by the new backbone's hidden states
        heads.accuracy = falling(count_accuracy(heads, held_out, min(10, len(heads.token_map))))
    return _save(heads, arguments.heads)


def _check_folder(path: Path, model: Path | None, kind: str) -> None:
    """Raise where a draft or backbone could not be written, or would take another model's place, before hours go by."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} must be a folder, or not be there")
    if model is not None and path.resolve() == model.resolve():
        raise ValueError(f"{path} must be another folder than --model, whose weights would be lost")
    found = path / "config.json"
    if found.exists():
        try:
            config = json.loads(read_text(found))
        except ValueError as error:
            raise ValueError(f"{found} must be whole JSON (remove {path} to begin anew), got {error}") from error
        holds = "backbone" if _BACKBONE in config else "draft" if "draft_token_ids" in config else "another"
        if holds != kind:
            raise ValueError(f"{path} must hold no model but a {kind} that was trained here: it would be lost")


def _checkpoint(folder: Path, kind: str, output: Path) -> Path:
    """Where a run that makes `output` keeps what it has so far: another one than those of other runs."""
    path = output.resolve()
    return folder / f"{kind}-{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}.checkpoint"


def _draft(arguments: argparse.Namespace) -> dict[str, Any]:
    _check_folder(arguments.draft, arguments.model, "draft")
    model, tokenizer = load_target(arguments)
    check_plain_logits("medusa", "model", model)
    draft = first_layers(model, arguments.layers)
    folder = _text_folder(arguments, {})
    train, held_out = _features(arguments, model, tokenizer, folder)
    recipe = Recipe(
        steps=arguments.steps, batch_size=arguments.batch, learning_rate=arguments.learning_rate, seed=arguments.seed
    )
    head = model.get_output_embeddings().weight
    checkpoint = _checkpoint(folder, "draft", arguments.draft)
    token_map = choose_vocabulary(train, arguments.vocab)
    losses = train_draft(draft, head, train, recipe, token_map, checkpoint, progress=True)
    sampled, greedy = acceptance_of(draft, head, held_out, token_map)
    draft.config.draft_token_ids = token_map.draft_to_target.tolist()
    vars(draft.config).pop(_BACKBONE, None)  # of a target that was trained here, too
    draft.save_pretrained(arguments.draft)
    tokenizer.save_pretrained(arguments.draft)
    return {
        "written": str(arguments.draft),
        "draft ids": len(token_map),
        "parameters": sum(p.numel() for p in draft.parameters()),
        "target's parameters": sum(p.numel() for p in model.parameters()),
        "tokens": train.tokens.numel(),
        "tokens held out": held_out.tokens.numel(),
        "steps": recipe.steps,
        "documents a step": recipe.batch_size,
        "learning rate": recipe.learning_rate,
        "seed": recipe.seed,
        "first loss": losses[0],
        "last loss": sum(losses[-100:]) / len(losses[-100:]),
        "acceptance": sampled,
        "greedy agreement": greedy,
    }


def _draft_text(report: dict[str, Any]) -> str:
    share = report["parameters"] / report["target's parameters"]
    return (
        f"on held-out text: acceptance {report['acceptance']:.3f} at temperature 1, {report['greedy agreement']:.3f} "
        f"greedily\nwritten: {report['written']} ({report['draft ids']} ids, {report['parameters'] / 1e6:.1f} million "
        f"parameters, {share:.0%} "
        "of the target's)"
    )


def _card(
    heads: MedusaHeads, arguments: argparse.Namespace, train: Features, held_out: Features, recipe: Recipe,
    losses: list[float],
) -> dict[str, Any]:  # fmt: skip
    """What a reader of the heads' file wants to know."""
    labels = train.next_tokens()
    predicted = labels >= 0
    distilled = (train.firsts > 0)[train.documents()]  # what follows a prompt the model wrote
    last = losses[-100:]
    return {
        "model": model_name(arguments),
        "text": "self-distilled, and the Python standard library's source",
        "tokens": train.tokens.numel(),
        "tokens predicted": int(predicted.sum()),
        "self-distilled share of those": float(distilled[predicted].double().mean()),
        "tokens held out": held_out.tokens.numel(),
        "heads": heads.num_heads,
        "vocabulary": len(heads.token_map),
        "vocabulary's share of the tokens": float((heads.draft_labels(labels[predicted]) >= 0).double().mean()),
        "shared W2": len(heads.w2) == 1,
        "steps": recipe.steps,
        "tokens a step": recipe.batch_size,
        "learning rate": recipe.learning_rate,
        "seed": recipe.seed,
        "first loss": losses[0],
        f"mean of the last {len(last)} losses": sum(last) / len(last),
    }


def _calibrate(arguments: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_target(arguments)
    heads = MedusaHeads.load(arguments.heads, model)
    if heads.card.get("backbone") != getattr(model.config, _BACKBONE, None):
        raise ValueError(
            f"--model must be the backbone that {arguments.heads} was trained with, got {model_name(arguments)}"
        )
    if arguments.ranks > len(heads.token_map):  # before the text is written, which takes hours
        raise ValueError(f"--ranks must be in [1, {len(heads.token_map)}], the ids drafted, got {arguments.ranks}")
    folder = _text_folder(arguments, heads.card)
    _, held_out = _features(arguments, model, tokenizer, folder)
    heads.accuracy = falling(count_accuracy(heads, held_out, arguments.ranks))
    tree = DraftTree.calibrated(heads.accuracy, arguments.nodes)
    assert tree.ranks is not None
    paths = [tree.ranks[path[path >= 0]].tolist() for path in tree.paths[1:, 1:]]
    return _save(heads, arguments.heads) | {"tree": paths, "expected_accepted_length": tree.expected_accepted_length}


def _save(heads: MedusaHeads, path: Path) -> dict[str, Any]:
    """Write the heads and, beside them, their card for people; returns what to report of them."""
    heads.save(path)
    lines = [f"# Medusa heads of {heads.card.get('model', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in heads.card.items()]
    if heads.accuracy is not None:
        ranks = range(heads.accuracy.shape[1])
        lines += ["", "How often head k's token of each rank is right, on held-out text:", ""]
        lines += ["| head | " + " | ".join(f"rank {i + 1}" for i in ranks) + " |", "|---" * (len(ranks) + 1) + "|"]
        lines += [
            f"| {k} | " + " | ".join(f"{value:.4f}" for value in row) + " |"
            for k, row in enumerate(heads.accuracy.tolist())
        ]
    card = path.with_suffix(".md")
    card.write_text("\n".join(lines) + "\n", encoding="utf-8")
    accuracy = None if heads.accuracy is None else heads.accuracy.tolist()
    return {"written": [str(path), str(card)], "card": heads.card, "accuracy": accuracy}


def _text(report: dict[str, Any]) -> str:
    """The report for people: the accuracies, a line a head, and the tree."""
    lines = []
    if report["accuracy"] is not None:
        ranks = range(1, min(len(report["accuracy"][0]), 5) + 1)
        lines.append("head  " + "  ".join(f"rank {i}" for i in ranks))
        for k, row in enumerate(report["accuracy"]):
            lines.append(f"{k:4}  " + "  ".join(f"{row[i - 1]:6.3f}" for i in ranks))
    if "tree" in report:
        expected = report["expected_accepted_length"]
        lines.append(f"calibrated tree of {len(report['tree']) + 1} nodes: {expected:.3f} accepted tokens expected")
        lines += [f"  {path}" for path in report["tree"]]
    heads, card = report["written"]
    if report["accuracy"] is None:
        lines.append(f"not calibrated: specdec medusa calibrate {heads} --model BACKBONE")
    return "\n".join([*lines, f"written: {heads} and {Path(card).name}"])
