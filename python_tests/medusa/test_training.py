"""Data, losses, training and calibration of Medusa's heads, on models that are instant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from python_tests.decoding.models import SMALL, tiny
from python_tests.medusa.models import HIDDEN, Letters, formula, patterned, random_heads, wide
from specdec_kernels.medusa import (
    Document,
    Features,
    MedusaHeads,
    Recipe,
    acceptance_of,
    choose_vocabulary,
    count_accuracy,
    data,
    distillation_loss,
    draft_model,
    extract,
    falling,
    first_layers,
    heads_weight,
    lm_loss,
    medusa1_loss,
    prepare,
    train,
    train_draft,
    train_heads,
    train_jointly,
)
from specdec_kernels.medusa.fitting import hidden_of

VOCAB = SMALL["vocab_size"]


def documents(*lengths: int, first: int = 0, vocab: int = VOCAB, seed: int = 0) -> list[Document]:
    random = np.random.default_rng(seed)
    return [Document(random.integers(3, vocab, n), min(first, n)) for n in lengths]


# --- data -------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_those_of_each_text_alone() -> None:
    model = tiny("llama")
    texts = documents(9, 4, 13, 1, first=2)
    features = extract(model, texts, batch_size=3)
    assert features.starts.tolist() == [0, 9, 13, 26] and features.firsts.tolist() == [2, 2, 2, 1]
    for i, text in enumerate(texts):
        with torch.inference_mode():
            alone = model(torch.from_numpy(text.tokens)[None], output_hidden_states=True).hidden_states[-1][0]
        rows = features.rows_of(i)
        torch.testing.assert_close(features.hidden[rows].float(), alone, rtol=2e-3, atol=2e-3)
        assert features.tokens[rows].tolist() == text.tokens.tolist()


def test_labels_are_the_tokens_after_the_next() -> None:
    texts = [Document(np.array([10, 11, 12, 13, 14]), first=3), Document(np.array([20, 21, 22]))]
    none = data.IGNORED
    features = extract(tiny("llama"), texts)
    assert features.labels(3).tolist() == [
        [none, 13, 14], [13, 14, none], [14, none, none], [none] * 3, [none] * 3,
        [22, none, none], [none] * 3, [none] * 3,
    ]  # fmt: skip
    assert features.next_tokens().tolist() == [none, none, 13, 14, none, 21, 22, none]


def test_labels_are_what_greedy_decoding_goes_on_with() -> None:
    """The indexing, against `generate`: head k at token t is to say the token t + k + 2."""
    model, prompt = tiny("llama"), torch.tensor([[4, 9, 30]])
    out = sk.generate(model, prompt, drafter=sk.NoDrafter(), sampling=sk.SamplingParams(0.0), max_new_tokens=6, eos_token_id=[])  # noqa: E501  # fmt: skip
    text = out.sequences[0]
    features = extract(model, [Document(text.numpy(), first=3)])
    with torch.inference_mode():
        said = model.get_output_embeddings()(features.hidden.float()).argmax(-1)
    assert torch.equal(said[2:-1], text[3:])  # the LM head's word is the next token
    assert features.labels(2)[2].tolist() == text[4:6].tolist()


def test_the_default_device_does_not_matter() -> None:
    model = tiny("llama")
    features, head = extract(model, patterned(12)), model.get_output_embeddings().weight
    order = train.Order("test", 12, Recipe(steps=3, batch_size=4))

    def made() -> list[torch.Tensor]:
        return [
            features.labels(3), features.next_tokens(), features.documents(), features.split(3)[1].tokens,
            order.batch(0), order.batch(3), *hidden_of(model, features, torch.tensor([5, 2], device="cpu")),
            torch.tensor(acceptance_of(model, head, features), device="cpu"),
        ]  # fmt: skip

    expected = made()
    with torch.device("meta"):
        assert all(map(torch.equal, made(), expected))


def test_features_survive_files_joining_and_splitting(tmp_path: Path) -> None:
    model = tiny("llama")
    parts = [extract(model, documents(5, 8, first=1, seed=s)) for s in range(3)]
    for i, part in enumerate(parts):
        part.save(tmp_path / f"{i}.safetensors")
    joined = Features.join([Features.load(tmp_path / f"{i}.safetensors") for i in range(3)])
    assert torch.equal(joined.labels(2), torch.cat([p.labels(2) for p in parts]))
    kept, out = joined.split(3)
    assert len(kept.starts) == 4 and len(out.starts) == 2
    assert torch.equal(out.labels(2)[:5], parts[1].labels(2)[:5]) and torch.equal(out.hidden[5:], parts[2].hidden[5:])
    assert torch.equal(kept.hidden, torch.cat([parts[0].hidden, parts[1].hidden[5:], parts[2].hidden[:5]]))
    with pytest.raises(ValueError, match="every must be <= documents=6, got 7"):
        joined.split(7)


class FakeSeeds:
    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.seed = seed

    def prompts(self, model: Any, shard: int) -> list[str]:
        return [f"{self.seed} {shard}"]

    def source(self, shard: int) -> list[Document]:
        return documents(10, seed=100 + shard)


def test_preparing_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def distill(model: Any, tokenizer: Any, prompts: list[str], seed: int) -> list[Document]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(prompts[0])
        return documents(7, seed=seed)

    monkeypatch.setattr(data, "Seeds", FakeSeeds)
    monkeypatch.setattr(data, "distill", distill)
    whole = prepare(tiny("llama"), Letters(), tmp_path / "whole", 30)
    assert made == ["0 0", "0 1", "0 2"] and [data.num_tokens_of(p) for p in whole] == [7, 7, 10, 7]
    made.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare(tiny("llama"), Letters(), tmp_path / "stopped", 100)
    made.clear()
    steps: list[int] = []
    again = prepare(tiny("llama"), Letters(), tmp_path / "stopped", 30, advance=steps.append)
    assert made == [] and steps == [7, 7, 10, 7]
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(Features.load(a).hidden, Features.load(b).hidden)


def test_self_distilled_text_is_the_models_own() -> None:
    model, beginnings = tiny("llama"), ["abcdef", "xyz", "kl", "m", "q"]
    made = data.distill(model, Letters(), beginnings, seed=5)  # type: ignore[arg-type]
    assert [d.first for d in made] == [6, 3, 2, 1, 1]
    for text, document in zip(beginnings, made, strict=True):
        assert document.tokens[: document.first].tolist() == Letters().encode(text)
    for i in (place for place in range(4) if data.temperature_of(place) == 0):
        prompt = torch.tensor([Letters().encode(beginnings[i])])
        new = sk.generate(model, prompt, drafter=sk.NoDrafter(), sampling=sk.SamplingParams(0.0), max_new_tokens=160)
        assert made[i].tokens.tolist() == new.sequences[0].tolist()
    again = data.distill(model, Letters(), beginnings, seed=5)  # type: ignore[arg-type]
    other = data.distill(model, Letters(), beginnings, seed=6)  # type: ignore[arg-type]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(made, again, strict=True))
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(made, other, strict=True))


@pytest.mark.long
@pytest.mark.model
def test_seeds_of_the_real_model_leave_the_benchmarks_out() -> None:
    from specdec_kernels import assets
    from specdec_kernels.assets import prompts

    _, tokenizer = assets.load_model()
    seeds = data.Seeds(tokenizer)
    beginnings, questions = seeds.prompts(None, 0), seeds.prompts(None, 1)
    assert len(beginnings) == len(questions) == 32 and all(q.endswith("<|im_start|>assistant\n") for q in questions)
    measured = [p for name in ("code-edit", "humaneval", "chat") for p in prompts.load_prompts(name, tokenizer)]
    bodies = {p.split("```python\n")[1].split("```")[0] for p in measured if "```python\n" in p}
    everything = {whole for _, whole in seeds._functions}
    assert len(bodies) == 80 and not any(body.strip() in whole for body in bodies for whole in everything)
    for shard in (0, 1, 40):
        pieces = seeds.source(shard)
        assert 20 < len(pieces) <= 32 and all(2 < len(d.tokens) <= data.MAX_DOCUMENT for d in pieces)


def test_seeds_are_documented_functions() -> None:
    source = 'def f(x):\n    """Doc."""\n    return x\n\n\ndef g(x):\n    return x\n\n\ndef h():\n    """Only doc."""\n'
    assert data._functions(source) == [('def f(x):\n    """Doc."""\n', 'def f(x):\n    """Doc."""\n    return x\n')]
    for apart in ("\x0c\n", "x = '\x0b\x85'\n"):  # which end a line to `str.splitlines`, and none to Python
        assert data._functions(apart + source) == data._functions(source)
    assert data._functions("def (") == []


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_medusa1_loss_is_the_formulas(shared: bool, rng: torch.Generator) -> None:
    heads = random_heads(shared=shared)
    hidden = torch.randn(40, HIDDEN, generator=rng)
    labels = torch.randint(0, VOCAB, (40, 3), generator=rng)
    labels[::3] = torch.tensor([5, 60, 17])
    labels[5] = -100
    logits = formula(heads, hidden)
    laws = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    places = {int(i): n for n, i in enumerate(heads.token_map.draft_to_target)}
    want = []
    for k in range(3):
        known = [(t, places[int(label)]) for t, label in enumerate(labels[:, k]) if int(label) in places]
        want.append(-np.mean([laws[t, k, v] for t, v in known]))
    loss, each = medusa1_loss(heads, hidden, labels)
    np.testing.assert_allclose(each.numpy(), want, rtol=1e-4)
    assert float(loss.detach()) == pytest.approx(want[0] + 0.8 * want[1] + 0.64 * want[2], rel=1e-5)


def test_a_head_without_a_label_adds_nothing(rng: torch.Generator) -> None:
    heads = random_heads()
    labels = torch.tensor([[5, -100, 3], [2, -100, 3]])  # 3 is not in the vocabulary
    loss, each = medusa1_loss(heads, torch.randn(2, HIDDEN, generator=rng), labels)
    assert each[1:].tolist() == [0.0, 0.0] and float(loss.detach()) == pytest.approx(float(each[0]))
    loss.backward()
    assert bool(torch.isfinite(heads.w1.weight.grad).all())


def test_backbone_losses_are_the_formulas(rng: torch.Generator) -> None:
    p, q = torch.randn(2, 6, 9, generator=rng, dtype=torch.float64)
    labels = torch.tensor([3, -100, 0, 8, -100, 1])
    counted = [0, 2, 3, 5]
    kl = [sum(math.exp(a) * (a - b) for a, b in zip(p[i].log_softmax(-1), q[i].log_softmax(-1), strict=True)) for i in counted]  # noqa: E501  # fmt: skip
    ce = [-q[i].log_softmax(-1)[labels[i]] for i in counted]
    assert float(distillation_loss(p, q, labels)) == pytest.approx(float(sum(kl)) / 4, rel=1e-5)
    assert float(lm_loss(q, labels)) == pytest.approx(float(sum(ce)) / 4, rel=1e-5)
    assert float(distillation_loss(p, p, labels)) == pytest.approx(0, abs=1e-6)
    never, now = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 1.0]], requires_grad=True)
    loss = distillation_loss(never, now, labels[:1])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(1 + math.e)) and bool(torch.isfinite(now.grad).all())


def test_the_heads_weight_ramps_up() -> None:
    assert [heads_weight(s, 4, 0.2) for s in (0, 1, 4, 9)] == [0, 0.05, 0.2, 0.2]
    assert heads_weight(0, 0, 0.2) == 0.2


def test_learning_rates_warm_up_and_decay() -> None:
    recipe = Recipe(steps=100, warm_up_steps=10)
    rates = [recipe.rate(s) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] and rates[99] < 1e-3
    assert recipe.learning_rate == 4 * recipe.backbone_learning_rate


# --- training ---------------------------------------------------------------------------------------------------------


def trainable(features: Features) -> MedusaHeads:
    return MedusaHeads.of_model(tiny("llama"), 2, choose_vocabulary(features, 12))


SHORT = Recipe(steps=90, batch_size=32, learning_rate=2e-2, warm_up_steps=5, checkpoint_every=7, seed=3)


def test_heads_learn_and_a_seed_gives_the_same_losses() -> None:
    features = extract(tiny("llama"), patterned(16))
    heads = trainable(features)
    before = count_accuracy(heads, features, 1)
    losses = train_heads(heads, features, SHORT)
    assert losses[-1] < 0.2 * losses[0] and count_accuracy(heads, features, 1).min() > 0.95 > before.max()
    assert train_heads(trainable(features), features, SHORT) == losses
    other = Recipe(**{**vars(SHORT), "seed": 4})
    assert train_heads(trainable(features), features, other) != losses


class Killed(Exception):
    pass


@pytest.mark.parametrize("what", ["heads", "heads and backbone", "draft model"])
def test_a_killed_run_goes_on_to_the_same_losses(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(steps=20, batch_size=4, warm_up_steps=5, ramp_steps=8, checkpoint_every=6)
    features = extract(tiny("llama"), patterned(12))

    def run(checkpoint: Path | None, recipe: Recipe = recipe) -> tuple[list[float], torch.Tensor]:
        if what == "draft model":
            draft, head = tiny("llama", 1, num_hidden_layers=1), tiny("llama").get_output_embeddings().weight
            losses = train_draft(draft, head, features, recipe, checkpoint=checkpoint)
            return losses, draft.get_output_embeddings().weight
        model, heads = tiny("llama"), trainable(features)
        if what == "heads":
            return train_heads(heads, features, recipe, checkpoint), heads.w1.weight
        return train_jointly(model, heads, features, recipe, checkpoint), heads.w1.weight

    losses, weight = run(None)
    steps = 0
    module, name = (draft_model, "distillation_loss") if what == "draft model" else (train, "medusa1_loss")
    real = getattr(module, name)

    def dying(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 15:
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(module, name, dying)
    path = tmp_path / "run.checkpoint"
    with pytest.raises(Killed):
        run(path)
    assert torch.load(path, weights_only=True)["losses"] == losses[:12]
    steps = 100
    again, resumed = run(path)
    assert again == losses and steps == 100 + 8  # only what was left was done again
    assert torch.equal(weight, resumed)
    with pytest.raises(ValueError, match=r"run.checkpoint must be of .*'seed': 1"):
        run(path, Recipe(**{**vars(recipe), "seed": 1}))


def test_a_run_of_another_device_goes_on_here(tmp_path: Path) -> None:
    """Its checkpoint says of its tensors that they were on a device, which need not be there."""
    features, recipe, kept = extract(tiny("llama"), patterned(6)), Recipe(steps=3, batch_size=6), tmp_path / "kept"
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        losses = train_heads(trainable(features), features, recipe, kept)
    heads = trainable(features)
    before = heads.w1.weight.clone()
    assert train_heads(heads, features, recipe, kept) == losses and not torch.equal(heads.w1.weight, before)


def test_joint_training_keeps_the_backbone_near_the_original() -> None:
    """From the original on, the KL term is 0 and its pull grows with the distance; without it the text pulls."""
    features = extract(tiny("llama"), patterned(12))

    def moved(distilled: bool) -> float:
        model = tiny("llama")
        recipe = Recipe(steps=15, batch_size=6, warm_up_steps=1, ramp_steps=0, distilled=distilled)
        train_jointly(model, trainable(features), features, recipe)
        with torch.inference_mode():
            ids = features.tokens[:20][None]
            rows = tiny("llama")(ids).logits[0], model(ids).logits[0]
        return float(distillation_loss(*rows, features.tokens[:20]))

    assert moved(True) < 0.2 * moved(False)


def test_joint_losses_begin_at_the_formulas() -> None:
    features = extract(tiny("llama"), patterned(6))
    recipe = Recipe(steps=1, batch_size=6, ramp_steps=0, final_heads_weight=0.2, distilled=False)
    heads = trainable(features)
    with torch.inference_mode():
        logits = tiny("llama").get_output_embeddings()(features.hidden.float())
        want = lm_loss(logits, features.next_tokens()) + 0.2 * medusa1_loss(heads, features.hidden.float(), features.labels(2))[0]  # noqa: E501  # fmt: skip
    model = tiny("llama")
    assert train_jointly(model, heads, features, recipe)[0] == pytest.approx(float(want), rel=2e-3)  # float16 states
    assert not model.training and not next(model.parameters()).requires_grad


@pytest.mark.parametrize("still", ["learning_rate", "backbone_learning_rate"])
def test_heads_and_backbone_have_learning_rates_of_their_own(still: str) -> None:
    features = extract(tiny("llama"), patterned(6))
    model, heads = tiny("llama"), trainable(features)
    before = [p.clone() for module in (heads, model) for p in module.parameters()]
    train_jointly(model, heads, features, Recipe(steps=2, batch_size=6, ramp_steps=0, **{still: 0.0}))  # type: ignore[arg-type]
    after = [p for module in (heads, model) for p in module.parameters()]
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    mine = len(list(heads.parameters()))
    of_heads, of_backbone = any(moved[:mine]), any(moved[mine:])
    assert (of_heads, of_backbone) == (still != "learning_rate", still != "backbone_learning_rate")


def test_an_error_leaves_gradients_to_those_that_had_them(tmp_path: Path) -> None:
    """Here a checkpoint of another recipe's."""
    features, kept = extract(tiny("llama"), patterned(6)), tmp_path / "kept.pt"
    train_jointly(tiny("llama"), trainable(features), features, Recipe(steps=1, batch_size=6), kept)
    model, heads = tiny("llama").requires_grad_(False), trainable(features)
    next(heads.parameters()).requires_grad_(False)
    before = [p.requires_grad for module in (model, heads) for p in module.parameters()]
    with pytest.raises(ValueError, match="must be of"):
        train_jointly(model, heads, features, Recipe(steps=2, batch_size=6), kept)
    assert [p.requires_grad for module in (model, heads) for p in module.parameters()] == before


# --- a draft model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_draft_model_begins_as_the_targets_first_layers(name: str) -> None:
    target = tiny(name, num_hidden_layers=3)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    whole, draft = first_layers(target, 3), first_layers(target, 2)
    ids = torch.tensor([[5, 9, 7]])
    with torch.inference_mode():
        torch.testing.assert_close(whole(ids).logits, target(ids).logits)
        states, of_draft = (each(ids, output_hidden_states=True).hidden_states for each in (target, draft))
        assert len(of_draft) == 3
        torch.testing.assert_close(of_draft[:2], states[:2])  # the last one has been through the last norm
    for parameter in draft.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items())
    with pytest.raises(ValueError, match=r"first_layers: num_layers must be in \[1, 3\], got 4"):
        first_layers(target, 4)
    with pytest.raises(TypeError, match="first_layers: model must be a transformers model, got int"):
        first_layers(3)


def test_what_cannot_be_trained_is_refused() -> None:
    """Packed weights, which no gradient reaches; a model of another dtype or hidden size than its heads."""
    features, recipe = extract(tiny("llama"), patterned(6)), Recipe(steps=1, batch_size=6)
    model, heads = tiny("llama"), trainable(features)
    head = model.get_output_embeddings().weight
    calls: dict[str, tuple[Any, Any]] = {
        "train_heads: heads": (heads, lambda: train_heads(heads, features, recipe)),
        "train_jointly: model": (model, lambda: train_jointly(model, heads, features, recipe)),
        "train_jointly: heads": (heads, lambda: train_jointly(model, heads, features, recipe)),
        "train_draft: draft": (model, lambda: train_draft(model, head, features, recipe)),
    }
    for name, (packed, call) in calls.items():
        with sk.pack_linear_weights(packed), pytest.raises(ValueError, match=f"{name} must have weights that are not"):
            call()
        call()
    message = "train_jointly: model must be float32, as heads are, got bfloat16"
    with pytest.raises(ValueError, match=message):
        train_jointly(tiny("llama").bfloat16(), heads, features, recipe)
    with pytest.raises(ValueError, match="train_jointly: model must have hidden_size=32, as heads have, got 128"):
        train_jointly(wide(), heads, features, recipe)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_draft_model_learns_the_targets_distribution(narrow: bool) -> None:
    target = wide(initializer_range=0.1)
    head = target.get_output_embeddings().weight
    features = extract(target, patterned(24))
    token_map = choose_vocabulary(features, 9) if narrow else None
    draft = first_layers(target, 1)
    before = acceptance_of(draft, head, features, token_map, batch_size=7)
    losses = train_draft(
        draft, head, features, Recipe(steps=150, batch_size=8, warm_up_steps=5, learning_rate=1e-2), token_map
    )
    after = acceptance_of(draft, head, features, token_map)
    assert losses[-1] < 0.2 * losses[0] and after[0] > before[0]

    ids = torch.arange(VOCAB) if token_map is None else token_map.draft_to_target
    with torch.inference_mode():
        rows = (model(features.tokens[:20][None]).logits[0, :-1] for model in (target, draft))
        wanted, given = (row.softmax(-1) for row in rows)
    given = given[:, ids] / given[:, ids].sum(-1, keepdim=True)
    one = extract(target, patterned(1))
    mean = torch.minimum(wanted[:, ids], given).sum(-1).mean()
    agreeing = (wanted.argmax(-1) == ids[given.argmax(-1)]).double().mean()
    assert acceptance_of(draft, head, one, token_map) == pytest.approx((float(mean), float(agreeing)), abs=5e-3)


def test_training_a_draft_model_refuses_what_does_not_fit() -> None:
    target = wide()
    head, features = target.get_output_embeddings().weight, extract(target, patterned(3))
    draft = first_layers(target, 1)
    with pytest.raises(ValueError, match=r"train_draft: head must be \[vocab=61, hidden=128\], got \[60, 128\]"):
        train_draft(draft, head[1:], features, Recipe(steps=1))
    with pytest.raises(ValueError, match="acceptance_of: token_map must hold ids < vocab=61, got 61"):
        acceptance_of(draft, head, features, sk.TokenMap(torch.tensor([0, 61])))
    with pytest.raises(ValueError, match="acceptance_of: features must have tokens to predict, got none"):
        acceptance_of(draft, head, extract(target, documents(1)))


# --- calibration ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_the_most_frequent_labels() -> None:
    texts = [Document(np.array([50, 7, 7, 7, 5, 5, 9])), Document(np.array([8, 8, 8, 8, 9]), first=4)]
    features = extract(tiny("llama"), texts)
    assert choose_vocabulary(features, 2).draft_to_target.tolist() == [5, 7]
    assert choose_vocabulary(features, 99).draft_to_target.tolist() == [5, 7, 9]


def test_accuracy_is_what_counting_gives() -> None:
    heads = random_heads(2)
    texts = documents(15, 6, first=2, vocab=VOCAB)
    for text in texts:
        text.tokens[::2] = 17  # in the vocabulary
    features = extract(tiny("llama"), texts)
    best = heads.top_tokens(features.hidden, 4)
    want = np.zeros((2, 4))
    for k in range(2):
        counted = 0
        for d, text in enumerate(texts):
            for t in range(len(text.tokens)):
                if t + k + 2 < len(text.tokens) and t + k + 2 >= text.first:
                    counted += 1
                    row = best[features.rows_of(d)][t, k].tolist()
                    want[k] += [token == text.tokens[t + k + 2] for token in row]
        want[k] /= counted
    assert want.sum() > 0
    np.testing.assert_allclose(count_accuracy(heads, features, 4, batch_size=5).numpy(), want)


def test_accuracies_fall_for_the_tree() -> None:
    table = falling(torch.tensor([[0.5, 0.1, 0.2], [0.4, 0.4, 0.0]], dtype=torch.float64))
    assert table.tolist() == [[0.5, 0.1, 0.1], [0.4, 0.4, 0.0]]
    assert sk.DraftTree.calibrated(table, 4).num_nodes == 4


def test_calibration_needs_text() -> None:
    features = extract(tiny("llama"), documents(3))
    with pytest.raises(ValueError, match="a token for each of 3 heads"):
        count_accuracy(random_heads(3), features, ranks=2)
    with pytest.raises(ValueError, match=r"ranks must be in \[1, vocab_draft=6\], got 7"):
        count_accuracy(random_heads(1), features, ranks=7)


def test_text_of_another_model_or_seed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else heads would be trained on what another model wrote."""
    monkeypatch.setattr("specdec_kernels.medusa.data.Seeds", lambda *_: None)
    prepare(tiny("llama"), Letters(), tmp_path, 0)
    prepare(tiny("llama"), Letters(), tmp_path, 0)
    for other in ({"model": tiny("llama", 1)}, {"seed": 1}, {"tokenizer": Others()}):
        given = {"model": tiny("llama"), "tokenizer": Letters(), "folder": tmp_path, "num_tokens": 0, **other}
        with pytest.raises(ValueError, match="prepare: folder must hold text of .* take another one"):
            prepare(**given)
    (tmp_path / "text.json").unlink()
    (tmp_path / "shard-00000.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="prepare: folder must be empty or say in text.json"):
        prepare(tiny("llama"), Letters(), tmp_path, 0)
    with pytest.raises(ValueError, match="shard-00000.safetensors must be a whole shard"):
        data.num_tokens_of(tmp_path / "shard-00000.safetensors")


class Others(Letters):
    """Knows another letter."""

    def get_vocab(self) -> dict[str, int]:
        return {"b": 3}


@pytest.mark.parametrize("other", ["weights", "shape", "text", "ids"])
def test_a_checkpoint_of_something_else_is_refused(other: str, tmp_path: Path) -> None:
    """Of another model's heads, of other heads, of another text, and of a draft for other ids."""
    kept, recipe = tmp_path / "kept", Recipe(steps=1, batch_size=6)
    features = extract(tiny("llama"), patterned(6))
    if other == "ids":
        head = tiny("llama").get_output_embeddings().weight
        for count in (20, 10):
            arguments = (first_layers(tiny("llama"), 1), head, features, recipe, sk.TokenMap(torch.arange(count)), kept)
            if count == 20:
                train_draft(*arguments)
        refused, fitted = train_draft, arguments
    else:
        train_heads(trainable(features), features, recipe, kept)
        heads = trainable(features)
        if other == "weights":
            next(heads.parameters()).data.add_(1.0)
        if other == "shape":
            heads = MedusaHeads.of_model(tiny("llama"), 3, heads.token_map)
        if other == "text":
            features = extract(tiny("llama", 1), patterned(6))
        refused, fitted = train_heads, (heads, features, recipe, kept)
    with pytest.raises(ValueError, match=r"kept must be of .* \(remove it to begin anew\), got one of"):
        refused(*fitted)
