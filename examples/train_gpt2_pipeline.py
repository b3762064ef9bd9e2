"""Train a small GPT-2 through a pipeline on four CPU processes, and on one, and print both losses side by side.

The model comes from ``transformers`` as it is, randomly initialized; its embedding and its head are one weight, on the first
and on the last stage. The pins ask for four stages and eight micro-batches; the search decides the rest: schedule, stages a
rank, cuts, recomputation. The loop is that of ``demo.py``: the call runs the whole schedule, ``backward()`` hands out its
gradients.

    python examples/train_gpt2_pipeline.py                                     the searched pipeline
    python examples/train_gpt2_pipeline.py --pins pp=2,dp=2,schedule=1f1b      one of your own

Beside the plan it writes the predicted step as a trace for https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import torch
from demo import SEQUENCE, VOCABULARY, run
from transformers import GPT2Config, GPT2LMHeadModel


def make_model() -> GPT2LMHeadModel:
    """Eight layers of four heads; the same weights on every process."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=128, n_head=4, n_positions=SEQUENCE, vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )
    return GPT2LMHeadModel(config)


if __name__ == "__main__":
    run(make_model, "a small GPT-2 through a pipeline", "pp=4,microbatches=8", "gpt2_pipeline.plan.json")
