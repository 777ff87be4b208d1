"""gather_kv_ on every backend: what a copy aside and back gives, and not a byte elsewhere."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer, StaticCache

import specdec_kernels as sk
from python_tests import emulated
from python_tests.ops.inputs import refuses, same_bits
from python_tests.support import Backend, environment
from specdec_kernels.integrations.transformers.cache import RaggedCache

OP = "gather_kv_"
PATHS = {"accepted_nodes": torch.tensor([[2, 3, 5], [1, 4, -1]]), "context_lengths": torch.tensor([4, 0])}
SIGNATURE = (["cache", "accepted_nodes", "context_lengths", "layout"], ["block_table", "backend"])
CALLS = {
    "": lambda: {"cache": [(torch.rand(2, 3, 12, 8), torch.rand(2, 3, 12, 6))], **PATHS},
    "bloom": lambda: {
        "cache": [torch.rand(6, 8, 12), torch.rand(6, 12, 8)], "layout": ("(bh)ds", "(bh)sd"), **PATHS,
    },
    "paged": lambda: {
        "cache": [torch.rand(7, 2, 4, 3, 8)], "layout": "n2shd", **PATHS,
        "block_table": torch.tensor([[3, 0, 5], [1, 6, 2]], dtype=torch.int32),
    },
}  # fmt: skip
EXAMPLES = 120
DTYPES = (
    torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float16, torch.bool, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip
SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {  # of n blocks or sequences, h heads, s rows, d elements
    "bhsd": lambda n, h, s, d: (n, h, s, d),
    "sbhd": lambda n, h, s, d: (s, n, h, d),
    "bshd": lambda n, h, s, d: (n, s, h, d),
    "(bh)ds": lambda n, h, s, d: (n * h, d, s),
    "(bh)sd": lambda n, h, s, d: (n * h, s, d),
    "bsd": lambda n, h, s, d: (n, s, d),
    "bhs": lambda n, h, s, d: (n, h, s),
    "l2bhsd": lambda n, h, s, d: (3, 2, n, h, s, d),
    "bhs2d": lambda n, h, s, d: (n, h, s, 2, d),
    "nshd": lambda n, h, s, d: (n, s, h, d),
    "nhsd": lambda n, h, s, d: (n, h, s, d),
    "2nshd": lambda n, h, s, d: (2, n, s, h, d),
    "n2shd": lambda n, h, s, d: (n, 2, s, h, d),
    "n2hsd": lambda n, h, s, d: (n, 2, h, s, d),
    "nsd": lambda n, h, s, d: (n, s, d),
}
ROWS: dict[str, Callable[..., Tensor]] = {  # all that stands at row s of block or sequence n
    "bhsd": lambda t, n, h, s: t[n, :, s],
    "sbhd": lambda t, n, h, s: t[s, n],
    "bshd": lambda t, n, h, s: t[n, s],
    "(bh)ds": lambda t, n, h, s: t[n * h : (n + 1) * h, :, s],
    "(bh)sd": lambda t, n, h, s: t[n * h : (n + 1) * h, s],
    "bsd": lambda t, n, h, s: t[n, s],
    "bhs": lambda t, n, h, s: t[n, :, s],
    "l2bhsd": lambda t, n, h, s: t[:, :, n, :, s],
    "bhs2d": lambda t, n, h, s: t[n, :, s],
    "nshd": lambda t, n, h, s: t[n, s],
    "nhsd": lambda t, n, h, s: t[n, :, s],
    "2nshd": lambda t, n, h, s: t[:, n, s],
    "n2shd": lambda t, n, h, s: t[n, :, s],
    "n2hsd": lambda t, n, h, s: t[n, :, :, s],
    "nsd": lambda t, n, h, s: t[n, s],
}
DENSE: list[Any] = [name for name in SHAPES if "n" not in name] + [("(bh)ds", "(bh)sd"), ("bhsd", "bshd")]
PAGED: list[Any] = [name for name in SHAPES if "n" in name]


@dataclass
class Case:
    """A cache whose tensors lie anywhere in `memory`, and a step on it."""

    memory: list[Tensor]  # bytes
    views: list[Callable[[Tensor], Tensor]]  # from the bytes to the tensor
    layout: Any
    heads: int
    accepted_nodes: Tensor
    context_lengths: Tensor
    block_table: Tensor | None

    def run(self, backend: Any, together: Callable[[list[Tensor]], Any] = list) -> tuple[list[Tensor], sk.GatherOutput]:
        """The bytes after the step, and what it returned, on the CPU."""
        memory = [backend(m.clone()) for m in self.memory]
        cache = together([view(m) for view, m in zip(self.views, memory, strict=True)])
        out = backend.gather_kv_(
            cache, backend(self.accepted_nodes), backend(self.context_lengths), self.layout,
            block_table=backend(self.block_table),
        )  # fmt: skip
        return [m.cpu() for m in memory], sk.GatherOutput(out.lengths.cpu(), out.status.cpu())

    def expected(self) -> tuple[list[Tensor], sk.GatherOutput]:
        """The same, a row at a time: all copies are taken before any is written."""
        memory = [m.clone() for m in self.memory]
        tensors = [view(m) for view, m in zip(self.views, memory, strict=True)]
        layouts = [self.layout] * 2 if isinstance(self.layout, str) else self.layout
        letters = [layouts[i % 2].replace("(bh)", "b") for i in range(len(tensors))]
        rows = min(t.shape[k.index("s")] for t, k in zip(tensors, letters, strict=True))
        blocks = min((t.shape[k.index("n")] for t, k in zip(tensors, letters, strict=True) if "n" in k), default=0)
        table = None if self.block_table is None else self.block_table.tolist()
        capacity = rows if table is None else rows * self.block_table.shape[1]  # type: ignore[union-attr]
        lengths, status, writes = [], [], []

        def find(b: int, position: int) -> tuple[int, int] | None:
            if table is None:
                return b, position
            block = table[b][position // rows]
            return (block, position % rows) if 0 <= block < blocks else None

        for b, (nodes, context) in enumerate(
            zip(self.accepted_nodes.tolist(), self.context_lengths.tolist(), strict=True)
        ):
            status.append(sk.Status.BAD_PARAM if context >= capacity else sk.Status.OK)
            if not 0 <= context < capacity:
                lengths.append(context)
                continue
            followed, last = 0, 0
            for node in nodes:
                if node == -1:
                    break
                source = target = None
                if last < node < capacity - context:
                    source, target = find(b, context + node), find(b, context + 1 + followed)
                if source is None or target is None:
                    status[-1] = sk.Status.BAD_TREE
                    break
                for i, tensor in enumerate(tensors):
                    row = functools.partial(ROWS[layouts[i % 2]], tensor)
                    writes.append(
                        (row(target[0], self.heads, target[1]), row(source[0], self.heads, source[1]).clone())
                    )
                followed, last = followed + 1, node
            lengths.append(context + 1 + followed)
        for at, copy in writes:
            at.copy_(copy)
        return memory, sk.GatherOutput(
            torch.tensor(lengths, dtype=self.context_lengths.dtype),
            torch.tensor([int(s) for s in status], dtype=torch.int32),
        )


def make(
    seed: int, layout: Any, dtype: torch.dtype, batch: int = 2, heads: int = 2, rows: int = 9, dim: int = 8,
    tensors: int = 2, depth: int = 4, dense: bool = True, bad: bool = False, other: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """A random case. Not `dense`: every dimension strided, at any offset. `bad`: some values are out of range."""
    rng, bits = random.Random(seed), torch.Generator().manual_seed(seed)
    layouts = [layout] * 2 if isinstance(layout, str) else layout
    paged = "n" in layouts[0]
    if "h" not in "".join(layouts):
        heads = 1
    max_blocks = rng.randint(1, 3) if paged else 1
    blocks = batch * max_blocks + rng.randint(0, 2) if paged else batch
    capacity = rows * max_blocks
    memory, views = [], []
    for i in range(tensors):
        shape = SHAPES[layouts[i % 2]](blocks, heads, rows, dim)
        kind = other if other is not None and i % 2 else dtype
        steps = [1 if dense else rng.choice([1, 1, 2]) for _ in shape]
        whole = [n * s + (0 if dense else rng.choice([0, 0, 1, 3])) for n, s in zip(shape, steps, strict=True)]
        first = 0 if dense else rng.randint(0, 3)
        count = first + torch.Size(whole).numel()
        memory.append(
            torch.randint(0, 2 if kind == torch.bool else 256, (count * kind.itemsize,), generator=bits).byte()
        )

        slices = tuple(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True))

        def view(m: Tensor, kind: Any = kind, whole: Any = whole, slices: Any = slices, first: int = first) -> Tensor:
            return m.view(kind)[first:].view(whole)[slices]

        views.append(view)
    table = None
    if paged:
        order = rng.sample(range(blocks), batch * max_blocks)
        table = torch.tensor(order, dtype=rng.choice([torch.int32, torch.int64])).view(batch, max_blocks)
        if bad and rng.random() < 0.5:
            table[rng.randrange(batch), rng.randrange(max_blocks)] = rng.choice([-1, blocks, 2**31 - 1])
    accepted, contexts = torch.full((batch, depth), -1), []
    for b in range(batch):
        context = rng.choice([-1, 0, rng.randrange(capacity), rng.randrange(capacity)])
        room = min(capacity - context, 70) if context >= 0 else 9
        path = sorted(rng.sample(range(1, max(room, 1)), min(rng.randint(0, depth), room - 1)))
        if rng.random() < 0.3:  # in place at first, as in a chain
            path = [*range(1, len(path) // 2 + 1), *path[len(path) // 2 :]] if path else path
        accepted[b, : len(path)] = torch.tensor(sorted(set(path)) + [-1] * (len(path) - len(set(path))))
        if bad and rng.random() < 0.6 and depth:
            accepted[b, rng.randrange(depth)] = rng.choice([-2, 0, 1, room, capacity, 2**31 - 1, 2**63 - 1, -(2**63)])
        if bad and rng.random() < 0.3:
            context = rng.choice([capacity, capacity + 1, 2**31 - 1, -5, capacity - 1])
        contexts.append(context)
    lengths = torch.tensor(contexts, dtype=rng.choice([torch.int32, torch.int64]))
    return Case(memory, views, layout, heads, accepted, lengths, table)


cases = st.fixed_dictionaries({
    "layout": st.sampled_from(DENSE + PAGED),
    "dtype": st.sampled_from(DTYPES),
    "other": st.sampled_from([None, None, *DTYPES]),
    "batch": st.integers(1, 4),
    "heads": st.integers(1, 3),
    "rows": st.sampled_from([1, 2, 4, 9, 16, 40]),
    "dim": st.sampled_from([8, 1, 3, 5, 16, 24]),
    "tensors": st.sampled_from([2, 4, 6]),
    "depth": st.sampled_from([4, 0, 1, 2, 7, 9, 33, 70]),
    "dense": st.booleans(),
    "bad": st.booleans(),
    "seed": st.integers(0, 2**31),
})  # fmt: skip


def test_is_a_copy_aside_and_back(backend: Backend) -> None:
    """Every layout and dtype, paths that overlap, values out of range: the same bytes, lengths and status."""

    @settings(max_examples=EXAMPLES // 4 if backend.by_interpreter else EXAMPLES)
    @given(drawn=cases)
    def check(drawn: dict[str, Any]) -> None:
        case = make(**drawn)
        same_bits(list(case.run(backend)), list(case.expected()))

    check()


@pytest.mark.parametrize("layout", [*DENSE, *PAGED], ids=str)
def test_every_layout(backend: Backend, layout: Any) -> None:
    case = make(1, layout, torch.bfloat16, batch=3, heads=2, rows=12, dim=8, tensors=4)
    case.context_lengths, case.accepted_nodes = torch.tensor([0, 2, 5]), path(3, [1, 3, 4, 6])
    memory, out = case.expected()
    assert out.lengths.tolist() == [5, 7, 10] and not torch.equal(memory[3], case.memory[3])
    same_bits(list(case.run(backend)), [memory, out])


def path(batch: int, nodes: list[int]) -> Tensor:
    return torch.tensor([nodes] * batch)


@pytest.mark.parametrize("depth", [1, 4, 31, 32, 33, 64, 100])
def test_every_row_goes_down_by_a_few(backend: Backend, depth: int) -> None:
    """Each destination is the source of a later row: the hardest overlap, over all windows of a path."""
    for shift in (1, 2, 5):
        memory = torch.arange(2 * 110 * 4, dtype=torch.uint8).view(-1)
        case = Case(
            [memory], [lambda m: m.view(torch.float32).view(2, 1, 110, 1)], "bhsd", 1,
            path(2, list(range(1 + shift, 1 + shift + depth))), torch.tensor([0, 3]), None,
        )  # fmt: skip
        same_bits(list(case.run(backend)), list(case.expected()))


def test_wide_rows_and_many_planes(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than a block has threads, more tensors and shapes than a launch takes."""
    if backend.name == "triton":
        monkeypatch.setattr(importlib.import_module("specdec_kernels.backends.triton.gather_kv_"), "MOST_PLANES", 5)
    case = make(5, "bhsd", torch.float32, batch=2, heads=3, rows=9, dim=400, tensors=3, depth=4)
    same_bits(list(case.run(backend)), list(case.expected()))
    count = 40 if backend.name == "triton" else 300
    case = make(6, "bhsd", torch.int8, batch=1, heads=1, rows=6, dim=2, tensors=count, depth=3)
    case.context_lengths, case.accepted_nodes = torch.tensor([1]), torch.tensor([[2, 3, -1]])
    same_bits(list(case.run(backend)), list(case.expected()))
    kinds = [
        make(7 + i, "bhsd", torch.int8, 1, 1, 6 + i, 2, 1, 3) for i in range(12 if backend.name == "triton" else 30)
    ]
    many = Case(
        [k.memory[0] for k in kinds], [k.views[0] for k in kinds], "bhsd", 1, path(1, [2, 3]), torch.tensor([1]), None
    )
    same_bits(list(many.run(backend)), list(many.expected()))


def test_pieces_fit_every_plane(backend: Backend) -> None:
    """Rows that lie apart by an even number of bytes, and in each of them keys and values by an odd one."""
    view = [lambda m: m.view(1, 1, 12, 2, 9)[..., :8]]
    memory = [torch.arange(12 * 18, dtype=torch.uint8)]
    case = Case(memory, view, "bhs2d", 1, path(1, [2, 5, 6]), torch.tensor([3]), None)
    same_bits(list(case.run(backend)), list(case.expected()))


def test_idle_rows_and_empty_things(backend: Backend) -> None:
    cache = torch.randn(4, 2, 10, 8)
    nodes = torch.tensor([[-1, -1], [2, 5], [2, 5], [1, 2]])
    kept = backend(cache)
    before = kept.clone()
    out = backend.gather_kv_([kept], backend(nodes), backend(torch.tensor([3, -1, 10, 4], dtype=torch.int32)))
    assert out.lengths.tolist() == [4, -1, 10, 7] and out.lengths.dtype == torch.int32
    assert out.status.tolist() == [0, 0, sk.Status.BAD_PARAM, 0]
    assert torch.equal(kept, before)  # the last one's path is where it should be
    none = backend.gather_kv_([], *backend(nodes, torch.tensor([3, -1, 10, 4])))
    assert none.lengths.tolist() == [4, -1, 13, 7]
    nobody = backend.gather_kv_([kept[:0]], *backend(nodes[:0], torch.tensor([], dtype=torch.int64)))
    assert nobody.lengths.tolist() == [] and nobody.status.dtype == torch.int32
    flat = backend.gather_kv_([kept[:, :, :0]], *backend(nodes, torch.tensor([3, -1, 10, 4])))
    assert flat.status.tolist() == [16, 0, 16, 16]
    rootless = backend.gather_kv_([kept], *backend(nodes[:, :0], torch.tensor([3, -1, 9, 4])))
    assert rootless.lengths.tolist() == [4, -1, 10, 5]


def test_a_row_moves_to_the_first_of_the_first_block(backend: Backend) -> None:
    """What moves nothing, in sequences before and after, does not disturb it."""
    case = make(3, "nshd", torch.float32, batch=3, heads=1, rows=4, tensors=2, depth=3)
    case.block_table = torch.tensor([[1, 2], [3, 0], [4, 5]])
    case.context_lengths, case.accepted_nodes = torch.tensor([-1, 3, 2]), path(3, [-1, -1, -1])
    case.accepted_nodes[1] = torch.tensor([2, 4, -1])
    case.memory = [torch.arange(6 * 4 * 8 * 4).byte() for _ in range(2)]
    case.views = [lambda m: m.view(torch.float32).view(6, 4, 1, 8)] * 2
    memory, out = case.expected()
    assert not torch.equal(memory[0][:32], case.memory[0][:32])
    same_bits(list(case.run(backend)), [memory, out])


def test_forms_of_a_cache(backend: Backend) -> None:
    """Pairs, a flat list, one tensor, and transformers' caches: the same rows."""
    tensors = [torch.randn(2, 2, 16, 8) for _ in range(4)]
    nodes, contexts = torch.tensor([[2, 4, 5], [3, -1, -1]]), torch.tensor([5, 9])
    case = Case(
        [t.view(-1).view(torch.uint8) for t in tensors],
        [lambda m: m.view(torch.float32).view(2, 2, 16, 8)] * 4, "bhsd", 2, nodes, contexts, None,
    )  # fmt: skip
    expected = case.expected()
    same_bits(case.run(backend), expected)
    same_bits(case.run(backend, lambda t: [(t[0], t[1]), (t[2], t[3])]), expected)
    same_bits(case.run(backend, lambda t: tuple(t)), expected)
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=16)

    def filled(cache: Any) -> Callable[[list[Tensor]], Any]:
        def fill(t: list[Tensor]) -> Any:
            for layer, key, value in ((0, t[0], t[1]), (1, t[2], t[3])):
                cache.update(key, value, layer)
            return cache

        return fill

    def kept(cache: Any) -> list[Tensor]:
        return [t.contiguous().cpu() for layer in cache.layers for t in (layer.keys, layer.values)]

    ragged = RaggedCache(2, 2, 16)
    ragged.place(backend(torch.zeros(2, dtype=torch.int64)), 16, 16)
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=16), ragged):
        out = case.run(backend, filled(cache))[1]
        same_bits(out, expected[1])
        same_bits(kept(cache), [view(m) for view, m in zip(case.views, expected[0], strict=True)])


def test_in_the_step_that_verifies(backend: Backend) -> None:
    """What verify_tree accepts is what the cache then holds, whatever the tree."""
    tree = sk.DraftTree.cartesian([3, 2, 2])
    tokens = torch.randint(0, 9, (3, tree.num_nodes))
    accepted = sk.verify_tree(
        torch.randn(3, tree.num_nodes, 9), tree, tokens, uniform_samples=torch.rand(3, tree.num_nodes),
        backend="reference",
    )  # fmt: skip
    contexts = torch.tensor([4, 0, 11])
    marks = torch.full((3, 40), -7)
    for b, context in enumerate(contexts.tolist()):
        marks[b, context : context + tree.num_nodes] = torch.arange(tree.num_nodes)
    cache = backend(marks.clone())
    out = backend.gather_kv_([cache], *backend(accepted.accepted_nodes, contexts), "bs")
    assert torch.equal(out.lengths.cpu(), contexts + 1 + accepted.num_accepted)
    for b, (context, length) in enumerate(zip(contexts.tolist(), out.lengths.tolist(), strict=True)):
        followed = accepted.accepted_nodes[b, : length - context - 1].tolist()
        assert cache[b, context:length].tolist() == [0, *followed]


def test_direct_calls_are_safe(backend: Backend) -> None:
    """The dispatcher's op, past all validation: wrong shapes and layouts are refused, wild values followed nowhere."""
    if backend.name not in ("cpu", "cuda", emulated.NAME):
        pytest.skip("only libraries can touch memory that is not theirs")
    op = emulated.overload(OP) if backend.name == emulated.NAME else torch.ops.specdec.gather_kv_.default
    cache, nodes = backend(torch.randn(2, 1, 9, 4)), backend(torch.tensor([[2, 4], [3, -1]]))
    contexts = backend(torch.tensor([1, 2]))
    good: dict[str, Any] = {
        "cache": [cache], "key_layout": [0, 1, 2, 3], "value_layout": [0, 1, 2, 3], "accepted_nodes": nodes,
        "context_lengths": contexts, "block_table": None,
    }  # fmt: skip
    for change in (
        {"key_layout": [0, 1, 2]}, {"key_layout": [0, 1, 2, 9]}, {"key_layout": [1, 0, 2, 3]},
        {"key_layout": [4, 1, 2]}, {"accepted_nodes": nodes[0]}, {"accepted_nodes": nodes[:1]},
        {"accepted_nodes": nodes.float()}, {"context_lengths": contexts.to(torch.int8)},
        {"context_lengths": contexts[:1]},
        {"block_table": nodes[0]}, {"block_table": nodes[:1]}, {"block_table": nodes.to(torch.int16)},
        {"cache": [cache, cache[:, :, :3]], "block_table": nodes}, {"cache": [cache[0]]},
    ):  # fmt: skip
        before = cache.clone()
        with pytest.raises(RuntimeError, match="specdec"):
            op(**{**good, **change})
        assert torch.equal(cache, before)
    for layout in ([3, 2, 1, 0], [5, 5, 5, 5], [0, 0, 0, 0], [2, 2, 2, 2], [3, 3, 2, 0]):
        for table in (None, backend(torch.tensor([[7], [-9]])), backend(torch.zeros(2, 0, dtype=torch.int64))):
            try:
                op(**{**good, "key_layout": layout, "block_table": table})
            except RuntimeError as error:
                assert "specdec" in str(error)


@pytest.mark.skipif(emulated.unavailable() is not None, reason=str(emulated.unavailable()))
@pytest.mark.parametrize("strategy", emulated.STRATEGIES)
def test_one_launch_for_all_layers(strategy: str) -> None:
    cache = [(torch.zeros(2, 1, 6, 2), torch.zeros(2, 1, 6, 2)) for _ in range(64)]
    bloom = [t for _ in range(64) for t in (torch.zeros(2, 2, 6), torch.zeros(2, 6, 2))]
    for tensors, layout in ((cache, "bhsd"), (bloom, ("(bh)ds", "(bh)sd")), (torch.zeros(64, 2, 2, 1, 6, 2), "l2bhsd")):
        with emulated.running(strategy):
            sk.gather_kv_(tensors, path(2, [2, 3]), torch.tensor([0, 1]), layout, backend=emulated.NAME)
            assert emulated.library().specdec_emulator_launches() == 1


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e5m2])
def test_compiles_whole(kind: torch.dtype) -> None:
    """In a compiled function the cache that was given has moved."""
    case = make(11, "bhsd", kind, batch=3, rows=16, tensors=4, depth=4)
    expected, out = case.expected()
    for compiler in ("aot_eager", "inductor"):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend=compiler)
        def step(keys: list[Tensor], nodes: Tensor, lengths: Tensor) -> Tensor:
            moved = sk.gather_kv_([(keys[0], keys[1]), (keys[2], keys[3])], nodes, lengths)
            return moved.lengths + 0 * moved.status

        memory = [m.clone() for m in case.memory]
        lengths = step(
            [view(m) for view, m in zip(case.views, memory, strict=True)], case.accepted_nodes, case.context_lengths
        )
        same_bits([memory, lengths.to(out.lengths.dtype)], [expected, out.lengths])


def test_compiles_whole_for_sizes_that_change() -> None:
    """Once for all of them: rows and batch are no constants."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda cache, nodes, lengths: sk.gather_kv_(cache, nodes, lengths).lengths, fullgraph=True,
                             backend="aot_eager", dynamic=True)  # fmt: skip
    for batch, rows in ((3, 16), (4, 17), (5, 40)):
        case = make(11, "bhsd", torch.float32, batch=batch, rows=rows, tensors=2, depth=4)
        expected, out = case.expected()
        memory = [m.clone() for m in case.memory]
        views = [view(m) for view, m in zip(case.views, memory, strict=True)]
        with torch._dynamo.config.patch(error_on_recompile=batch > 3):
            lengths = compiled(views, case.accepted_nodes, case.context_lengths)
        same_bits([memory, lengths.to(out.lengths.dtype)], [expected, out.lengths])


def test_autograd_is_told_and_asked() -> None:
    cache = torch.zeros(1, 1, 6, 2)
    given = {"accepted_nodes": path(1, [2, 3]), "context_lengths": torch.tensor([1])}
    with pytest.raises(ValueError, match="cuda"):
        sk.gather_kv_(cache, **given, backend="cuda")
    assert cache._version == 0, "nothing was written"
    sk.gather_kv_(cache, **given)
    assert cache._version == 1
    cache.requires_grad_()
    with pytest.raises(ValueError, match="gather_kv_: cache must not require grad"):
        sk.gather_kv_(cache, **given)
    with torch.no_grad():
        sk.gather_kv_(cache, **given)


CACHE = [torch.zeros(2, 3, 10, 4), torch.zeros(2, 3, 10, 4)]
GOOD = {"cache": CACHE, "accepted_nodes": path(2, [2, 3]), "context_lengths": torch.tensor([1, 2])}
PAGES = torch.zeros(6, 4, 3, 2)
WIDE = torch.zeros(300, dtype=torch.int64)
NARROW = WIDE.view(torch.int16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": 3}, TypeError, "cache must be tensors, pairs of them or a Cache, got int"),
        ({"cache": [None]}, TypeError, "cache[0] must be a tensor, got NoneType"),
        ({"cache": [(CACHE[0], None)]}, TypeError, "cache[1] must be a tensor, got NoneType"),
        ({"cache": DynamicCache(config=LlamaConfig(num_hidden_layers=1))}, TypeError, "cache[0] must be a tensor"),
        ({"cache": [CACHE[0][0]]}, ValueError, "cache[0] must be [batch=2, heads, rows, dim], got [3, 10, 4]"),
        ({"cache": [CACHE[0][:1]]}, ValueError, "cache[0] must be [batch=2, heads, rows, dim], got [1, 3, 10, 4]"),
        ({"cache": [torch.zeros(2, 9, 4)]}, ValueError, "cache[0] must be [batch=2, heads, rows, dim], got [2, 9, 4]"),
        ({"cache": [torch.quantize_per_tensor(CACHE[0], 1.0, 0, torch.quint8)]}, TypeError,
         "cache[0] must be a strided tensor and not quantized by torch, got torch.strided torch.quint8"),
        *(({"cache": [CACHE[0], sparse]}, TypeError, "cache[1] must be a strided tensor and not quantized by torch")
          for sparse in (CACHE[0].to_sparse(), torch.eye(4).to_sparse_csr())),
        ({"cache": [CACHE[0].to("meta")]}, ValueError, "cache[0] must be on cpu, got meta"),
        ({"cache": [CACHE[0][:, :1].expand(2, 3, 10, 4)]}, ValueError, "cache[0] must not overlap themselves"),
        ({"cache": [CACHE[0], CACHE[0][..., :2]]}, ValueError, "cache must hold each tensor once"),
        ({"cache": [CACHE[0][:, :, :8], CACHE[0][:, :, 2:]]}, ValueError, "cache must hold each tensor once"),
        ({"cache": [NARROW[:240].view(2, 3, 10, 4), WIDE[60:].view(2, 3, 10, 4), NARROW[480:720].view(2, 3, 10, 4)]},
         ValueError, "cache must hold each tensor once"),
        ({"cache": [torch.zeros(99).as_strided((2, 3, 10, 4), (30, 10, 1, 2))]}, ValueError,
         "cache[0] must not overlap themselves, got strides (30, 10, 1, 2)"),
        ({"accepted_nodes": torch.zeros(2, 2)}, TypeError, "accepted_nodes must be int64 or int32, got float32"),
        ({"accepted_nodes": path(1, [2])}, ValueError, "accepted_nodes must be [batch=2, max_depth], got [1, 1]"),
        ({"accepted_nodes": torch.zeros(2).long()}, ValueError, "accepted_nodes must be [batch=2, max_depth], got [2]"),
        ({"context_lengths": torch.tensor([1.0, 2])}, TypeError, "context_lengths must be int64 or int32"),
        ({"context_lengths": torch.tensor(1)}, ValueError, "context_lengths must be [batch], got []"),
        ({"layout": 3}, TypeError, "layout must be a str or a pair of them, got 3"),
        ({"layout": ("bhsd",)}, TypeError, "layout must be a str or a pair of them"),
        ({"layout": "bhxd"}, ValueError, "layout must be made of b or (bh), s, h, d, l and 2, each at most once"),
        ({"layout": "bhhs"}, ValueError, "layout must be made of b or (bh)"),
        ({"layout": "bhd"}, ValueError, "layout must be made of b or (bh)"),
        ({"layout": "hsd"}, ValueError, "layout must be made of b or (bh)"),
        ({"layout": "(bh)hsd"}, ValueError, "layout must be made of b or (bh)"),
        ({"layout": "nshd"}, ValueError, "layout must be made of b or (bh)"),
        ({"layout": "(bh)sd", "cache": [torch.zeros(5, 9, 2)]}, ValueError,
         "cache[0] must be [batch=2 * heads, rows, dim], got [5, 9, 2]"),
        ({"layout": "2bsd", "cache": [torch.zeros(3, 2, 9, 2)]}, ValueError,
         "cache[0] must be [keys and values=2, batch=2, rows, dim], got [3, 2, 9, 2]"),
        ({"layout": ("bhsd", "bshd"), "cache": CACHE[:1]}, ValueError, "cache must be keys and values in turn"),
        ({"block_table": torch.zeros(2).long(), "cache": [PAGES]}, ValueError,
         "block_table must be [batch=2, max_blocks], got [2]"),
        ({"block_table": torch.zeros(2, 1), "cache": [PAGES]}, TypeError, "block_table must be int64 or int32"),
        ({"block_table": path(2, [0]), "cache": [PAGES, PAGES[:, :3].clone()]}, ValueError,
         "cache[1] must be [num_blocks, rows=4, heads, dim], got [6, 3, 3, 2]"),
        ({"block_table": path(2, [0]), "layout": "bshd"}, ValueError, "layout must be made of n, s, h, d, l and 2"),
        ({"backend": "gpu"}, ValueError, "backend must be one of"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(sk.gather_kv_, GOOD, change, error, f"gather_kv_: {message}")


@pytest.mark.parametrize("layout", ["rows", "heads", "elements"])
def test_views_of_one_buffer_that_share_no_byte_are_taken(layout: str) -> None:
    room = torch.arange(2 * 2 * 3 * 10 * 4.0)
    interleaved = {
        "rows": room.view(2, 3, 10, 2, 4).unbind(3),
        "heads": room.view(2, 2, 3, 10, 4).unbind(1),
        "elements": room.view(2, 3, 10, 4, 2).unbind(4),
    }[layout]
    apart = [view.clone() for view in interleaved]
    sk.gather_kv_(interleaved, GOOD["accepted_nodes"], GOOD["context_lengths"])
    sk.gather_kv_(apart, GOOD["accepted_nodes"], GOOD["context_lengths"])
    same_bits(list(interleaved), apart)


def test_sliding_windows_are_refused() -> None:
    config = LlamaConfig(num_hidden_layers=1, sliding_window=4, layer_types=["sliding_attention"])
    with pytest.raises(ValueError, match="^gather_kv_: cache must keep all rows, got a sliding window in layer 0"):
        sk.gather_kv_(DynamicCache(config=config), GOOD["accepted_nodes"], GOOD["context_lengths"])


@pytest.mark.parametrize("beside", ["_quantized_keys", "indexer_keys", "recurrent_states"])
def test_layers_with_more_than_keys_and_values_are_refused(beside: str) -> None:
    """Of quantised, indexed and hybrid caches the rest would stay where it is."""
    layer = DynamicLayer()
    layer.keys = layer.values = torch.zeros(2, 1, 8, 4)
    setattr(layer, beside, torch.zeros(2, 8))
    cache = SimpleNamespace(layers=[layer])
    with pytest.raises(ValueError, match="all that it has in keys and values, got a DynamicLayer in layer 0"):
        sk.gather_kv_(cache, GOOD["accepted_nodes"], GOOD["context_lengths"])


def test_check_raises() -> None:
    cache = torch.zeros(2, 1, 8, 4)
    with (
        environment(SPECDEC_CHECK="1"),
        pytest.raises(RuntimeError, match="^gather_kv_: row 1 set <Status.BAD_TREE: 32>"),
    ):
        sk.gather_kv_([cache], torch.tensor([[1], [3]]), torch.tensor([0, 6]))


def test_an_inference_tensor_is_written_to_outside_of_inference_mode(backend: Backend) -> None:
    with torch.inference_mode():
        cache = backend(torch.arange(18.0).reshape(2, 1, 9, 1))
    nodes, lengths = backend(torch.tensor([[2, 3], [1, 2]]), torch.tensor([1, 2]))
    backend.gather_kv_([cache], nodes, lengths)
    assert cache.flatten(1).tolist() == [[0, 1, 3, 4, *range(4, 9)], list(range(9, 18))]
