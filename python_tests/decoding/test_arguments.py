"""What `generate` refuses, before any work."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import specdec_kernels as sk
from python_tests.decoding.models import VOCAB, ReadingTable, TableRunner, prompts, tiny
from specdec_kernels.ops.arguments import ACCEPTANCES

IDS = torch.tensor([[3, 4, 5], [3, 6, 7]])


class Half:
    """A streamer that cannot be told of the end."""

    step = 3

    def put(self, value: object) -> None: ...
    def __call__(self, rows: object) -> None: ...


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be an int64 or int32 tensor, got list"),
        ({"input_ids": IDS.float()}, TypeError, "input_ids must be an int64 or int32 tensor, got torch.float32"),
        ({"input_ids": IDS[0]}, ValueError, r"input_ids must be \[batch >= 1, prompt >= 1\], got \[3\]"),
        ({"input_ids": IDS[:, :0]}, ValueError, r"input_ids must be \[batch >= 1, prompt >= 1\], got \[2, 0\]"),
        ({"input_ids": IDS + 20}, ValueError, r"input_ids must be in \[0, vocab=23\), got 23 … 27"),
        ({"input_ids": IDS - 9}, ValueError, r"input_ids must be in \[0, vocab=23\), got -6"),
        ({"attention_mask": IDS[:, :2]}, ValueError, r"attention_mask must be \[batch=2, prompt=3\], got \[2, 2\]"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, ValueError, "row 1 is empty"),
        (
            {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
            ValueError,
            "must pad on the left .* row 0 does not",
        ),
        ({"drafter": None}, TypeError, r"drafter must be a Drafter \(NoDrafter\(\) for none\), got NoneType"),
        ({"sampling": 0.7}, TypeError, "sampling must be a SamplingParams, got float"),
        (
            {"sampling": sk.SamplingParams(torch.ones(3))},
            ValueError,
            r"sampling.temperature must be \[batch=2\], got \[3\]",
        ),
        ({"seeds": torch.ones(2)}, TypeError, "seeds must be an int64 tensor, got torch.float32"),
        ({"seeds": torch.ones(3, dtype=torch.int64)}, ValueError, r"seeds must be \[batch=2\], got \[3\]"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be in"),
        ({"return_logprobs": 21}, ValueError, r"return_logprobs must be in \[0, 20\], got 21"),
        ({"return_logprobs": True}, TypeError, "return_logprobs must be an integer, got bool"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer, got float"),
        ({"num_speculative_tokens": 65}, ValueError, r"num_speculative_tokens must be in \[0, 64\], got 65"),
        (
            {"num_speculative_tokens": "many"},
            ValueError,
            "num_speculative_tokens must be an integer, 'auto' or a CostTable, got 'many'",
        ),
        ({"acceptance": "typical"}, ValueError, f"acceptance must be one of {', '.join(ACCEPTANCES)}, got 'typical'"),
        ({"target_law": object()}, TypeError, "generate: target_law must be None or one of sk.laws, got object"),
        ({"target_law": sk.laws.Lossy(0.1), "acceptance": "block"}, ValueError, "generate: acceptance='block' takes"),
        (
            {"target_law": sk.laws.Chow(0.1)},
            ValueError,
            r"target_law needs a drafter that gives logits, as ModelDrafter, got NoDrafter: Chow\(alpha=0.1",
        ),
        ({"eos_token_id": 23}, ValueError, r"eos_token_id must be in \[0, vocab=23\), got 23"),
        ({"eos_token_id": [1, -1]}, ValueError, r"eos_token_id must be in \[0, vocab=23\), got -1"),
        ({"eos_token_id": "</s>"}, TypeError, "eos_token_id must be an integer or several, got str"),
        ({"eos_token_id": 2.0}, TypeError, "eos_token_id must be an integer or several, got float"),
        ({"eos_token_id": [1, True]}, TypeError, "eos_token_id must be an integer or several, got list"),
        ({"num_speculative_tokens": np.array([1, 2])}, TypeError, "num_speculative_tokens must be an integer, got nd"),
        ({"num_speculative_tokens": np.array("auto")}, TypeError, "num_speculative_tokens must be an integer, got nd"),
        (
            {"streamer": Half(), "input_ids": IDS[:1]},
            TypeError,
            "streamer must have put and end, or step, or be callable, got Half",
        ),
        ({"streamer": 3}, TypeError, "streamer must have put and end, or step, or be callable, got int"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    target = TableRunner.random()
    arguments = {"input_ids": IDS, "drafter": sk.NoDrafter(), "max_new_tokens": 4, **changes}
    before = arguments["input_ids"].clone() if isinstance(arguments["input_ids"], torch.Tensor) else None
    with pytest.raises(kind, match=message):
        sk.generate(target, arguments.pop("input_ids"), **arguments)
    assert target.forwards == []
    if before is not None and "input_ids" not in changes:
        assert torch.equal(before, IDS)


@pytest.mark.parametrize("eos", [3, [3, 3], np.int64(3), np.array(3), torch.tensor(3), torch.tensor([3]), iter([3])])
def test_ids_that_end_a_text_may_be_any_integers(eos: Any) -> None:
    target = TableRunner(torch.eye(23)[3].expand(23, 23, 23).clone())
    out = sk.generate(target, IDS, drafter=sk.NoDrafter(), sampling=sk.SamplingParams(0.0), eos_token_id=eos)
    assert out.tokens.tolist() == [[3]] * len(IDS)


@pytest.mark.parametrize(
    ("family", "rows", "message"),
    [
        ("llama", [[5, 6, 7], [0, 6, 7]], r"rows begin with the padding id 0 \(.*got None, and row 1 does"),
        ("t5", [[5, 6, 0], [4, 6, 7]], r"rows begin or end with the padding id 0 \(.*got None, and row 0 does"),
    ],
)
def test_padded_ids_need_their_mask(family: str, rows: list[list[int]], message: str) -> None:
    """Without it the padding would be decoded as text."""
    target, ids = tiny(family), torch.tensor(rows)
    given: dict[str, Any] = {"drafter": sk.NoDrafter(), "max_new_tokens": 4, "sampling": sk.SamplingParams(0.0)}
    with pytest.raises(ValueError, match=f"generate: attention_mask must be given where {message}"):
        sk.generate(target, ids, **given)
    masked = sk.generate(target, ids, attention_mask=(ids != 0).long(), **given)
    short = next(b for b, row in enumerate(rows) if 0 in row)
    alone = sk.generate(target, ids[short : short + 1, ids[short] != 0], **given)
    assert torch.equal(masked.tokens[short, : alone.tokens.shape[1]], alone.tokens[0])
    sk.generate(target, ids, attention_mask=torch.ones_like(ids), **given)  # it counts as a token
    if family == "llama":
        ids[1] = torch.tensor([6, 0, 7])
        sk.generate(target, ids, **given)  # inside it is one


def test_a_drafter_serves_one_call_at_a_time() -> None:
    """In another thread, and from within its own call; when that is left, by an error or not, the next may have it."""
    drafter, target, other = sk.NgramDrafter(), TableRunner.random(), TableRunner.random()
    given: dict[str, Any] = {"max_new_tokens": 6, "seeds": torch.tensor([1, 2])}
    expected = sk.generate(target, IDS, drafter=drafter, **given).tokens
    refused: list[str] = []

    def attempt(runner: TableRunner, drafter: sk.Drafter) -> None:
        try:
            sk.generate(runner, IDS, drafter=drafter, **given)
        except ValueError as error:
            refused.append(str(error))

    def during(_: object) -> None:
        attempt(other, drafter)
        for shared in ((other, drafter), (target, sk.NgramDrafter()), (other, sk.NgramDrafter())):
            thread = threading.Thread(target=attempt, args=shared)
            thread.start()
            thread.join()
        raise KeyError("of a streamer")

    with pytest.raises(KeyError):
        sk.generate(target, IDS, drafter=drafter, streamer=during, **given)
    message = "generate: {} that another call is using: give each call one of its own".format
    in_use = message("drafter serves one call at a time, got a NgramDrafter")
    assert refused == [in_use, in_use, message("model serves one call at a time, got a TableRunner")]
    assert torch.equal(sk.generate(target, IDS, drafter=drafter, **given).tokens, expected)


def test_a_grammar_serves_one_call_at_a_time() -> None:
    """It follows the texts of one; calls without a grammar are none of its business."""

    class Even(sk.Grammar):
        def fill(self, rows: torch.Tensor, drafts: Any) -> None:
            rows[...] = 0x55555555

        def commit(self, tokens: Any) -> None: ...

    grammar, refused = Even(), 0

    def again(_: object) -> None:
        nonlocal refused
        given: dict[str, Any] = {"drafter": sk.NoDrafter(), "max_new_tokens": 2}
        sk.generate(TableRunner.random(), IDS, **given)
        sk.generate(TableRunner.random(), IDS, grammar=Even(), **given)
        with pytest.raises(ValueError, match="^generate: grammar serves one call at a time, got a Even that another"):
            sk.generate(TableRunner.random(), IDS, grammar=grammar, **given)
        refused += 1

    given: dict[str, Any] = {"drafter": sk.NgramDrafter(), "grammar": grammar, "max_new_tokens": 4}
    sk.generate(TableRunner.random(), IDS, streamer=again, **given)
    assert refused > 0
    sk.generate(TableRunner.random(), IDS, **given)


def test_a_progress_bar_that_cannot_be_shown_is_an_error_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = TableRunner.random(), TableRunner.random()
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ModuleNotFoundError, match="^generate: progress=True needs tqdm, which is not installed$"):
        sk.generate(target, IDS, drafter=sk.ModelDrafter(draft), progress=True)
    assert target.forwards == draft.forwards == []


@pytest.mark.parametrize("where", ["start", "propose"])
def test_a_drafter_that_failed_may_be_used_again(where: str) -> None:
    class Failing(sk.NgramDrafter):
        fails = True

    def fail(self: Failing, *given: Any) -> Any:
        if self.fails:
            raise KeyError(where)
        return getattr(sk.NgramDrafter, where)(self, *given)

    setattr(Failing, where, fail)
    drafter, target = Failing(), TableRunner.random()
    with pytest.raises(KeyError):
        sk.generate(target, IDS, drafter=drafter)
    drafter.fails = False
    assert sk.generate(target, IDS, drafter=drafter, max_new_tokens=3).num_tokens.tolist() == [3, 3]


def test_a_streamer_takes_one_sequence() -> None:
    class Streamer:
        def put(self, value: object) -> None: ...
        def end(self) -> None: ...

    with pytest.raises(ValueError, match="takes a batch of 1, got 2 sequences; pass a callable"):
        sk.generate(TableRunner.random(), IDS, drafter=sk.NoDrafter(), streamer=Streamer())


def refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sk.generate(model, IDS, drafter=sk.NoDrafter())
    with pytest.raises(ValueError, match=message.replace("generate", "ModelDrafter")):
        sk.ModelDrafter(model)


def test_models_that_cannot_be_served_are_refused_by_name() -> None:
    from transformers import BertConfig, BertModel, MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB, state_size=4)).eval()
    refused(mamba, "generate: MambaForCausalLM cannot be served: model type 'mamba' is not among")
    bert = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    refused(bert.eval(), "generate: BertModel cannot be served: model type 'bert' is not among")
    refused(tiny("llama").model, "generate: LlamaModel cannot be served: it has no language-model head")
    headless = tiny("llama")
    headless.lm_head = torch.nn.Sequential(headless.lm_head)
    refused(headless, "LlamaForCausalLM cannot be served: its language-model head has no weight .vocab, hidden.")
    rough = tiny("llama")
    rough.model = torch.ao.quantization.quantize_dynamic(rough.model, {torch.nn.Linear})
    refused(rough, "its layers are quantised dynamically: a row's logits would depend on the rows beside it")
    refused(torch.nn.Linear(2, 2), "Linear cannot be served: it is neither a transformers model nor a")
    refused(tiny("llama").train(), "LlamaForCausalLM cannot be served: it is in training mode; call model.eval")
    refused(tiny("llama").double(), "its dtype is torch.float64; float32, bfloat16 and float16 are verified")
    refused(tiny("gpt2", add_cross_attention=True), "a decoder with cross attention needs an encoder's states")
    spread = tiny("llama")
    places = [
        SimpleNamespace(device=torch.device(name), dtype=torch.float32, is_floating_point=lambda: True)
        for name in ("cuda:1", "cuda:0", "meta")
    ]
    spread.parameters = lambda: iter(places)
    refused(spread, "LlamaForCausalLM cannot be served: its layers are on several devices: cuda:0, cuda:1")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    refused(tiny("llama", rope_parameters=dynamic), "rotary embedding of type dynamic changes with the length")
    flex = tiny("llama")
    flex.config._attn_implementation = "flex_attention"
    refused(flex, "attention implementation 'flex_attention' takes no additive mask; load it with 'sdpa' or 'eager'")


def test_draft_and_target_must_fit() -> None:
    table = TableRunner.random()
    with pytest.raises(ValueError, match="drafter must have a Runner of its own, got the target's"):
        sk.generate(table, IDS, drafter=sk.ModelDrafter(table))
    target = tiny("llama")
    ids, _ = prompts(4)
    other = sk.ModelDrafter(tiny("llama", vocab_size=50))
    with pytest.raises(
        ValueError, match=r"must share one tokenizer, but the target's vocabulary has 61 ids and the draft's"
    ):
        sk.generate(target, ids, drafter=other)
    with pytest.raises(ValueError, match="must both be decoders, or both encoder-decoders"):
        sk.generate(target, ids, drafter=sk.ModelDrafter(tiny("t5")))
    with pytest.raises(ValueError, match=r"the draft \(GPT2LMHeadModel\) holds 32 positions, 44 are needed"):
        sk.generate(target, ids, drafter=sk.ModelDrafter(tiny("gpt2", n_positions=32)), max_new_tokens=40)
    two = sk.ModelDrafter(tiny("llama", 1), sk.SamplingParams(torch.ones(2)))
    with pytest.raises(ValueError, match=r"generate: drafter.sampling.temperature must be \[batch=1\], got \[2\]"):
        sk.generate(target, ids, drafter=two)
    narrow = sk.ModelDrafter(TableRunner.random(8), token_map=sk.TokenMap(torch.arange(9)))
    message = r"the draft's token_map must be of its 8 logits and hold ids < vocab=61, got 9 ids up to 8"
    with pytest.raises(ValueError, match=message):
        sk.generate(target, ids, drafter=narrow)
    with pytest.raises(ValueError, match="ModelDrafter: token_map must hold ids < vocab=61, got 61"):
        sk.ModelDrafter(target, token_map=sk.TokenMap(torch.tensor([0, 61])))
    with pytest.raises(ValueError, match="ModelTreeDrafter: token_map must hold ids < vocab=61, got 61"):
        sk.ModelTreeDrafter(target, token_map=sk.TokenMap(torch.tensor([0, 61])))
    with pytest.raises(TypeError, match="ModelDrafter: token_map must be a TokenMap or None, got list"):
        sk.ModelDrafter(target, token_map=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ModelDrafter: sampling must be a SamplingParams or None, got float"):
        sk.ModelDrafter(target, 0.5)


class Wrong(ReadingTable):
    """A table that gives something else than a `Runner` must."""

    name = "Wrong"

    def __init__(self, change: Any, reads: bool) -> None:
        super().__init__(TableRunner.random().table)
        self.change, self.gives_rows = change, reads

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        logits = super().forward(tokens, starts, bound, need_logits)
        return self.change(logits) if need_logits and not self.gives_rows else logits

    def forward_rows(self, tokens: Tensor, starts: Tensor, bound: int, rows: Tensor) -> Tensor:
        return self.change(super().forward_rows(tokens, starts, bound, rows))


WRONG_LOGITS = {
    "padded": (
        lambda x: torch.nn.functional.pad(x, (0, 9)),
        r"logits must be \[batch=2, n=\d, vocab_size=23\], got .*32\]",
    ),
    "narrow": (lambda x: x[..., :20], r"logits must be \[batch=2, n=\d, vocab_size=23\], got .*20\]"),
    "too few": (lambda x: x[:, :-1], r"logits must be \[batch=2, n=\d, vocab_size=23\], got .*, 23\]"),
    "none": (lambda x: None, "logits must be a tensor, got NoneType"),
    "double": (lambda x: x.double(), "logits must be float32 or bfloat16 or float16, got float64"),
}


@pytest.mark.parametrize("wrong", WRONG_LOGITS)
@pytest.mark.parametrize("whose", ["the target's", "the target's first", "the draft's"])
def test_what_a_runner_gives_is_checked(whose: str, wrong: str) -> None:
    change, message = WRONG_LOGITS[wrong]
    runner, method = Wrong(change, whose == "the target's first"), "forward"
    target, drafter = runner, sk.NgramDrafter()
    if whose == "the draft's":
        target, drafter = TableRunner.random(), sk.ModelDrafter(runner)
    elif runner.gives_rows:
        method = "forward_rows"
    with pytest.raises((TypeError, ValueError), match=rf"^Wrong\.{method}: {message}"):
        sk.generate(target, IDS, drafter=drafter, num_speculative_tokens=3)


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    ("size", "value", "message"),
    [
        ("num_nodes", np.int64(7), r"must be an integer, got NumPy's int64 \(int\(\) converts it\)"),
        ("num_nodes", 2000, r"must be in \[1, 1024\], got 2000"),
        ("max_depth", 0, r"must be in \[1, 64\], got 0"), ("max_depth", None, "must be an integer, got NoneType"),
    ],
)  # fmt: skip
def test_a_tree_drafter_s_sizes_are_checked(size: str, value: Any, message: str, seeded: bool) -> None:
    drafter = sk.NgramTreeDrafter()
    setattr(drafter, size, value)
    with pytest.raises((TypeError, ValueError), match=rf"^generate: drafter\.{size} {message}"):
        sk.generate(tiny("llama"), IDS, drafter=drafter, seeds=torch.arange(2) if seeded else None)


def test_learned_positions_end() -> None:
    target = tiny("gpt2", n_positions=32)
    ids, mask = prompts(12, 5)
    with pytest.raises(ValueError, match="GPT2LMHeadModel holds 32 positions, but prompt and max_new_tokens need 33"):
        sk.generate(target, ids, drafter=sk.NoDrafter(), max_new_tokens=21)
    full = sk.generate(
        target, ids, attention_mask=mask, drafter=sk.ModelDrafter(target), max_new_tokens=20, num_speculative_tokens=8,
        sampling=sk.SamplingParams(0.0), eos_token_id=[],
    )  # fmt: skip
    own = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert torch.equal(full.sequences, own)


def test_rotary_positions_end_where_the_model_was_trained_to() -> None:
    ids, mask = prompts(12, 5)
    short = {"attention_mask": mask, "drafter": sk.NgramDrafter(), "eos_token_id": []}
    with pytest.raises(ValueError, match="LlamaForCausalLM holds 32 positions, but prompt and max_new_tokens need 33"):
        sk.generate(tiny("llama", max_position_embeddings=32), ids, max_new_tokens=21, **short)
    out = sk.generate(tiny("llama", max_position_embeddings=32), ids, max_new_tokens=20, **short)
    assert out.sequences.shape == (2, 32)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    out = sk.generate(
        tiny("llama", max_position_embeddings=32, rope_parameters=scaled), ids, max_new_tokens=30, **short
    )
    assert out.sequences.shape == (2, 42)


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ({"n": 0}, ValueError, r"n must be in \[1, 64\], got 0"),
        ({"n": 65}, ValueError, r"n must be in \[1, 64\], got 65"),
        ({"n": 2, "min_n": 3}, ValueError, r"min_n must be in \[1, 2\], got 3"),
        ({"n": 2.5}, TypeError, "n must be an integer, got float"),
    ],
)
def test_ngram_drafter_refuses_bad_lengths(bad: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^NgramDrafter: {message}"):
        sk.NgramDrafter(**bad)
