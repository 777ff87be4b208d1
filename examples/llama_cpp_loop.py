"""Prompt lookup around llama.cpp: the verify step reads the logits where llama.cpp has left them.

pip install llama-cpp-python
python examples/llama_cpp_loop.py MODEL.gguf "a prompt"
"""

import ctypes
import sys

if __name__ == "__main__" and len(sys.argv) != 3:
    sys.exit(__doc__)  # before llama_cpp can be missing

import llama_cpp
import numpy as np
import torch

import specdec_kernels as sk
from specdec_kernels.host import NgramIndex


def scored(llama, batch, tokens, past, num_rows):
    """Feed `tokens` after `past` others; the last rows of logits, ``[1, num_rows, vocab]``, in llama.cpp's memory."""
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, past + i, 1, 0
        batch.logits[i] = i >= len(tokens) - num_rows
    if llama_cpp.llama_decode(llama.ctx, batch) != 0:
        raise RuntimeError("llama_decode failed: is n_ctx large enough?")
    rows = ctypes.cast(llama_cpp.llama_get_logits(llama.ctx), ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(rows, (1, num_rows, llama.n_vocab())))


def speculate(llama, prompt, sampling, *, seed=0, num_draft=5, max_new_tokens=64):
    """What `llama` says after the tokens `prompt`, drawn from its own distribution, and the number of verify steps."""
    text, step, seeds, index = list(prompt), 0, torch.tensor([seed]), NgramIndex(1, 3, 1)
    index.append(0, np.array(text))
    batch, memory = llama_cpp.llama_batch_init(llama.n_batch, 0, 1), llama_cpp.llama_get_memory(llama.ctx)
    llama_cpp.llama_memory_clear(memory, True)
    for past in range(0, len(text) - 1, llama.n_batch):  # all but the last token, which the loop reads first
        scored(llama, batch, text[past : min(past + llama.n_batch, len(text) - 1)], past, 1)
    while len(text) < len(prompt) + max_new_tokens and llama.token_eos() not in text[len(prompt) :]:
        room = len(prompt) + max_new_tokens - len(text) - 1  # a step emits a token more than it drafts
        tokens, counts = index.propose(min(num_draft, room, llama.n_batch - 1))
        draft = torch.from_numpy(tokens[:, : counts[0]].copy())
        logits = scored(llama, batch, [text[-1], *draft[0].tolist()], len(text) - 1, draft.shape[1] + 1)
        out = sk.verify_chain(
            logits, draft, seeds=seeds, step=step, params=sampling, eos_token_ids=torch.tensor([llama.token_eos()])
        )
        new = out.tokens[0, : int(out.num_tokens)].tolist()
        text, step = text + new, step + 1
        index.append(0, np.array(new))
        if not llama_cpp.llama_memory_seq_rm(memory, 0, len(text) - 1, -1):  # forget what was rejected
            raise RuntimeError("this model's memory cannot forget tokens, as that of recurrent models")
    llama_cpp.llama_batch_free(batch)
    return text, step


if __name__ == "__main__":
    llama = llama_cpp.Llama(sys.argv[1], n_ctx=2048, verbose=False)
    text, steps = speculate(llama, llama.tokenize(sys.argv[2].encode()), sk.SamplingParams(temperature=0.8, top_p=0.95))
    print(llama.detokenize(text).decode(errors="replace"), f"\n({steps} steps)")
