"""Draft, verify and update in one graph of `torch.compile`: the ops are registered, so nothing breaks the graph."""

import torch

import specdec_kernels as sk

SAMPLING = sk.SamplingParams(temperature=0.8, top_k=50, top_p=0.9)


@torch.compile(fullgraph=True)
def verify(target_logits, draft_logits, seeds, steps, text, lengths):
    """One step on the device: the new tokens (−1 for the rest) are written after `lengths` in `text`; `lengths` grow.

    target_logits ``[batch, num_draft + 1, vocab]``, draft_logits ``[batch, num_draft, vocab]``; seeds, steps, lengths
    ``[batch]`` int64; text ``[batch, room]`` int64 with room for ``num_draft + 1`` more.
    """
    num_draft = draft_logits.shape[1]
    drawn = sk.sample(draft_logits, SAMPLING, uniform_samples=sk.uniform_samples(seeds, steps, num_draft, "draft"))
    out = sk.verify_chain(
        target_logits, drawn.token, draft_logits, seeds=seeds, step=steps, params=SAMPLING, draft_params=SAMPLING,
        draft_stats=drawn.stats, acceptance="block",
    )  # fmt: skip
    places = lengths[:, None] + torch.arange(num_draft + 1, device=text.device)
    return text.scatter(1, places, out.tokens), lengths + out.num_tokens, steps + 1


if __name__ == "__main__":
    batch, num_draft, vocab = 4, 5, 32000
    text, lengths = torch.zeros(batch, 64, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    seeds, steps = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
    for _ in range(3):
        target_logits = torch.randn(batch, num_draft + 1, vocab)
        draft_logits = target_logits[:, :-1] + 0.1 * torch.randn(batch, num_draft, vocab)
        text, lengths, steps = verify(target_logits, draft_logits, seeds, steps, text, lengths)
    print("tokens a step:", (lengths.float().mean() / 3).item())
