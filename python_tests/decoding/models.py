"""Models small enough to be instant, and what else the tests of the loops share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from specdec_kernels import TokenMap
from specdec_kernels.decoding import DecodingState, Prompt, Runner, StepResult
from specdec_kernels.drafters import Draft, Drafter

VOCAB = 61
FAMILIES = ("llama", "gpt2", "gemma2", "t5")
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": VOCAB,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "initializer_factor": 4.0, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}


AS_THE_DEMO: dict[str, Any] = {
    "hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 1, "tie_word_embeddings": True,
}  # fmt: skip
"""What makes a `tiny` Llama as wide as the demo's model, so that its hidden states and ids fit that model's heads."""


def tiny(model_type: str, seed: int = 0, attention: str | None = None, **changes: Any) -> Any:
    """A random model of a family, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    settings = dict(T5 if model_type in ("t5", "mt5") else SMALL)
    if model_type == "gpt2":
        settings.update(GPT2)
        del settings["max_position_embeddings"]
    if model_type.endswith("moe") or model_type in ("mixtral", "gpt_oss"):
        settings.update(MOE)
    if model_type == "gemma2":
        settings.update(query_pre_attn_scalar=8, sliding_window=6, tie_word_embeddings=False)
    config = AutoConfig.for_model(model_type, **{**settings, **changes})
    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if model_type in ("t5", "mt5") else AutoModelForCausalLM
    model = auto.from_config(config, **({} if attention is None else {"attn_implementation": attention})).eval()
    model.generation_config.assistant_confidence_threshold = 0.0  # as an assistant it goes on, however unsure it is
    if model_type in ("t5", "mt5"):  # as made, they hardly look at what they have written
        model.get_output_embeddings().weight.data.normal_()
        for block in model.decoder.block:
            block.layer[0].SelfAttention.o.weight.data.mul_(6)
        model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_(std=3)
    return model


class TableRunner(Runner):
    """Logits looked up by the last two tokens: their bits do not depend on the rows or sequences beside them."""

    name = "table"

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [vocab, vocab, vocab]: the token before, the last token, the next one
        self.vocab_size = table.shape[0]
        self.device = table.device
        self.forwards: list[int] = []

    @staticmethod
    def random(vocab: int = 23, seed: int = 0, spread: float = 2.0) -> TableRunner:
        return TableRunner(torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * spread)

    def start(self, prompt: Prompt, capacity: int) -> None:
        # Column 0 stands for what is before the first token.
        self.text = torch.zeros(prompt.lengths.numel(), capacity + 1, dtype=torch.int64)

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        self.forwards.append(tokens.shape[1])
        positions = starts[:, None] + torch.arange(tokens.shape[1])
        assert bool((positions < bound).all()) and bool((positions >= 0).all()) and bound < self.text.shape[1]
        self.text.scatter_(1, positions + 1, tokens)
        return self.table[self.text.gather(1, positions), tokens]


class ReadingTable(TableRunner):
    """Reads prompts in the first step."""

    gives_rows = True

    def forward_rows(self, tokens: Tensor, starts: Tensor, bound: int, rows: Tensor) -> Tensor:
        logits = self.forward(tokens, starts, bound)
        assert logits is not None
        return logits.gather(1, rows[:, :, None].expand(-1, -1, logits.shape[2]))


class NarrowTable(TableRunner):
    """The same with logits of some ids alone."""

    def __init__(self, table: Tensor, token_map: TokenMap) -> None:
        super().__init__(table)
        self.vocab_size = len(token_map)
        self.ids = token_map.draft_to_target

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        logits = super().forward(tokens, starts, bound, need_logits)
        assert logits is not None
        return logits[..., self.ids]


def near_table(model: TableRunner) -> TableRunner:
    """A model that is right every other time or so."""
    return TableRunner(model.table + 2 * torch.randn(model.table.shape, generator=torch.Generator().manual_seed(1)))


def near(model_type: str, seed: int, distance: float, **changes: Any) -> Any:
    """A model like ``tiny(model_type, seed, **changes)``, with noise on its weights."""
    model = tiny(model_type, seed, **changes)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * weight.data.std() * distance
    return model


def padded(model: Any, vocab: int) -> Any:
    """The model with a vocabulary of another size: some of the last ids cut, or more behind them."""
    model.resize_token_embeddings(vocab, mean_resizing=False)
    return model


def unlike_pair(model_type: str) -> tuple[Any, Any]:
    """A target and a draft that agree at some places, neither very sure of anything."""
    target, draft = tiny(model_type, 1), near(model_type, 1, 0.15)
    if model_type == "t5":
        for model in (target, draft):
            model.get_output_embeddings().weight.data.mul_(0.25)
    return target, draft


def full_law(model: Any, prompt: Tensor, text: list[int]) -> Tensor:
    """``[len(text) + 1, vocab]`` float64: a model's own laws of each token of `text` after `prompt`, and of the one
    after them, by one forward.
    """
    with torch.inference_mode():
        if model.config.model_type == "t5":
            decoder = torch.tensor([[model.generation_config.decoder_start_token_id, *text]])
            logits = model(prompt[None], decoder_input_ids=decoder).logits[0]
        else:
            logits = model(torch.tensor([prompt.tolist() + text])).logits[0, len(prompt) - 1 :]
    law: Tensor = logits.double().softmax(-1)
    return law


def prompts(*lengths: int, vocab: int = VOCAB, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, left-padded with an id that must not matter, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), 3 % vocab)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, ids.shape[1] - length :] = torch.randint(3 % vocab, vocab, (length,), generator=generator)
        mask[row, ids.shape[1] - length :] = 1
    return ids, mask


class RepeatLast(Drafter):
    """The example of `Drafter`'s documentation."""

    def start(self, state: DecodingState) -> None: ...

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        return Draft(state.last_tokens().expand(-1, num_tokens))

    def commit(self, state: DecodingState, result: StepResult) -> None: ...


def texts(out: sk.decoding.GenerationOutput) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(out.tokens, out.num_tokens.tolist(), strict=True)]


class TooMany(RepeatLast):
    """Proposes a token more than it is asked for."""

    def propose(self, state: DecodingState, num_tokens: int) -> Draft:
        return super().propose(state, num_tokens + 1)


class HostSyncs(torch.overrides.TorchFunctionMode):
    """Counts what makes the host wait for a device, or would."""

    NAMES = frozenset(
        "item tolist cpu numpy nonzero masked_select unique argwhere __bool__ __int__ __float__ __index__ "
        "__array__".split()
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in self.NAMES:
            self.seen.append(name)
        if name in ("__getitem__", "__setitem__", "index_put_"):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices):
                self.seen.append("boolean index")
        return func(*args, **(kwargs or {}))


class CapturableTable(ReadingTable):
    """Works on the values of its tensors alone, and counts how often it is called."""

    capturable = True

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        self.forwards.append(tokens.shape[1])
        positions = starts[:, None] + torch.arange(tokens.shape[1])
        assert bound < self.text.shape[1]
        self.text.scatter_(1, positions + 1, tokens)
        before = self.text.gather(1, positions).masked_fill(positions >= bound, 0)  # what lies there is not seen
        return self.table[before, tokens]


class Letters:
    """A tokenizer with one token a character."""

    pad_token_id = eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [3 + ord(letter) % 50 for letter in text]
