"""What has to be known of a transformers model before it can be run: whether it is served, and what its config says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...checks import LOGIT_DTYPES, items

DECODERS = frozenset(
    "cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox gpt_oss granite helium llama "
    "ministral mistral mixtral olmo olmo2 olmo3 phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm "
    "starcoder2".split()
)
"""``config.model_type`` of the decoder-only models served: those whose ragged forward is tested against a full one."""
ENCODER_DECODERS = frozenset({"t5", "mt5"})
"""``config.model_type`` of the encoder-decoders served."""

_DYNAMIC = "torch.ao.nn.quantized.dynamic"  # where such layers come from
_LEARNED_POSITIONS = frozenset({"gpt2"})
_ONE_WINDOW = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"})  # one window for every layer


def check_served(model: Any, caller: str, name: str = "") -> None:
    """Raise unless `model` can be served.

    Raises
    ------
    ValueError
        A model that cannot be served, by name, with the reason; begins with `caller`, and with the argument's `name`
        where there are several models.
    """
    reason = _why_not(model)
    if reason is not None:
        role = f" as {name}" if name else ""
        raise ValueError(f"{caller}: {type(model).__name__} cannot be served{role}: {reason}")


def _why_not(model: Any) -> str | None:
    """Why `model` cannot be served, or None if it can."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type is None or not callable(model):
        return "it is neither a transformers model nor a specdec_kernels.decoding.Runner"
    if model_type not in DECODERS | ENCODER_DECODERS:
        known = ", ".join(sorted(DECODERS | ENCODER_DECODERS))
        return f"model type {model_type!r} is not among those whose cache and positions are understood ({known})"
    if not callable(getattr(model, "get_output_embeddings", None)) or model.get_output_embeddings() is None:
        return "it has no language-model head"
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return "its language-model head has no weight [vocab, hidden]"
    if any(type(module).__module__.startswith(_DYNAMIC) for module in model.modules()):
        return "its layers are quantised dynamically: a row's logits would depend on the rows beside it"
    if model_type not in ENCODER_DECODERS and getattr(config, "add_cross_attention", False):
        return "a decoder with cross attention needs an encoder's states"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention is bidirectional"
    if unknown := set(attention_windows(config)) - {"all", "full_attention", "sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(unknown))}"
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation not in ("eager", "sdpa"):
        return f"attention implementation {implementation!r} takes no additive mask; load it with 'sdpa' or 'eager'"
    if moving := _rope_types(config) & {"dynamic", "longrope"}:
        # Its frequencies depend on the longest sequence of the batch, so a sequence would depend on its neighbours.
        return f"rotary embedding of type {', '.join(sorted(moving))} changes with the length of the batch"
    if model.dtype not in LOGIT_DTYPES:
        return f"its dtype is {model.dtype}; float32, bfloat16 and float16 are verified"
    if model.training:
        return "it is in training mode; call model.eval()"
    if len(devices := {str(parameter.device) for parameter in model.parameters()} - {"meta"}) > 1:
        return f"its layers are on several devices: {', '.join(sorted(devices))}"
    return None


def same_vocabulary(tokenizer: Any, other: Any) -> bool:
    """Whether two tokenizers give the same tokens the same ids."""
    known: list[Any] = [getattr(one, "get_vocab", dict)() for one in (tokenizer, other)]
    return bool(known[0]) and known[0] == known[1]


def attention_windows(config: Any) -> dict[str, int | None]:
    """Sliding window of each kind of attention layer, by its name in ``config.layer_types``, or of "all" of them; None:
    sees everything.
    """
    window = getattr(config, "sliding_window", None)
    if config.model_type in _ONE_WINDOW:  # whatever `layer_types` says
        return {"all": window}
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ["all"])
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def layer_windows(config: Any) -> list[int | None]:
    """The window of each attention layer of a decoder, see `attention_windows`."""
    windows = attention_windows(config)
    layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    return [windows[kind] for kind in (["all"] * layers if "all" in windows else config.layer_types)]


def positions_end(config: Any) -> bool:
    """Whether positions are looked up in a table, which ends."""
    return config.model_type in _LEARNED_POSITIONS


def max_length(config: Any) -> int | None:
    """Longest sequence that the model can hold; None where positions are scaled to reach further, or have no end."""
    if positions_end(config) or _rope_types(config) == {"default"}:
        return int(config.max_position_embeddings)
    return None


def end_ids(model: Any) -> tuple[int, ...]:
    """The ids that its generation config names as ends; where it has none, its config."""
    config = getattr(model, "generation_config", None) or getattr(model, "config", None)
    named = getattr(config, "eos_token_id", None)
    return () if named is None else tuple(items(named))


def prompt_padding(model: Any) -> int | None:
    """The padding id that its config, or its generation config, names."""
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        value = getattr(config, "pad_token_id", None)
        if value is not None and value >= 0:  # some configs say −1 for none
            return int(value)
    return None


def padding_id(model: Any) -> int:
    """Its padding id, or an end id, or 0."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(config, name, None)
            value = None if value is None else next(iter(items(value)), None)
            if value is not None and value >= 0:
                return int(value)
    return 0


def _rope_types(config: Any) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return {str(r.get("rope_type")) for r in [rope, *nested] if r.get("rope_type")}
