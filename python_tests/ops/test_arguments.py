"""What crosses the dispatcher: one definition, the same order in C++, and no call that reads past a tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels as sk
from python_tests import emulated
from python_tests.ops.inputs import op_tests, same_bits
from python_tests.support import Backend
from specdec_kernels import laws
from specdec_kernels.backends import OPS, direct
from specdec_kernels.checks import MAX_VOCAB
from specdec_kernels.flat import LOSSLESS, FlatProcessors
from specdec_kernels.ops import arguments
from specdec_kernels.ops.sample import MAX_SAMPLES
from specdec_kernels.ops.token_logprobs import MAX_TOP
from specdec_kernels.sampling import DEFAULT_PARAMS
from specdec_kernels.tree import MAX_DEPTH, MAX_NODES

CSRC = Path(__file__).resolve().parents[2] / "csrc"
GROUPS = {"FlatLaw": "law", "FlatParams": "params"}


def structs() -> dict[str, list[tuple[str, str]]]:
    """(type, name) of the members of each struct of csrc/bind_arguments.h."""
    text = (CSRC / "bind_arguments.h").read_text()
    found = {}
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.M | re.S):
        members = re.findall(r"(\w+) ([\w, ]+);", body)
        found[name] = [(kind, each.strip()) for kind, names in members for each in names.split(",")]
    return found


def flattened(name: str, prefix: str = "") -> list[str]:
    """The settings of a struct of C++, named as a definition names them."""
    out = []
    for kind, member in structs()[name]:
        inner = f"{member}." if kind in GROUPS else ""
        out += [prefix + member] if kind == "double" else flattened(kind, inner)
    return out


def struct_of(op: str) -> str:
    return op.title().replace("_", "") + "Settings"


@pytest.mark.skipif(not CSRC.exists(), reason="an installed package has no kernel sources")
@pytest.mark.parametrize("op", OPS)
def test_cpp_has_the_same_order(op: str) -> None:
    definition = OPS[op]
    assert not definition.settings or struct_of(op) in structs(), f"csrc/bind_arguments.h has no {struct_of(op)}"
    assert definition.settings == (flattened(struct_of(op)) if definition.settings else [])
    head = re.search(rf" {op}\(([^)]*)\) {{", (CSRC / "bind_ops.h").read_text())
    assert head is not None
    names = [parameter.split()[-1].strip("&") for parameter in head[1].split(",")]
    lists = [name for name in ("per_sequence", "settings") if getattr(definition, name)]
    assert names == [*definition.alone, *lists]
    assert names == [argument.name for argument in getattr(torch.ops.specdec, op).default._schema.arguments]


@pytest.mark.skipif(not CSRC.exists(), reason="an installed package has no kernel sources")
def test_cpp_has_the_same_order_of_tensors_in_sampling_parameters() -> None:
    text = (CSRC / "bind_arguments.h").read_text()
    enum = re.search(r"enum PerSequenceTensor { ([^}]*), kNumPerSequence }", text)
    assert enum is not None
    names = ["_".join(re.findall("[A-Z][a-z]+", one)).lower() for one in enum[1].split(", ")]
    assert OPS["row_stats"].per_sequence == [f"params.{name}" for name in names]


@pytest.mark.skipif(not CSRC.exists(), reason="an installed package has no kernel sources")
def test_the_list_of_ops_is_the_same() -> None:
    listed = re.findall(r"OP\(\w+, (\w+)\)", (CSRC / "common/ops.h").read_text().split("#define")[1])
    assert set(listed) == set(OPS)


def numbered(header: str, enum: str) -> list[str]:
    """The names of an enum of C++, in the order of their numbers and spelt as Python spells them."""
    body = re.search(rf"enum (?:class )?{enum} : \w+ {{([^}}]*)}}", (CSRC / header).read_text())
    assert body is not None
    members = [member.strip().partition(" = ") for member in body[1].split(",")]
    assert all(not number or int(number) == at for at, (_, _, number) in enumerate(members))
    return [spelt(name[1:]) for name, _, _ in members]


def spelt(name: str) -> str:
    """A name of C++, or of a class, in lower case with underscores."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


KINDS = sorted((getattr(laws, name) for name in laws.__all__ if name != "TargetLaw"), key=lambda kind: kind.number)
LAWS = {"lossless": LOSSLESS.number} | {spelt(kind.__name__): kind.number for kind in KINDS}


@pytest.mark.skipif(not CSRC.exists(), reason="an installed package has no kernel sources")
@pytest.mark.parametrize(
    ("header", "enum", "python"),
    [
        ("common/params.h", "Acceptance", arguments.ACCEPTANCES),
        ("common/params.h", "TreeAcceptance", arguments.TREE_ACCEPTANCES),
        ("common/target_law.h", "LawKind", LAWS),
        ("bind_cache.h", "CacheDim", arguments.CACHE_DIMS),
    ],
)
def test_cpp_has_the_same_numbers(header: str, enum: str, python: dict[str, int]) -> None:
    assert numbered(header, enum) == list(python) and list(python.values()) == list(range(len(python)))


@pytest.mark.skipif(not CSRC.exists(), reason="an installed package has no kernel sources")
def test_cpp_has_the_same_flags_and_tiles() -> None:
    flags = re.findall(r"k(\w+) = (\d+)", (CSRC / "common/status.h").read_text())
    python = [(str(flag.name).replace("_", "").lower(), int(flag)) for flag in sk.Status if flag]
    assert [(name.lower(), int(number)) for name, number in flags] == python
    params, bound = ((CSRC / file).read_text() for file in ("common/params.h", "bind_ops.h"))
    for constant in (
        f"kTile = {arguments.TILE};", f"kMostTop = {MAX_TOP};", f"kMostNodes = {MAX_NODES}, kMostDepth = {MAX_DEPTH};",
    ):  # fmt: skip
        assert constant in params
    assert f"kMostSamples = {MAX_SAMPLES};" in bound
    assert f"kMostIds = int64_t(1) << {MAX_VOCAB.bit_length() - 1};" in (CSRC / "bind_arguments.h").read_text()


def test_what_is_packed_is_unpacked() -> None:
    tensors = (torch.rand(5), torch.rand(5))
    params = sk.SamplingParams(tensors[0], 7, tensors[1], 0.25, min_p_first=True)
    law = sk.laws.Chow(0.3, loss="log", bonus="cascade").flat()
    leaves: dict[str, Any] = {name: torch.zeros(i + 1) for i, name in enumerate(OPS["verify_chain"].alone)}
    leaves |= {"num_draft": 9, "acceptance": 2, "return_acceptance": True, "target_probs": True}
    definition = OPS["verify_chain"]
    made = definition.unpack(*definition.pack(**leaves, law=law, params=params, draft_params=DEFAULT_PARAMS))
    assert isinstance(made, arguments.VerifyChainArguments) and isinstance(made.shared, arguments.VerifyArguments)
    assert (made.num_draft, made.acceptance, made.return_acceptance) == (9, 2, True)
    assert (
        made.shared.law == law and made.shared.target_probs is True and made.shared.draft_params == DEFAULT_PARAMS._flat
    )
    for given, kept in zip(params._flat, made.shared.params, strict=True):
        assert given is kept or given == kept
    fields = made.shared._asdict() | made._asdict()
    assert all(fields[name] is leaves[name] for name in definition.alone if name != "num_draft")


class Recorded(TorchDispatchMode):
    """What the last call of an op in our namespace was given."""

    given: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "specdec":
            self.given = args
        return func(*args, **(kwargs or {}))


def packed_calls(op: str) -> Iterator[dict[str, Any]]:
    """What good calls give the op, by name."""
    names = [argument.name for argument in getattr(torch.ops.specdec, op).default._schema.arguments]
    every = every_tensor().get(op)
    if every is not None:
        forms = [every]
        if "seeds" in every:
            three = torch.arange(3)
            seeds = {"seeds": three, "steps": three, "positions": three[:, None] + three, "uniform_samples": None}
            forms.append(every | seeds)
        for form in forms:
            yield dict(zip(names, OPS[op].pack(**form), strict=True))
        return
    for make in op_tests(op).CALLS.values():
        with Recorded() as call:
            getattr(sk, op)(**make())
        yield dict(zip(names, call.given, strict=True))


def every_tensor() -> dict[str, dict[str, Any]]:
    """Of the ops with many optional tensors, a call with as many as go together."""
    batch, n, vocab = 3, 2, 20
    rows = torch.randn(batch, n + 1, vocab, generator=torch.Generator().manual_seed(1))
    shared = dict.fromkeys(arguments.VerifyArguments._fields) | {
        "target_logits": rows, "draft_logits": rows[:, :n].contiguous(), "uniform_samples": torch.rand(batch, n + 1),
        "draft_values": torch.zeros(batch, n, 6), "draft_argmax": torch.zeros(batch, n).long(),
        "draft_status": torch.zeros(batch, n).int(), "eos_token_ids": torch.tensor([3]), "law": LOSSLESS,
        "params": DEFAULT_PARAMS, "draft_params": DEFAULT_PARAMS, "step": 0, "target_probs": False,
    }  # fmt: skip
    links = torch.tensor([[-1, 0, 1], [1, 2, -1], [-1, -1, -1]])
    shared["processors"] = processors = flat_processors(batch, n + 1, vocab)
    return {
        "sample": {"logits": rows, "processors": processors, "params": DEFAULT_PARAMS, "noise_keys": None,
                   "uniform_samples": torch.rand(batch, n + 1), "num_samples": 1,
                   "draft_to_target": torch.arange(vocab), "probs": False, "row_index": torch.arange(batch)},
        "verify_chain": shared | {"draft_tokens": torch.arange(batch * n).view(batch, n),
                                  "num_draft_tokens": torch.full((batch,), n),
                                  "cu_num_draft_tokens": None, "num_draft": n, "acceptance": 0,
                                  "return_acceptance": True, "draft_index": None, "bonus_tokens": None},
        "verify_tree": shared | dict.fromkeys(("draft_values", "draft_argmax", "draft_status")) | {
            "draft_logits": rows, "node_tokens": torch.arange(9).view(3, 3), "links": links,
            "tree_status": torch.zeros((), dtype=torch.int32), "max_depth": 2, "acceptance": 0, "epsilon": 0.1,
            "delta": 0.3},
    }  # fmt: skip


def flat_processors(batch: int, n: int, vocab: int) -> list[torch.Tensor | None]:
    """All at once, as an op takes them."""
    ones = torch.ones(batch)
    every = sk.Processors(
        logit_bias={3: 0.5}, banned_ids=[[1, 2]] * batch, allowed_ids=[list(range(vocab))] * batch, stop_token_ids=[4],
        min_tokens=5, token_bitmask=torch.full((batch, n, (vocab + 31) // 32), -1, dtype=torch.int32),
        repetition_penalty=ones * 1.5, token_counts=sk.TokenCounts(torch.arange(2 * batch).view(batch, 2), 3),
    )  # fmt: skip
    return [every.token_bitmask, *every._lists(ones.device, vocab).flat]


@pytest.mark.skipif(not CSRC.exists(), reason="an installed package has no kernel sources")
def test_cpp_has_the_same_order_of_processors() -> None:
    enum = re.search(r"enum ProcessorTensor {([^}]*),\s*kNumProcessors\s*}", (CSRC / "bind_arguments.h").read_text())
    assert enum is not None
    names = ["_".join(re.findall("[A-Z][a-z]+", one)).lower() for one in enum[1].split(",")]
    assert names == list(FlatProcessors._fields)


@pytest.mark.parametrize("op", [op for op in OPS if op != "gather_kv_"])
def test_direct_calls_are_safe(op: str, backend: Backend) -> None:
    """Past all validation: a tensor with a row fewer or of another dtype, or too short a list, is refused."""
    if backend.name not in ("cpu", "cuda", emulated.NAME):
        pytest.skip("only libraries can touch memory that is not theirs")
    overload = emulated.overload(op) if backend.name == emulated.NAME else getattr(torch.ops.specdec, op).default
    runs = [overload] if backend.name == emulated.NAME else [overload, direct.call(op, overload)]
    for call in packed_calls(op):
        for run in runs:
            refuses_worse(op, run, {name: backend(value) for name, value in call.items()}, backend)


def refuses_worse(op: str, run: Callable[..., Any], good: dict[str, Any], backend: Backend) -> None:
    run(*good.values())
    tensors = sum(isinstance(value, torch.Tensor) for value in good.values())
    for name, value in good.items():
        bad: list[Any] = []
        if isinstance(value, torch.Tensor):
            if tensors > 1 and name not in ("eos_token_ids", "logits"):  # these are of any length
                bad = [value.new_zeros(0) if value.dim() == 0 else value[:-1]]
            if "logits" not in name and name not in ("positions", "draft_tokens", "node_tokens", "num_draft_tokens"):
                bad.append(value.to(torch.int16))
            if value.is_floating_point() and name != "uniform_samples":  # these are of either width
                bad.append(value.double())
        elif name == "settings":
            bad = [value[:-1], [*value, 0.0], []]
        elif name == "per_sequence":
            bad = [[], [None], [backend(torch.zeros(2))] + [None] * (len(OPS[op].per_sequence) - 1)]
        elif name == "processors" and value is not None:
            bad = [[], value[:-1], [*value, None]]
            for i, tensor in enumerate(value):
                others = [tensor[..., :-1], tensor[:-1], tensor.to(torch.int16)]
                if FlatProcessors._fields[i] in ("bias_ids", "bias_values", "penalties", "counts", "num_output"):
                    others.append(None)
                bad += [[*value[:i], other, *value[i + 1 :]] for other in others]
        elif name in ("num", "num_samples", "num_top", "num_draft", "max_depth"):
            bad = [-1, 2**40]
        for worse in bad:
            with pytest.raises(RuntimeError, match=r"specdec|must be on"):
                run(*{**good, name: worse}.values())


def test_a_definition_gives_the_same_whatever_the_form() -> None:
    """Rows without a dimension of their own, which the op shapes itself, as with one."""
    x, u = (
        torch.randn(4, 30, generator=torch.Generator().manual_seed(2)),
        torch.rand(4, generator=torch.Generator().manual_seed(3)),
    )
    for backend in ("reference", None):
        flat, wide = (
            sk.sample(x, uniform_samples=u, backend=backend),
            sk.sample(x[:, None], uniform_samples=u[:, None], backend=backend),
        )
        assert flat.token.shape == (4,) and flat.stats.values.shape == (4, 6)
        same_bits([flat.token, flat.stats.values], [wide.token[:, 0], wide.stats.values[:, 0]])


def test_a_map_that_leads_out_of_the_draft_is_safe(backend: Backend) -> None:
    """Past all validation: an id that the draft's rows do not have counts as unmapped, wider rows are refused."""
    if backend.name not in ("cpu", "cuda", emulated.NAME):
        pytest.skip("only libraries can touch memory that is not theirs")
    run = emulated.overload("verify_chain") if backend.name == emulated.NAME else torch.ops.specdec.verify_chain.default
    batch, n, vocab, narrow = 3, 2, 20, 4
    rows = torch.randn(batch, n + 1, vocab, generator=torch.Generator().manual_seed(1))
    leaves = dict.fromkeys(OPS["verify_chain"].alone) | {
        "target_logits": rows, "draft_tokens": torch.zeros(batch, n, dtype=torch.int64), "num_draft": n,
        "uniform_samples": torch.full((batch, n + 1), 0.5), "law": LOSSLESS, "params": DEFAULT_PARAMS,
        "draft_params": DEFAULT_PARAMS, "acceptance": 0, "return_acceptance": True, "step": 0,
        "target_probs": False,
    }  # fmt: skip

    def verified(to_draft: list[int], width: int) -> list[torch.Tensor]:
        given = {"target_to_draft": torch.tensor(to_draft), "draft_logits": rows.new_zeros(batch, n, width)}
        return list(run(*(backend(value) for value in OPS["verify_chain"].pack(**{**leaves, **given}))))

    mapped, beyond = list(range(narrow)), [4, 5, 19, 2**31, 2**32, 2**32 + 1, 2**62, -2, -(2**31), -(2**32), -(2**63)]
    same_bits(verified([*mapped, *beyond], narrow), verified([*mapped, *[-1] * len(beyond)], narrow))
    with pytest.raises(RuntimeError, match="disagree in shape"):
        verified(mapped, vocab + 1)
