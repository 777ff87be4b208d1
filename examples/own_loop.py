"""A model of your own under `sk.generate`: Llama in plain torch, with a key-value cache of its own and packed weights.

``python examples/own_loop.py`` (or with ``bfloat16``, or ``compile``) decodes with the demo's model, plainly and with
lookup, and prints the time of a step. `sk.generate` needs a `Runner` with `start` and `forward`; for trees also
`forward_tree` and `keep_path`, and to read the prompt in the first step `forward_rows`.
"""

from __future__ import annotations

import os

# Worker threads that spin for microseconds, not forever: threads that sleep at once are woken 121 times a step.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import functools
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

import specdec_kernels as sk
from specdec_kernels.decoding import Prompt, Runner

LEAST_ROWS = 4
"""oneDNN multiplies fewer by another kernel, no faster, which rounds differently."""


def packs(weight: Tensor) -> bool:
    """Whether oneDNN packs such weights here: 16-bit ones need a processor with instructions for them."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return weight.dtype not in supported or bool(supported[weight.dtype]())


class Linear:
    """``x @ weight.T``; on a CPU with weights laid out in advance, which serve eight rows nearly as fast as one."""

    def __init__(self, *weights: Tensor) -> None:
        self.weight = torch.cat(weights)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None) if packs(self.weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return linear(x, self.weight)
        missing = max(LEAST_ROWS - len(x), 0)
        rows = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")[: len(x)]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def gate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return silu(first) * second


BETWEEN: dict[str, Callable[..., Tensor]] = {"norm": norm, "rotate": rotate, "gate": gate}
"""What lies between matrix products and attention."""


class Layer:
    """One transformer block: fused projections, and its keys and values, ``[batch * capacity, heads, head_dim]``."""

    def __init__(self, block: Any, config: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.qkv = Linear(*(proj.weight for proj in (attention.q_proj, attention.k_proj, attention.v_proj)))
        self.out, self.down = Linear(attention.o_proj.weight), Linear(mlp.down_proj.weight)
        self.gate_up = Linear(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.norms = block.input_layernorm.weight, block.post_attention_layernorm.weight
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
        self.keys = self.values = torch.empty(0)

    def __call__(self, do: Any, x: Tensor, rotation: tuple[Tensor, Tensor], rows: Tensor, mask: Tensor) -> Tensor:
        """``[batch * n, hidden]`` to the same, for n new tokens of each sequence; `rows` are their cache rows."""
        batch, _, n, visible = mask.shape
        qkv = self.qkv(do.norm(x, self.norms[0])).view(len(x), -1, self.dim)
        q_and_k, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        q, k = do.rotate(q_and_k, *rotation).split((self.heads, self.kv_heads), 1)
        self.keys.index_copy_(0, rows, k)
        self.values.index_copy_(0, rows, v)
        seen = (buffer.unflatten(0, (batch, -1))[:, :visible] for buffer in (self.keys, self.values))
        keys, values = (rows.transpose(1, 2) for rows in seen)
        q = q.view(batch, n, self.heads, self.dim).transpose(1, 2)
        mixed = scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(len(x), -1))
        return x + self.down(do.gate(self.gate_up(do.norm(x, self.norms[1]))))


class LeanLlama(Runner):
    """Any number of sequences, each with its own length.

    Parameters
    ----------
    model : LlamaForCausalLM
        The model whose weights are used, in its dtype.
    compile : bool
        Let torch.compile fuse what lies between the matrix products.
    ids : ``[n]`` int64, optional
        Give logits of these ids only, as a draft with a `TokenMap` does.
    """

    name = "LeanLlama"
    takes_trees = gives_rows = True

    def __init__(self, model: Any, compile: bool = False, ids: Tensor | None = None) -> None:
        config, backbone = model.config, model.model
        head = model.lm_head.weight if ids is None else model.lm_head.weight[ids]
        if config.attention_bias or config.mlp_bias:
            raise ValueError("LeanLlama: model must be without biases, got one with some")
        self.device, self.dtype, self.vocab_size = model.device, model.dtype, len(head)
        ends = model.generation_config.eos_token_id  # an id, several, or none
        self.end_ids = () if ends is None else tuple(torch.tensor(ends).reshape(-1).tolist())
        self.max_length = config.max_position_embeddings
        self.embedding, self.norm = backbone.embed_tokens.weight, backbone.norm.weight
        with torch.inference_mode():
            self.layers = [Layer(block, config) for block in backbone.layers]
            self.head = Linear(head)
            positions = torch.arange(self.max_length, device=self.device)[None]
            cos, sin = backbone.rotary_emb(self.embedding, positions)  # [1, positions, head_dim]
        self.rotation = cos[0], sin[0]
        do = {name: torch.compile(f, dynamic=True) if compile else f for name, f in BETWEEN.items()}
        self.do = SimpleNamespace(**do | {"norm": functools.partial(do["norm"], eps=config.rms_norm_eps)})

    def start(self, prompt: Prompt, capacity: int) -> None:
        self.batch, self.capacity = len(prompt.lengths), capacity
        for layer in self.layers:
            shape = self.batch * capacity, layer.kv_heads, layer.dim
            layer.keys, layer.values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))

    def forward(self, tokens: Tensor, starts: Tensor, bound: int, need_logits: bool = True) -> Tensor | None:
        x = self.run_text(tokens, starts, bound)
        return self.logits(x, tokens.shape) if need_logits else None

    def forward_rows(self, tokens: Tensor, starts: Tensor, bound: int, rows: Tensor) -> Tensor:
        x = self.run_text(tokens, starts, bound)
        first = tokens.shape[1] * torch.arange(self.batch, device=self.device)[:, None]
        return self.logits(x[(first + rows).flatten()], rows.shape)

    def forward_tree(self, tokens: Tensor, starts: Tensor, tree: sk.DraftTree, bound: int) -> tuple[Tensor, None]:
        rows = starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        mask = tree.attention_mask(starts, self.visible(bound))
        return self.logits(self.run(tokens, starts[:, None] + tree.position_ids, rows, mask), tokens.shape), None

    def keep_path(self, accepted_nodes: Tensor, starts: Tensor) -> None:
        to = starts[:, None] + torch.arange(1, accepted_nodes.shape[1] + 1, device=self.device)
        source = torch.where(accepted_nodes < 0, to, starts[:, None] + accepted_nodes)
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                buffer.index_copy_(0, self.places(to), buffer[self.places(source)])

    def visible(self, bound: int) -> int:
        """Rows of the cache that attention reads."""
        return min(-(-bound // 64) * 64, self.capacity)

    def places(self, rows: Tensor) -> Tensor:
        """Where the `rows` of each sequence, ``[batch, n]``, lie in the cache: ``[batch * n]``."""
        return (rows + self.capacity * torch.arange(self.batch, device=self.device)[:, None]).flatten()

    def run_text(self, tokens: Tensor, starts: Tensor, bound: int) -> Tensor:
        # Rejected tokens need no rollback: their rows are overwritten before any token can see them.
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=self.device)
        mask = torch.arange(self.visible(bound), device=self.device) <= positions[:, None, :, None]
        return self.run(tokens, positions, positions, mask)

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        cos, sin = (table[positions.flatten().clamp(max=len(table) - 1), None] for table in self.rotation)
        x, places = self.embedding[tokens.flatten()], self.places(rows)
        for layer in self.layers:
            x = layer(self.do, x, (cos, sin), places, mask)
        return x

    def logits(self, x: Tensor, shape: torch.Size) -> Tensor:
        return self.head(self.do.norm(x, self.norm)).view(*shape, -1)

    def finish(self) -> None:
        for layer in self.layers:
            layer.keys = layer.values = torch.empty(0)


def main(arguments: list[str]) -> None:
    from specdec_kernels import assets
    from specdec_kernels.assets import prompts

    model, tokenizer = assets.load_model()
    if "bfloat16" in arguments:
        model = model.bfloat16()
    runner = LeanLlama(model, compile="compile" in arguments)
    texts = prompts.load_prompts("code-edit", tokenizer, 2)
    for drafter in (sk.NoDrafter(), sk.NgramDrafter()):
        for text in texts:
            ids, _ = prompts.encode(tokenizer, [text])
            out = sk.generate(runner, ids, drafter=drafter, sampling=sk.SamplingParams(0.0), max_new_tokens=64)
            steps = out.stats.target_forwards - 1  # the first one is prefill, as it reads the prompt
            milliseconds = 1e3 * out.stats.seconds_decode / steps
            print(f"{type(drafter).__name__}: {milliseconds:.1f} ms a step, {out.stats.tokens_per_second:.1f} tokens/s")
    with torch.inference_mode():
        runner.start(Prompt(ids, torch.tensor([ids.shape[1]]), [ids[0].numpy()]), 256)
        for n in (1, 2, 4, 8):
            times = []
            for _ in range(20):
                began = time.perf_counter()
                runner.forward(ids[:, :n], torch.tensor([100]), 100 + n)
                times.append(time.perf_counter() - began)
            print(f"{n} rows: {1e3 * sorted(times)[10]:.1f} ms")


if __name__ == "__main__":
    if {*sys.argv[1:]} - {"bfloat16", "compile"}:
        sys.exit(__doc__)
    main(sys.argv[1:])
