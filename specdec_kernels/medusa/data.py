"""Text to train heads on, as hidden states of the target: self-distilled text and the standard library's source.

Self-distillation (Cai et al., arXiv 2401.10774, section 2.3.2): the target writes its own training text. Its seeds are
beginnings of the standard library's functions, to be continued; questions about such functions; and a chat's empty user
turn, which the target fills itself before it answers (self-talk: Xu et al., arXiv 2406.08464). It contains none of the
benchmarks' prompts nor, by `specdec_kernels.assets.corpus`, the sources that these are made of; a question like theirs,
for type hints, is asked about other functions.

Text and hidden states are made shard by shard, each a file that is complete once it exists: an interrupted run goes on
with the next one.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..assets.corpus import sources
from ..assets.prompts import encode
from ..checks import (
    FLOAT_DTYPES,
    INT64,
    check_callable,
    check_given,
    check_instance,
    check_int,
    check_model,
    check_path,
    check_sequence,
    check_tensor,
    shape_error,
)  # fmt: skip
from ..decoding.generate import generate
from ..drafters import NoDrafter
from ..files import write_whole
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label of what is not to be predicted."""
MAX_DOCUMENT = 512
"""Tokens of a document at most: beyond a few hundred, hidden states change little and cost more."""

_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of the self-distilled text: the drafts will meet greedy and sampled text
_SOURCE_EVERY = 3  # every third shard is source code as people wrote it
_DOCUMENTS = 32  # of a shard; also the batch in which text is generated
_NEW_TOKENS = 160
_SELF_TALK = 64  # tokens of a question that the target asks itself, at most
_MAX_CHARACTERS = 900
_QUESTIONS = (
    "Add type hints to this Python function.",
    "Explain what this Python function does.",
    "Rewrite this Python function with shorter names and comments.",
    "Write a docstring for this Python function, and repeat the function with it.",
)


@dataclass(frozen=True, eq=False)
class Document:
    """A text in tokens.

    Attributes
    ----------
    tokens : ndarray
        ``[n]`` int64.
    first : int
        Tokens from here on are to be predicted; those before are a prompt.

    Raises
    ------
    TypeError, ValueError
        Other `tokens`, or a `first` that is no integer from 0 to n.
    """

    tokens: NDArray[np.int64]
    first: int = 0

    def __post_init__(self) -> None:
        check_instance("Document", "tokens", self.tokens, np.ndarray, "an array")
        if self.tokens.ndim != 1 or self.tokens.dtype != np.int64:
            raise ValueError(f"Document: tokens must be [n] int64, got {list(self.tokens.shape)} {self.tokens.dtype}")
        check_int("Document", "first", self.first, 0, len(self.tokens))


@dataclass(frozen=True, eq=False)
class Features:
    """Documents, one after the other, as the target's last hidden states: all that Medusa-1 needs of the target.

    Attributes
    ----------
    hidden : Tensor
        ``[n, hidden]`` float16 (as `extract` gives them), bfloat16, float32 or float64: what the LM head was given at
        each token, from which it predicts the next one.
    tokens : Tensor
        ``[n]`` int64.
    starts, firsts : Tensor
        ``[documents]`` int64: where each begins, and how many tokens of it are a prompt.

    Raises
    ------
    TypeError, ValueError
        A tensor of another dtype, shape or device. Values are not looked at.
    """

    hidden: Tensor
    tokens: Tensor
    starts: Tensor
    firsts: Tensor

    def __post_init__(self) -> None:
        check_tensor("Features", "hidden", self.hidden, FLOAT_DTYPES, None)
        if self.hidden.dim() != 2:
            raise shape_error("Features", "hidden", "[n, hidden]", self.hidden)
        device = self.hidden.device
        check_given("Features", "tokens", self.tokens, INT64, device, ("n",), (len(self.hidden),))
        check_tensor("Features", "starts", self.starts, INT64, device)
        if self.starts.dim() != 1:
            raise shape_error("Features", "starts", "[documents]", self.starts)
        check_given("Features", "firsts", self.firsts, INT64, device, ("documents",), (len(self.starts),))

    def labels(self, num_heads: int) -> Tensor:
        """``[n, num_heads]`` int64: at row t and head k the token t + k + 2; `IGNORED` past the document's end and
        within its prompt.

        Raises
        ------
        TypeError, ValueError
            Not an integer >= 1.
        """
        check_int("Features", "num_heads", num_heads, 1, None)
        return self._tokens_after(range(2, num_heads + 2))

    def next_tokens(self) -> Tensor:
        """``[n]`` int64: what the LM head itself is to predict, at row t the token t + 1; `IGNORED` as in `labels`."""
        return self._tokens_after(range(1, 2))[:, 0]

    def digest(self) -> str:
        """Tells these features from others."""
        return digest(*(getattr(self, name) for name in self.__dataclass_fields__))

    def _tokens_after(self, distances: range) -> Tensor:
        n = self.tokens.numel()
        document = self.documents()
        ahead = torch.arange(distances.start, distances.stop, device=self.tokens.device)
        wanted = torch.arange(n, device=self.tokens.device)[:, None] + ahead
        begin = (self.starts + self.firsts)[document][:, None]
        inside = (wanted >= begin) & (wanted < self._ends()[document][:, None])
        return torch.where(inside, self.tokens[wanted.clamp(max=n - 1)], IGNORED)

    def _ends(self) -> Tensor:
        return torch.nn.functional.pad(self.starts[1:], (0, 1), value=self.tokens.numel())

    def documents(self) -> Tensor:
        """``[n]`` int64: which document each token belongs to."""
        return torch.repeat_interleave(self._ends() - self.starts)

    def rows_of(self, document: int) -> slice:
        """The rows of one document.

        Raises
        ------
        TypeError, ValueError
            Not the number of a document.
        """
        check_int("Features", "document", document, 0, len(self.starts) - 1)
        return slice(int(self.starts[document]), int(self._ends()[document]))

    def split(self, every: int) -> tuple[Features, Features]:
        """All documents except every `every`-th one, to train on, and the rest, held out.

        Raises
        ------
        TypeError, ValueError
            Not an integer >= 1, or fewer than `every` documents.
        """
        check_int("Features", "every", every, 1, None)
        if len(self.starts) < every:
            raise ValueError(f"Features: every must be <= documents={len(self.starts)}, got {every}")
        out = torch.arange(len(self.starts), device=self.starts.device) % every == every - 1
        return self._select(~out), self._select(out)

    def _select(self, chosen: Tensor) -> Features:
        rows = chosen[self.documents()]
        lengths = (self._ends() - self.starts)[chosen]
        starts = lengths.cumsum(0) - lengths
        return Features(self.hidden[rows], self.tokens[rows], starts, self.firsts[chosen])

    @staticmethod
    def join(parts: Sequence[Features]) -> Features:
        """All documents of `parts`, one or more, in order.

        Raises
        ------
        TypeError, ValueError
            Not a sequence of `Features`, an empty one, or parts of several hidden sizes, dtypes or devices.
        """
        check_sequence("Features", "parts", parts, Features, "Features")
        kinds = [f"{p.hidden.shape[1]} {p.hidden.dtype} on {p.hidden.device}" for p in parts]
        if len(set(kinds)) > 1:
            got = ", ".join(dict.fromkeys(kinds)).replace("torch.", "")
            raise ValueError(f"Features: parts must be of one hidden size, dtype and device, got {got}")
        offsets = np.cumsum([0] + [part.tokens.numel() for part in parts[:-1]]).tolist()
        return Features(
            torch.cat([p.hidden for p in parts]),
            torch.cat([p.tokens for p in parts]),
            torch.cat([p.starts + offset for p, offset in zip(parts, offsets, strict=True)]),
            torch.cat([p.firsts for p in parts]),
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all.

        Raises
        ------
        TypeError
            `path` is not a Path.
        OSError
            The file could not be written.
        """
        check_path("Features", "path", path)
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_whole(path, lambda unfinished: save_file(tensors, unfinished))

    @staticmethod
    def load(path: Path) -> Features:
        """Read what `save` wrote.

        Raises
        ------
        TypeError
            `path` is not a Path.
        FileNotFoundError
            No file is there.
        ValueError
            It is something else, or incomplete.
        """
        check_path("Features", "path", path)
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return Features(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise ValueError(f"medusa: {path} must be a whole file of features (remove it), got {error}") from error


@torch.inference_mode()
def extract(model: Any, documents: Sequence[Document], batch_size: int = 8) -> Features:
    """Run the target over `documents` and keep its last hidden states.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only transformers model in evaluation mode.
    documents : sequence of Document
        One or more.
    batch_size : int
        Documents run together, >= 1.

    Returns
    -------
    Features
        On the CPU, of all documents in order; `hidden` is float16.

    Raises
    ------
    TypeError, ValueError
        Another type; no documents; a `batch_size` out of its range.
    """
    check_model("extract", "model", model)
    check_sequence("extract", "documents", documents, Document, "Document")
    check_int("extract", "batch_size", batch_size, 1, None)
    backbone, device = model.base_model, model.device
    rows: list[Tensor] = []
    for i in range(0, len(documents), batch_size):
        part = documents[i : i + batch_size]
        # Padding is on the right, where the rows before it do not see it in a causal model.
        padded = torch.zeros(len(part), max(len(d.tokens) for d in part), dtype=torch.int64, device="cpu")
        for row, document in zip(padded, part, strict=True):
            row[: len(document.tokens)] = torch.from_numpy(document.tokens)
        hidden = backbone(input_ids=padded.to(device), use_cache=False)[0]
        rows += [h[: len(d.tokens)].to("cpu", torch.float16) for h, d in zip(hidden, part, strict=True)]
    lengths = [len(d.tokens) for d in documents]
    return Features(
        torch.cat(rows),
        torch.from_numpy(np.concatenate([d.tokens for d in documents])),
        torch.from_numpy(np.cumsum([0, *lengths[:-1]])),
        torch.tensor([d.first for d in documents], device="cpu"),
    )


# Every so many documents, one is held out to judge by (`command.HELD_OUT_EVERY`): of all questions and temperatures, so
# that these must not have its rhythm, nor each other's.
def question_of(turn: int, i: int) -> str:
    """What the i-th document of the turn-th shard of questions asks."""
    return _QUESTIONS[(turn + i) % len(_QUESTIONS)]


def temperature_of(i: int) -> float:
    """At which the i-th document of a shard is written."""
    return _TEMPERATURES[i // len(_QUESTIONS) % len(_TEMPERATURES)]


def distill(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], seed: int) -> list[Document]:
    """The target's own continuations of `prompts`, by our own `generate`, a batch at a time."""
    ids, mask = encode(tokenizer, prompts)
    temperatures = torch.tensor([temperature_of(i) for i in range(len(prompts))])
    output = generate(
        model,
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        drafter=NoDrafter(),
        sampling=SamplingParams(temperature=temperatures.to(model.device)),
        seeds=torch.arange(len(prompts), device=model.device) + seed,
        max_new_tokens=_NEW_TOKENS,
    )
    documents = []
    for row, kept, new, count in zip(ids, mask, output.tokens, output.num_tokens.tolist(), strict=True):
        prompt = row[kept.bool()]
        documents.append(Document(torch.cat([prompt, new[:count]]).numpy(), first=len(prompt)))
    return documents


def check_tokenizer(tokenizer: object) -> None:
    if not hasattr(tokenizer, "apply_chat_template"):
        raise TypeError(f"prepare: tokenizer must be one of transformers, got {type(tokenizer).__name__}")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("prepare: tokenizer must have a chat template, as that of a chat model, got one without")


class Seeds:
    """Beginnings of self-distilled texts, and source code.

    Parameters
    ----------
    tokenizer
        With a chat template whose user turn ends with the end-of-sequence token.
    seed : int
        Of the order of everything.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> None:
        check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.seed = seed
        files = [path.read_text(encoding="utf-8", errors="ignore") for path in sources()]
        order = np.random.default_rng(seed)
        if not files:
            raise ValueError("prepare: this Python must come with its library's source code, got none")
        self._functions = [f for text in files for f in _functions(text)]
        order.shuffle(self._functions)
        order.shuffle(files)
        self._files = files

    def prompts(self, model: Any, shard: int) -> list[str]:
        """What a self-distilled shard continues: beginnings of functions, questions about them, or self-talk."""
        kind, turn = shard % 3, shard // 3
        # Questions are about others than those whose beginnings are continued: some of both kinds are held out.
        first = turn * _DOCUMENTS + (len(self._functions) // 2 if kind == 1 else 0)
        chosen = [self._functions[(first + i) % len(self._functions)] for i in range(_DOCUMENTS)]
        if kind == 0:
            return [beginning for beginning, _ in chosen]
        if kind == 1:
            return [
                self._chat(f"{question_of(turn, i)}\n```python\n{source[:_MAX_CHARACTERS]}\n```")
                for i, (_, source) in enumerate(chosen)
            ]
        return [self._chat(question) for question in self._self_talk(model, shard)]

    def source(self, shard: int) -> list[Document]:
        """A shard of source code: pieces of files, each at most `MAX_DOCUMENT` tokens."""
        pieces: list[Document] = []
        for i in range(_DOCUMENTS):
            text = self._files[(shard * _DOCUMENTS + i) % len(self._files)]
            ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            # Another piece of the file each time that its turn comes.
            begin = (shard * _DOCUMENTS + i) // len(self._files) * MAX_DOCUMENT % max(len(ids) - MAX_DOCUMENT, 1)
            piece = ids[begin : begin + MAX_DOCUMENT]
            if len(piece) > 2:
                pieces.append(Document(np.array(piece, dtype=np.int64)))
        return pieces

    def _chat(self, question: str) -> str:
        turn = [{"role": "user", "content": question}]
        text: str = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return text

    def _self_talk(self, model: Any, shard: int) -> list[str]:
        """What the target writes in the user's place."""
        mark = "\N{SNOWMAN}"  # stands where the user's words go: what the template puts before it is the prompt
        prompt = self._chat(mark).split(mark)[0]
        ids = torch.tensor([self.tokenizer.encode(prompt, add_special_tokens=False)] * _DOCUMENTS)
        output = generate(
            model,
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),  # a template may begin with the padding id
            drafter=NoDrafter(),
            seeds=torch.arange(_DOCUMENTS, device=model.device) + (self.seed + 1) * 1_000_003 + shard * _DOCUMENTS,
            max_new_tokens=_SELF_TALK,
        )
        texts = [row[:n].tolist() for row, n in zip(output.tokens, output.num_tokens.tolist(), strict=True)]
        return [self.tokenizer.decode(text, skip_special_tokens=True).strip() for text in texts]


def _functions(text: str) -> list[tuple[str, str]]:
    """Of every documented function in a source: its beginning up to the end of its docstring, and the whole of it."""
    found = []
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the library ships files that are not meant to parse
        return []
    lines = [f"{line}\n" for line in text.split("\n")]  # as Python counts them: a form feed ends none
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            docstring_end, end = node.body[0].end_lineno, node.end_lineno
            assert docstring_end is not None and end is not None
            beginning = "".join(lines[node.lineno - 1 : docstring_end])
            if len(beginning) <= _MAX_CHARACTERS:
                found.append((beginning, "".join(lines[node.lineno - 1 : end])))
    return found


def digest(*given: object) -> str:
    """A digest of texts and tensors: integer tensors whole, of others some thousand numbers, which training changes."""
    made = hashlib.sha256()
    for one in given:
        if isinstance(one, Tensor):
            made.update(f"{one.dtype} {list(one.shape)}".encode())
            flat = one.detach().flatten()
            some = flat if not flat.is_floating_point() else flat[:: max(flat.numel() // 4096, 1)]
            made.update(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            made.update(str(one).encode())
    return made.hexdigest()[:16]


def digest_of(*modules: nn.Module) -> str:
    """A digest of their names, shapes and weights."""
    return digest(*(part for module in modules for item in module.state_dict().items() for part in item))


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Raise unless the folder's text is of this model, tokenizer and seed; in an empty folder, note that it will be."""
    note = folder / "text.json"
    if not note.exists() and any(folder.glob("shard-*")):
        raise ValueError(f"prepare: folder must be empty or say in text.json what its text is of, {folder} does not")
    if not note.exists():

        def write(unfinished: Path) -> None:
            unfinished.write_text(json.dumps(about), encoding="utf-8")

        write_whole(note, write)
    try:
        kept = json.loads(note.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"prepare: folder must hold a text.json that is whole, {note} is not: {error}") from error
    if kept != about:
        raise ValueError(f"prepare: folder must hold text of {about}, {folder} holds some of {kept}; take another one")


def prepare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    num_tokens: int,
    seed: int = 0,
    advance: Callable[[int], object] = lambda n: None,
) -> list[Path]:
    """Make shards in `folder` until they hold `num_tokens` tokens; those already there are counted, not made again.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerBase
    folder : Path
        Made if need be.
    num_tokens : int
        Of text, prompts included.
    seed : int
        Of everything random.
    advance : callable
        Told how many tokens each shard brought.

    Returns
    -------
    list of Path
        Of `Features`, in order.

    Raises
    ------
    TypeError, ValueError
        Another type, or a number out of its range; a folder with text of another model, tokenizer or seed, as its
        ``text.json`` says, or with a damaged shard.
    OSError
        A shard could not be written.
    """
    check_model("prepare", "model", model)
    check_path("prepare", "folder", folder)
    check_int("prepare", "num_tokens", num_tokens, 0, 2**40)
    check_int("prepare", "seed", seed, 0, 2**40)
    check_callable("prepare", "advance", advance)
    check_tokenizer(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    words = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    _claim(folder, {"seed": seed, "model": digest_of(model), "tokenizer": digest(words)})
    seeds: Seeds | None = None
    paths: list[Path] = []
    while num_tokens > 0:
        shard = len(paths)
        path = folder / f"shard-{shard:05}.safetensors"
        if not path.exists():
            seeds = seeds or Seeds(tokenizer, seed)
            turn, kind = divmod(shard, _SOURCE_EVERY)
            if kind == _SOURCE_EVERY - 1:
                documents = seeds.source(turn)
            else:
                number = turn * (_SOURCE_EVERY - 1) + kind
                prompts = seeds.prompts(model, number)
                documents = distill(model, tokenizer, prompts, seed * 1_000_003 + number * _DOCUMENTS)
            extract(model, documents).save(path)
        paths.append(path)
        count = num_tokens_of(path)
        num_tokens -= count
        advance(count)
    return paths


def num_tokens_of(path: Path) -> int:
    """Tokens of a shard, without reading it all."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            shape: list[int] = file.get_slice("tokens").get_shape()
    except SafetensorError as error:
        raise ValueError(f"medusa: {path} must be a whole shard (remove it to make it anew), got {error}") from error
    return shape[0]
