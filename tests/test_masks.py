"""Masks that are known before the model runs, at batches whose mask would fill the memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from meshwright.api import plan
from meshwright.compiler.capture.capture import capture
from meshwright.programs import checked_program
from meshwright.runtime.attention.bands import AHEAD, CAUSAL, runs_of


def _windowed(length: int, window: int) -> tuple[str, list[object]]:
    config = MistralConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=1, vocab_size=64, max_position_embeddings=length, use_cache=False,
                           sliding_window=window)
    with torch.device("meta"):
        model = MistralForCausalLM(config)
    graph = capture(model, (), {"input_ids": torch.zeros((2, length), dtype=torch.int64, device="meta")})
    (attention,) = [op for op in graph.ops if "attention" in op.target or "window" in op.target]
    return attention.target, list(attention.args[3:])


def test_a_window_is_recognized_at_any_length() -> None:
    """Compared element by element, and by the order of places where it is too large to make; one that covers all is none."""
    assert _windowed(64, 5) == ("mw.window", [16**-0.5, 4, 0, 64])
    assert _windowed(65536, 4096) == ("mw.window", [16**-0.5, 4095, 0, 65536])
    assert _windowed(64, 64)[0] == "aten.scaled_dot_product_attention.default"


class Masked(nn.Module):
    """Attention under a mask that is no band: two bands, a band with a hole, one that moves with the sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        away = torch.arange(x.shape[-2])[:, None] - torch.arange(x.shape[-2])
        mask = (away >= 0) & (away < 3)
        if self.kind == "two":
            mask = mask | (away == 5)
        if self.kind == "hole":
            mask = mask & ~((away == 1) & (torch.arange(x.shape[-2]) == 4))
        if self.kind == "given":
            mask = mask & (torch.arange(x.shape[-2]) < lengths[:, None, None, None])
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


@pytest.mark.parametrize("kind", ["two", "hole", "given", "band"])
def test_what_is_no_band_keeps_its_mask(kind: str) -> None:
    graph = capture(Masked(kind), (torch.randn(2, 2, 8, 4), torch.tensor([8, 5])), {})
    (attention,) = [op for op in graph.ops if "attention" in op.target or "window" in op.target]
    assert (attention.target == "mw.window") == (kind == "band")


def test_blocks_of_a_band_cover_it_once() -> None:
    """Every size, shift and reach of a few, against the mask itself."""
    for rows, keys, shift, before, after in itertools.product((1, 3, 7), (1, 4, 6), range(-4, 7), (0, 1, 5), (0, 2)):
        seen = torch.zeros(rows, keys, dtype=torch.int64)
        for (q0, q1, k0, k1, _, kind), count, step in runs_of(((0, rows, 0, keys, shift),), before, after):
            away = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None]
            assert count == 1 or max(q1 - q0, k1 - k0) <= step
            for by in range(0, count * step, step):
                sees = away <= 0 if kind == CAUSAL else away >= 0 if kind == AHEAD else away == away
                seen[q0 + by : q1 + by, k0 + by : k1 + by] += sees.long()
        away = torch.arange(keys) - torch.arange(rows)[:, None] - shift
        assert torch.equal(seen, ((away >= -before) & (away <= after)).long()), (rows, keys, shift, before, after)


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


def test_ranks_make_the_masks_of_their_own_samples() -> None:
    """Where the batch is split, of the mask a rank holds what its micro-batches read; every rank makes all of it elsewhere."""
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=64,
                        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.device("meta"):
        model, ids = BertForMaskedLM(config), torch.zeros((64, 128), dtype=torch.int64)
    cases = [({"dp": 8, "tp": 1}, 8), ({"dp": 4, "tp": 2}, 4), ({"pp": 2, "dp": 2, "tp": 2}, 2), ({"dp": 1, "tp": 8}, 1)]
    for pins, data in cases:
        made = plan(model, "h100:1x8", ((), {"input_ids": ids, "attention_mask": ids, "labels": ids}), progress=False,
                    pins={**pins, "microbatches": 4})
        held = [value for segment in checked_program(made, 0).segments if segment.prologue for name, value in
                segment.graph.values.items() if name in segment.graph.outputs and len(value.shape) == 4]
        assert {value.shape for value in held} == {(64 // data // 4, 1, 128, 128)}
