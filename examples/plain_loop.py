"""A speculative decoding loop in plain torch and transformers, for one sequence: what a loop of your own needs.

python examples/plain_loop.py TARGET DRAFT "a prompt"      # two models that share a tokenizer, names or folders
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import specdec_kernels as sk


@torch.inference_mode()
def speculate(target, draft, ids, sampling, *, seed=0, num_draft=4, max_new_tokens=64, eos_token_ids=None):
    """`ids`, ``[1, length]`` of at least 2, and what `target` says next, drawn from its own distribution."""
    text, step, seeds = ids, 0, torch.tensor([seed], device=ids.device)
    caches = DynamicCache(), DynamicCache()
    vocab = min(model.config.vocab_size for model in (target, draft))  # ids that only one of them has are padding
    for model, cache in zip((target, draft), caches, strict=True):  # transformers 5.24 renames it to cache=
        model(text[:, :-1], past_key_values=cache)  # all but the last token, which the loop reads first
    while text.shape[1] < ids.shape[1] + max_new_tokens:
        num = min(num_draft, ids.shape[1] + max_new_tokens - text.shape[1] - 1)  # a step emits a token more
        noise, rows, tokens = sk.uniform_samples(seeds, step, num, "draft"), [], [text[:, :0]]
        pending = text[:, caches[1].get_seq_length() :]  # what the draft has not read yet
        for i in range(num):
            rows.append(draft(pending, past_key_values=caches[1]).logits[:, -1:, :vocab])
            pending = sk.sample(rows[-1], sampling, uniform_samples=noise[:, i : i + 1]).token
            tokens.append(pending)
        tokens, rows = torch.cat(tokens, 1), torch.cat(rows, 1) if rows else None
        scored = target(torch.cat([text[:, -1:], tokens], 1), past_key_values=caches[0]).logits[..., :vocab]
        out = sk.verify_chain(
            scored, tokens, rows, seeds=seeds, step=step, params=sampling, draft_params=sampling,
            eos_token_ids=eos_token_ids,
        )  # fmt: skip
        new = out.tokens[:, : int(out.num_tokens)]
        text, step = torch.cat([text, new], 1), step + 1
        for cache in caches:  # forget what was rejected
            if (rejected := cache.get_seq_length() - (text.shape[1] - 1)) > 0:
                cache.crop(-rejected)
        if eos_token_ids is not None and torch.isin(new, eos_token_ids).any():
            break
    return text


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    target_name, draft_name, prompt = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (target_name, draft_name)]
    ends = models[0].generation_config.eos_token_id  # one id, several, or none
    ends = None if ends is None else torch.tensor(ends).reshape(-1)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if AutoTokenizer.from_pretrained(draft_name).get_vocab() != tokenizer.get_vocab():
        sys.exit("the models must share a tokenizer")
    if ids.shape[1] < 2:
        sys.exit("the prompt must have two tokens or more")
    text = speculate(*models, ids, sk.SamplingParams(temperature=0.8, top_p=0.95), eos_token_ids=ends)
    print(tokenizer.decode(text[0]))
