"""Masks that are known before the model runs, at batches whose mask would fill the memory."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.compiler.capture.capture import capture


def test_a_causal_mask_is_recognized_at_any_batch() -> None:
    """At 4,096 rows of 2,048 tokens the boolean mask has 1.7e10 elements, its positions 8.4e6."""
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2, vocab_size=64, max_position_embeddings=2048, use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros((4096, 2048), dtype=torch.int64, device="meta")
    graph = capture(model, (), {"input_ids": ids})
    (attention,) = [op for op in graph.ops if op.target.startswith("aten.scaled_dot_product_attention")]
    assert attention.args[3] is None
    assert attention.args[5] is True
