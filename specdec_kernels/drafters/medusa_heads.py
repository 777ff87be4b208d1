"""Medusa's heads: small layers beside the LM head that predict the tokens after the next one.

Head k, k = 0 … K − 1, reads the target's last hidden state at token t, from which the LM head predicts token t + 1, and
predicts token t + k + 2::

    softmax(W2 · (SiLU(W1ₖ · h) + h))

with W1 = 0 and W2 the LM head's rows at the start, so that a new head predicts what the LM head does (Cai et al., arXiv
2401.10774, section 2.1.1).

Three things differ from the paper. W2 has rows for a reduced vocabulary only, since one head over the whole of a small
model's vocabulary costs as much as a fifth of the model. And the heads share W2, unless told otherwise: it is then read
once a step for all of them, and stored once. In a short trial that cost no accuracy: of four heads of SmolLM2-135M,
after 200 steps of 512 tokens, the best token was right on held-out text in 0.157, 0.097, 0.077 and 0.061 of all cases
with one W2 of 4677 rows (8 MB in float16), and in 0.161, 0.100, 0.074 and 0.059 with a W2 of 4096 rows each (22 MB);
2618 tokens, standard error 0.007 or less (``specdec medusa train FILE --tokens 50000 --steps 200 --threads 1``, and
with ``--separate --vocab 4096``). And in training the first head weighs 1, not 0.8, and so on: the heads' loss is 1.25
times the paper's, to be borne in mind where it is weighed against the LM head's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checks import FLOAT_DTYPES, check_flag, check_instance, check_int, check_model, check_path, check_tensor
from ..files import write_whole
from ..types import TokenMap

_FORMAT = "specdec_kernels medusa heads, 1"


def _head_of(model: Any) -> Tensor:
    """The weights of a model's LM head, ``[vocab, hidden]``."""
    check_model("MedusaHeads", "model", model)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"MedusaHeads: model must have a language-model head, {type(model).__name__} has none")
    weight: Tensor = head.weight
    return weight


class MedusaHeads(nn.Module):
    """Heads of one target.

    Parameters
    ----------
    hidden_size, num_heads : int
        D and K.
    token_map : TokenMap
        The reduced vocabulary of the heads.
    shared : bool
        One W2 for all heads.

    Attributes
    ----------
    w1 : nn.Linear
        D to K·D, without bias: the W1 of all heads, one after the other.
    w2 : nn.ModuleList
        One or K of `nn.Linear` from D to vocab_draft, without bias.
    token_map : TokenMap
    accuracy : Tensor or None
        ``[K, ranks]`` float64: how often head k's token of rank i was right, as found by
        `specdec_kernels.medusa.count_accuracy`; `specdec_kernels.DraftTree.calibrated` makes a tree of it.
    card : dict
        What the heads were trained on and with, from the file that they came from.

    Raises
    ------
    TypeError, ValueError
        A parameter of another type, or a number below 1.
    """

    def __init__(self, hidden_size: int, num_heads: int, token_map: TokenMap, shared: bool = True) -> None:
        super().__init__()
        check_int("MedusaHeads", "hidden_size", hidden_size, 1, 2**31 - 1)
        check_int("MedusaHeads", "num_heads", num_heads, 1, None)
        check_flag("MedusaHeads", "shared", shared)
        check_instance("MedusaHeads", "token_map", token_map, TokenMap, "a TokenMap")
        self.hidden_size, self.num_heads, self.token_map = hidden_size, num_heads, token_map
        self.w1 = nn.Linear(hidden_size, num_heads * hidden_size, bias=False)
        self.w2 = nn.ModuleList(
            nn.Linear(hidden_size, len(token_map), bias=False) for _ in range(1 if shared else num_heads)
        )
        nn.init.zeros_(self.w1.weight)
        self.accuracy: Tensor | None = None
        self.card: dict[str, Any] = {}

    @classmethod
    def of_model(cls, model: Any, num_heads: int, token_map: TokenMap, shared: bool = True) -> MedusaHeads:
        """Untrained float32 heads of a transformers model, on its device: W1 = 0, W2 rows of its LM head.

        Raises
        ------
        TypeError, ValueError
            Not a transformers model, or one without an LM head; a token map with ids that it lacks; `num_heads` below
            1.
        """
        check_instance("MedusaHeads", "token_map", token_map, TokenMap, "a TokenMap")
        weight = _head_of(model)
        if token_map.max_id >= weight.shape[0]:
            raise ValueError(f"MedusaHeads: token_map must hold ids < vocab={weight.shape[0]}, got {token_map.max_id}")
        heads = cls(weight.shape[1], num_heads, token_map.to(weight.device), shared).to(weight.device)
        rows = weight.detach()[heads.token_map.draft_to_target]
        for layer in heads.layers:
            layer.weight.data.copy_(rows)
        return heads

    @property
    def layers(self) -> list[nn.Linear]:
        """The W2, one or K of them."""
        return [cast(nn.Linear, layer) for layer in self.w2]

    def outputs(self, hidden: Tensor) -> Tensor:
        """The input of W2, ``[..., K, D]``, from hidden states ``[..., D]`` of the weights' dtype.

        Raises
        ------
        TypeError, ValueError
            Another dtype, shape or device.
        """
        self._check_hidden(hidden, (self.w1.weight.dtype,))
        inner = nn.functional.silu(self.w1(hidden)).unflatten(-1, (self.num_heads, self.hidden_size))
        return inner + hidden[..., None, :]

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits over the reduced vocabulary, ``[..., K, vocab_draft]``, from hidden states ``[..., D]``.

        Raises
        ------
        TypeError, ValueError
            What `outputs` refuses.
        """
        outputs = self.outputs(hidden)
        if len(self.w2) == 1:
            logits: Tensor = self.layers[0](outputs)
            return logits
        return torch.stack([layer(outputs[..., k, :]) for k, layer in enumerate(self.layers)], dim=-2)

    def top_tokens(self, hidden: Tensor, num: int) -> Tensor:
        """Each head's `num` likeliest target ids, ``[..., K, num]`` int64, likeliest first; `hidden` may be any floats.

        Raises
        ------
        TypeError, ValueError
            What `outputs` refuses, except that any float dtype is taken; `num` outside 1 … vocab_draft.
        """
        self._check_hidden(hidden, FLOAT_DTYPES)
        check_int("MedusaHeads", "num", num, 1, len(self.token_map))
        return self.token_map.draft_to_target[self(hidden.to(self.w1.weight.dtype)).topk(num, dim=-1).indices]

    def draft_labels(self, labels: Tensor) -> Tensor:
        """Target ids (int64; negative: none) as ids of the reduced vocabulary; −100 for those outside it.

        Raises
        ------
        TypeError, ValueError
            Another dtype or device.
        """
        inverse = self.token_map.target_to_draft
        check_tensor("MedusaHeads", "labels", labels, (torch.int64,), inverse.device)
        known = (labels >= 0) & (labels < inverse.numel())
        ids = torch.where(known, inverse[labels.clamp(0, inverse.numel() - 1)], -1)
        return torch.where(ids >= 0, ids, -100)

    def save(self, path: Path | str) -> None:
        """Write a safetensors file: weights in float16, the vocabulary, accuracies, and the card as metadata.

        Raises
        ------
        TypeError
            `path` is not a Path or str.
        OSError
            The file could not be written.
        """
        from safetensors.torch import save_file

        check_path("MedusaHeads", "path", path, (str, Path))
        path = Path(path)
        tensors = {
            "w1": self.w1.weight.detach().to("cpu", torch.float16).unflatten(0, (self.num_heads, self.hidden_size)),
            "w2": torch.stack([layer.weight.detach().to("cpu", torch.float16) for layer in self.layers]),
            "draft_to_target": self.token_map.draft_to_target.to("cpu", torch.int32),
        }
        if self.accuracy is not None:
            tensors["accuracy"] = self.accuracy.to("cpu", torch.float64).contiguous()
        metadata = {"format": _FORMAT, "card": json.dumps(self.card)}
        write_whole(path, lambda unfinished: save_file(tensors, unfinished, metadata=metadata))

    @staticmethod
    def load(path: Path | str, model: Any = None) -> MedusaHeads:
        """Read what `save` wrote, as float32 without gradients.

        Parameters
        ----------
        path : Path or str
        model : PreTrainedModel, optional
            The target: the heads are checked against it and put on its device.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        TypeError, ValueError
            A file that holds no heads, tensors whose shapes do not fit each other, ids that are no integers, or heads
            of another model than `model`.
        """
        from safetensors import SafetensorError, safe_open

        check_path("MedusaHeads", "path", path, (str, Path))
        head = None if model is None else _head_of(model)
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"MedusaHeads: {path} is not a safetensors file: {error}") from error
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"MedusaHeads: {path} must have the format {_FORMAT!r}, got {metadata.get('format')!r}")
        missing = {"w1", "w2", "draft_to_target"} - set(tensors)
        if missing:
            raise ValueError(f"MedusaHeads: {path} must hold w1, w2 and draft_to_target, got no {min(missing)}")
        w1, w2, ids, accuracy = *(tensors[n] for n in ("w1", "w2", "draft_to_target")), tensors.get("accuracy")
        if w1.dim() != 3 or w1.shape[1] != w1.shape[2]:
            raise ValueError(f"MedusaHeads: w1 must be [heads, hidden, hidden], got {list(w1.shape)}")
        num_heads, hidden = w1.shape[:2]
        if ids.dim() != 1 or w2.shape not in ((1, len(ids), hidden), (num_heads, len(ids), hidden)):
            raise ValueError(
                f"MedusaHeads: w2 must be [1 or heads={num_heads}, vocab_draft={ids.numel()}, hidden={hidden}], got "
                f"{list(w2.shape)}"
            )
        if accuracy is not None and (accuracy.dim() != 2 or accuracy.shape[0] != num_heads):
            raise ValueError(f"MedusaHeads: accuracy must be [heads={num_heads}, ranks], got {list(accuracy.shape)}")
        heads = MedusaHeads(hidden, num_heads, TokenMap(ids), shared=w2.shape[0] == 1)
        heads.w1.weight.data.copy_(w1.flatten(0, 1))
        for layer, weight in zip(heads.layers, w2, strict=True):
            layer.weight.data.copy_(weight)
        heads.accuracy = accuracy
        heads.card = json.loads(metadata.get("card", "{}"))
        if head is not None:
            heads.check_fits(*head.shape)
            heads = heads.to(head.device)
        return heads.requires_grad_(False)

    def check_fits(self, vocab: int, hidden: int) -> None:
        """Check that these can be the heads of a target with this vocabulary and hidden size.

        Raises
        ------
        TypeError, ValueError
            They cannot, or a size is no integer >= 1.
        """
        check_int("MedusaHeads", "vocab", vocab, 1, None)
        check_int("MedusaHeads", "hidden", hidden, 1, None)
        if hidden != self.hidden_size or self.token_map.max_id >= vocab:
            raise ValueError(
                f"MedusaHeads: heads must be of hidden={hidden} and ids < vocab={vocab}, got hidden={self.hidden_size} "
                f"and ids up to {self.token_map.max_id}"
            )

    def _check_hidden(self, hidden: object, dtypes: tuple[torch.dtype, ...]) -> None:
        check_tensor("MedusaHeads", "hidden", hidden, dtypes, self.w1.weight.device)
        assert isinstance(hidden, Tensor)
        if hidden.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"MedusaHeads: hidden must be [..., hidden={self.hidden_size}], got {list(hidden.shape)}")

    def _apply(self, fn: Any, recurse: bool = True) -> MedusaHeads:
        super()._apply(fn, recurse)
        self.token_map = self.token_map.to(self.w1.weight.device)
        return self
