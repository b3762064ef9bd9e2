"""Predicted peak bytes per rank against torch's own ``MemTracker``: real models, real sizes, no memory and no devices.

    python benchmarks/memory.py [NAME ...] [--list] [--json] [--shallow]

Every program is planned with its pins, lowered for rank 0 (of a pipeline: for a rank of every stage group) and built as the
real ``ParallelModule`` (generated code, FSDP2, torch's pipeline schedules, AdamW) on fake tensors over a fake process group,
which returns at once. ``MemTracker`` counts the storages alive in a training step that finds the optimizer's state. Goal:
within 5% of the tracked peak, never more than 2% below it. ``--shallow``: the deeper models in four layers of the same widths
and two pipeline ranks in four micro-batches, as the tests run them: what is counted of a layer is counted of each, more
micro-batches are not in flight together, and the tracker follows fewer operators.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, stage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.cost.cluster import Cluster
from meshwright.footprint import footprints
from meshwright.ir.declared.experts import with_imbalance
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import PP
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.lengths import longest, loss_alone
from meshwright.passes import cut_stages, rank_program
from meshwright.planner import OPTIMIZERS, capture_model, make_plan, rules_of
from meshwright.runtime import draws
from meshwright.runtime.assemble import assemble, data_meshes, fused_axes
from meshwright.runtime.checks import tensors
from meshwright.runtime.experts import mixture
from meshwright.runtime.groups import make_groups
from meshwright.runtime.module import ParallelModule
from meshwright.runtime.pipeline.pipeline import PipelineStages

CPU = torch.device("cpu")


def gpt2(layers: int, hidden: int, heads: int) -> nn.Module:
    """GPT-2 of any size, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, n_positions=1024, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ))


def gpt2_dropout() -> nn.Module:
    """GPT-2 small with dropout but in attention, whose kernel with dropout on the CPU keeps the scores (on a GPU none does)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False, attn_pdrop=0.0))


def llama(layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int) -> nn.Module:
    """Llama of any size, untied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=2048, use_cache=False, tie_word_embeddings=False,
    ))


def mistral() -> nn.Module:
    """Mistral of two layers, whose window is a part of the sequence."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8192, max_position_embeddings=4096, sliding_window=256, use_cache=False,
    ))


def bert() -> nn.Module:
    """Four layers whose logits are as wide as BERT's."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, vocab_size=30522,
    ))


def t5() -> nn.Module:
    """T5 of two layers on each side: a position bias that takes a gradient, and attention between two sequences."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_heads=8, vocab_size=8192, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    ))


def t5_tables() -> nn.Module:
    """The same with a large vocabulary, of whose one table encoder, decoder and head read: few tokens hold little beside it."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        d_model=512, d_kv=64, d_ff=1024, num_layers=2, num_heads=8, vocab_size=32128, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    ))


def mixtral(balanced: bool = False, chosen: int = 2) -> nn.Module:
    """A small mixture of 8 experts, ``chosen`` per token. ``balanced``: their load counts for the loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8192, num_local_experts=8, num_experts_per_tok=chosen, max_position_embeddings=1024, use_cache=False,
        output_router_logits=balanced,
    ))


def mixtral_balanced() -> nn.Module:
    """The same with load balancing."""
    return mixtral(balanced=True)


def mixtral_single() -> nn.Module:
    """The same with one expert per token, so that it is told how many rows go to other ranks."""
    return mixtral(chosen=1)


def vit(layers: int = 12) -> nn.Module:
    """ViT-Base on 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))


@dataclass(frozen=True)
class Case:
    """A program: a model, its global batch, the pins."""

    model: Callable[[], nn.Module]
    batch: tuple[int, ...]
    world: int
    pins: Mapping[str, Any]
    precision: str = "fp32"
    images: bool = field(default=False)
    loss_fn: Callable[..., Any] | None = None


def example(batch: tuple[int, ...], images: bool) -> dict[str, torch.Tensor]:
    """A global batch, without contents."""
    if images:
        return {"pixel_values": torch.empty(batch), "labels": torch.zeros(batch[0], dtype=torch.int64)}
    ids = torch.zeros(batch, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def small() -> nn.Module:
    """GPT-2 small."""
    return gpt2(12, 768, 12)


def medium() -> nn.Module:
    """GPT-2 medium."""
    return gpt2(24, 1024, 16)


def llama_1b() -> nn.Module:
    """Llama 3.2 1B's dims."""
    return llama(16, 2048, 32, 8, 8192, 128256)


def llama_small() -> nn.Module:
    """Llama of 110 million parameters."""
    return llama(12, 768, 12, 12, 2048, 32000)


def llama_narrow() -> nn.Module:
    """Llama of two layers and few words: the worst moment is in a block's backward."""
    return llama(2, 64, 4, 2, 192, 512)


def llama_long() -> nn.Module:
    """Llama of few words, of whose long sequences little but activations is held."""
    return llama(3, 512, 8, 4, 1536, 512)


def llama_weights() -> nn.Module:
    """Llama of few words: of short sequences its stages hold little but weights, their copies and gradients."""
    return llama(4, 512, 8, 8, 1536, 512)


def gpt2_drawing() -> nn.Module:
    """GPT-2 with dropout in attention too, which blocks of a split sequence form the scores for."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=2, n_head=8, vocab_size=1024, n_positions=4096, use_cache=False))


def gpt2_two() -> nn.Module:
    """GPT-2 small's dims in two layers."""
    return gpt2(2, 768, 12)


SHALLOW: Mapping[Callable[[], nn.Module], Callable[[], nn.Module]] = {
    small: partial(gpt2, 4, 768, 12), medium: partial(gpt2, 4, 1024, 16), vit: partial(vit, 4),
    llama_1b: partial(llama, 4, 2048, 32, 8, 8192, 128256), llama_small: partial(llama, 4, 768, 12, 12, 2048, 32000),
}
"""{a deep model: it in four layers}."""


STAGES: Mapping[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "zero": 0, "microbatches": 8}
CASES: Mapping[str, Case] = {
    "gpt2-small zero 0": Case(small, (8, 1024), 4, {"dp": 4, "tp": 1, "zero": 0}),
    "gpt2-small zero 1 x4": Case(small, (16, 1024), 4, {"dp": 4, "tp": 1, "zero": 1, "microbatches": 4}),
    "gpt2-small zero 2 bf16": Case(small, (32, 1024), 4, {"dp": 4, "tp": 1, "zero": 2}, "bf16"),
    "gpt2-small dropout": Case(gpt2_dropout, (8, 1024), 4, {"dp": 4, "tp": 1, "zero": 0}),
    "gpt2-medium zero 3": Case(medium, (16, 1024), 8, {"dp": 8, "tp": 1, "zero": 3}),
    "gpt2-medium zero 3 full": Case(medium, (32, 1024), 8, {"dp": 8, "tp": 1, "zero": 3, "recompute": "full"}, "bf16"),
    "gpt2-medium one device": Case(medium, (4, 1024), 1, {"dp": 1, "tp": 1}, "bf16"),
    "gpt2-medium tp 2": Case(medium, (8, 1024), 4, {"dp": 2, "tp": 2, "zero": 0}),
    "llama-110m zero 3 x4": Case(llama_small, (32, 1024), 4, {"dp": 4, "tp": 1, "zero": 3, "microbatches": 4}),
    "llama-1b tp 2 bf16": Case(llama_1b, (8, 2048), 8, {"dp": 4, "tp": 2, "zero": 2}, "bf16"),
    "llama-1b zero 3 bf16": Case(llama_1b, (8, 2048), 8, {"dp": 8, "tp": 1, "zero": 3}, "bf16"),
    "llama-1b sequence parallel": Case(
        llama_1b, (8, 2048), 4, {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True, "microbatches": 4}, "bf16"),
    "llama-1b full x4": Case(llama_1b, (32, 2048), 4, {"dp": 4, "tp": 1, "zero": 2, "recompute": "full", "microbatches": 4},
                             "bf16"),
    "llama-110m selective": Case(llama_small, (32, 1024), 4, {"dp": 4, "tp": 1, "zero": 2, "recompute": "selective"}),
    "gpt2-small selective tp 2": Case(
        small, (16, 1024), 4, {"dp": 2, "tp": 2, "zero": 3, "recompute": "selective", "microbatches": 4}, "bf16"),
    "llama-110m tp 2 full": Case(llama_small, (16, 1024), 4, {"dp": 2, "tp": 2, "zero": 0, "recompute": "full"}),
    "llama-110m cp 2 ring": Case(llama_small, (2, 4096), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "llama-110m cp 4 ring full": Case(
        llama_small, (2, 4096), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 3, "attention": "ring", "recompute": "full"}, "bf16"),
    "llama-110m cp 4 all-gather": Case(
        llama_small, (2, 4096), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 1, "attention": "all-gather"}),
    "llama-110m cp 2 ulysses": Case(
        llama_small, (2, 4096), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 2, "attention": "ulysses"}, "bf16"),
    "llama-110m cp 2 loss in pieces": Case(
        llama_small, (1, 16384), 2,
        {"cp": 2, "dp": 1, "tp": 1, "zero": 3, "attention": "ring", "recompute": "full", "loss_rows": 1024}, "bf16",
        loss_fn=loss_alone),
    "llama-110m tp 2 loss in pieces": Case(
        llama_small, (4, 4096), 2, {"dp": 1, "tp": 2, "zero": 0, "recompute": "full", "loss_rows": 1024}, loss_fn=loss_alone),
    "llama-narrow cp 2 blocks": Case(
        llama_narrow, (1, 16384), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 3, "recompute": "full", "loss_rows": 2048}, "bf16",
        loss_fn=loss_alone),
    "llama-narrow cp 2 mlps in pieces": Case(
        llama_narrow, (1, 32768), 2,
        {"cp": 2, "dp": 1, "tp": 1, "zero": 3, "recompute": "full", "loss_rows": 2048, "mlp_rows": 2048}, "bf16",
        loss_fn=loss_alone),
    "llama-narrow tp 2 mlps in pieces": Case(
        llama_narrow, (1, 16384), 2, {"dp": 1, "tp": 2, "zero": 0, "recompute": "none", "mlp_rows": 1000}),
    "llama-long cp 1": Case(llama_long, (1, 8192), 1, {"dp": 1, "tp": 1, "zero": 0}),
    **{
        f"llama-long cp {ranks} {form}": Case(
            llama_long, (1, 8192), ranks, {"cp": ranks, "dp": 1, "tp": 1, "zero": 0, "attention": form})
        for ranks in (2, 4) for form in ("ring", "all-gather", "ulysses")
    },
    "mistral cp 1": Case(mistral, (2, 2048), 1, {"dp": 1, "tp": 1, "zero": 0}),
    "mistral cp 2 ring": Case(mistral, (2, 2048), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "mistral cp 2 ulysses": Case(mistral, (2, 2048), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ulysses"}),
    "mistral cp 4 ring": Case(mistral, (2, 2048), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "gpt2-two cp 1": Case(gpt2_two, (4, 1024), 1, {"dp": 1, "tp": 1, "zero": 0}),
    "gpt2-two cp 2 ring": Case(gpt2_two, (4, 1024), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "gpt2-two cp 2 ulysses": Case(gpt2_two, (4, 1024), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ulysses"}),
    "gpt2-two cp 4 ring": Case(gpt2_two, (4, 1024), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "gpt2-two cp 4 all-gather": Case(gpt2_two, (4, 1024), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 0, "attention": "all-gather"}),
    "gpt2-drawing cp 2 ring": Case(gpt2_drawing, (1, 4096), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "gpt2-drawing cp 2 all-gather": Case(
        gpt2_drawing, (1, 4096), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "all-gather"}),
    "t5 cp 1": Case(t5, (2, 512), 1, {"dp": 1, "tp": 1, "zero": 0}),
    "t5 cp 2 ring": Case(t5, (2, 512), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "t5 cp 4 ring": Case(t5, (2, 512), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}),
    "t5 bf16": Case(t5, (2, 512), 1, {"dp": 1, "tp": 1, "zero": 0}, "bf16"),
    "t5 cp 2 ring bf16": Case(t5, (2, 512), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 0, "attention": "ring"}, "bf16"),
    "t5 cp 2 ulysses bf16": Case(t5, (2, 512), 2, {"cp": 2, "dp": 1, "tp": 1, "zero": 1, "attention": "ulysses"}, "bf16"),
    "t5 cp 4 all-gather bf16": Case(t5, (2, 512), 4, {"cp": 4, "dp": 1, "tp": 1, "zero": 0, "attention": "all-gather"}, "bf16"),
    "t5 zero 3 bf16": Case(t5, (16, 512), 4, {"dp": 4, "tp": 1, "zero": 3}, "bf16"),
    "t5 tp 2 full bf16": Case(t5, (8, 512), 4, {"dp": 2, "tp": 2, "zero": 0, "recompute": "full"}, "bf16"),
    "t5 selective x4 bf16": Case(t5, (16, 512), 2, {"dp": 2, "tp": 1, "zero": 2, "recompute": "selective", "microbatches": 4},
                                 "bf16"),
    "t5 1f1b bf16": Case(t5, (8, 512), 2, {**STAGES, "schedule": "1f1b"}, "bf16"),
    "bert tp 4 x2 bf16": Case(bert, (8, 512), 4, {"dp": 1, "tp": 4, "microbatches": 2}, "bf16"),
    "bert tp 2 full x2": Case(bert, (16, 512), 4, {"dp": 2, "tp": 2, "zero": 1, "recompute": "full", "microbatches": 2}),
    "mixtral zero 2": Case(mixtral, (16, 512), 4, {"dp": 4, "ep": 1, "tp": 1, "zero": 2}),
    "mixtral zero 3 bf16": Case(mixtral, (16, 512), 4, {"dp": 4, "ep": 1, "tp": 1, "zero": 3}, "bf16"),
    "mixtral ep 2 zero 2 x2": Case(mixtral_single, (16, 512), 4, {"dp": 4, "ep": 2, "tp": 1, "zero": 2, "microbatches": 2}),
    "mixtral ep 2 zero 3 bf16": Case(mixtral_single, (16, 512), 4, {"dp": 4, "ep": 2, "tp": 1, "zero": 3}, "bf16"),
    "mixtral ep 2 zero 1 full": Case(mixtral_single, (16, 512), 4, {"dp": 4, "ep": 2, "tp": 1, "zero": 1, "recompute": "full"}),
    "mixtral tp 2 selective": Case(mixtral, (16, 512), 4, {"dp": 2, "ep": 1, "tp": 2, "zero": 1, "recompute": "selective"}),
    "mixtral full": Case(mixtral, (16, 512), 4, {"dp": 4, "ep": 1, "tp": 1, "zero": 0, "recompute": "full"}),
    "mixtral balanced x4": Case(mixtral_balanced, (16, 512), 2, {"dp": 2, "ep": 1, "tp": 1, "zero": 2, "microbatches": 4}),
    "mixtral balanced 1f1b": Case(mixtral_balanced, (16, 512), 2, {**STAGES, "schedule": "1f1b"}),
    "mixtral balanced interleaved": Case(
        mixtral_balanced, (16, 512), 2, {**STAGES, "schedule": "interleaved1f1b", "virtual_stages": 2}),
    "mixtral balanced full": Case(mixtral_balanced, (16, 512), 2, {**STAGES, "recompute": "full", "schedule": "1f1b"}),
    "vit zero 0": Case(vit, (128, 3, 224, 224), 4, {"dp": 4, "tp": 1, "zero": 0}, images=True),
    "vit zero 3 bf16": Case(vit, (256, 3, 224, 224), 4, {"dp": 4, "tp": 1, "zero": 3}, "bf16", images=True),
    "vit tp 2 selective x4": Case(
        vit, (256, 3, 224, 224), 4, {"dp": 2, "tp": 2, "zero": 1, "recompute": "selective", "microbatches": 4}, images=True),
    "vit one device full bf16": Case(vit, (16, 3, 224, 224), 1, {"dp": 1, "tp": 1, "recompute": "full"}, "bf16", images=True),
    "vit full bf16": Case(vit, (256, 3, 224, 224), 4, {"dp": 4, "tp": 1, "zero": 2, "recompute": "full"}, "bf16", images=True),
    "gpt2-small 1f1b": Case(small, (8, 1024), 2, {**STAGES, "schedule": "1f1b"}),
    "llama-weights tp 2 bf16": Case(llama_weights, (4, 128), 2, {"dp": 1, "tp": 2, "microbatches": 2}, "bf16"),
    "llama-weights pp 4 bf16": Case(llama_weights, (8, 128), 4, {**STAGES, "pp": 4, "schedule": "1f1b"}, "bf16"),
    "gpt2-small gpipe": Case(small, (8, 1024), 2, {**STAGES, "schedule": "gpipe"}),
    "gpt2-small interleaved": Case(small, (8, 1024), 2, {**STAGES, "schedule": "interleaved1f1b", "virtual_stages": 2}),
    "gpt2-small zb": Case(small, (8, 1024), 2, {**STAGES, "schedule": "zb", "virtual_stages": 1}),
    "gpt2-small zb loss alone bf16": Case(
        small, (8, 1024), 2, {**STAGES, "microbatches": 2, "schedule": "zb", "virtual_stages": 1}, "bf16", loss_fn=loss_alone),
    "gpt2-small zbv": Case(small, (8, 1024), 2, {**STAGES, "schedule": "zbv"}),
    "gpt2-small zb dp 2 bf16": Case(
        small, (16, 1024), 4, {**STAGES, "dp": 2, "zero": 1, "schedule": "zb"}, "bf16"),
    "gpt2-small zbv dp 2 bf16": Case(
        small, (16, 1024), 4, {**STAGES, "dp": 2, "zero": 0, "schedule": "zbv"}, "bf16"),
    "gpt2-small dualpipev": Case(small, (8, 1024), 2, {**STAGES, "schedule": "dualpipev"}),
    "t5-tables zb dp 2 bf16": Case(
        t5_tables, (16, 32), 4, {**STAGES, "dp": 2, "zero": 1, "schedule": "zb", "virtual_stages": 1}, "bf16"),
    "t5-tables zbv dp 2 bf16": Case(t5_tables, (16, 32), 4, {**STAGES, "dp": 2, "zero": 1, "schedule": "zbv"}, "bf16"),
    "llama-weights pp 2 dp 2 tp 2": Case(
        llama_weights, (8, 64), 8, {**STAGES, "dp": 2, "tp": 2, "zero": 2, "microbatches": 4, "schedule": "1f1b"}),
    "gpt2-small pp 4 zero 3": Case(small, (32, 1024), 8, {**STAGES, "pp": 4, "dp": 2, "zero": 3, "schedule": "1f1b"}),
    "gpt2-small pp 4 interleaved zero 1": Case(
        small, (32, 1024), 8,
        {**STAGES, "pp": 4, "dp": 2, "zero": 1, "schedule": "interleaved1f1b", "virtual_stages": 2}, "bf16"),
    "llama-110m zb tp 2 bf16": Case(
        llama_small, (16, 1024), 4, {**STAGES, "tp": 2, "schedule": "zb", "virtual_stages": 1}, "bf16"),
    "llama-110m zb dp 2 bf16": Case(
        llama_small, (16, 1024), 4, {**STAGES, "dp": 2, "zero": 1, "schedule": "zb", "virtual_stages": 1}, "bf16"),
    "llama-110m pp 2 tp 2 full": Case(
        llama_small, (32, 1024), 8, {**STAGES, "dp": 2, "tp": 2, "zero": 2, "recompute": "full", "schedule": "1f1b"}, "bf16"),
    "llama-110m pp 2 selective": Case(
        llama_small, (32, 1024), 8,
        {**STAGES, "dp": 2, "tp": 2, "zero": 1, "recompute": "selective", "schedule": "interleaved1f1b", "virtual_stages": 2,
         "sequence_parallel": True}, "bf16"),
}


def case_of(name: str, shallow: bool = False) -> Case:
    """The named program, or it in four layers, and of two pipeline ranks in half of its micro-batches (as many as stages, with
    two a rank): what is in flight is as much."""
    case = CASES[name]
    if not shallow:
        return case
    case = replace(case, model=SHALLOW.get(case.model, case.model))
    if case.pins.get("pp") != 2:
        return case
    pins = {**case.pins, "microbatches": case.pins["microbatches"] // 2}
    return replace(case, pins=pins, batch=(case.batch[0] // 2, *case.batch[1:]))


@cache
def graph_of(
    make: Callable[[], nn.Module], batch: tuple[int, ...], images: bool, precision: str,
    loss_fn: Callable[..., Any] | None = None,
) -> Graph:
    """The graph of a model at a global batch: parameters on the meta device. Programs that differ in pins share it."""
    with torch.device("meta"):
        model = make()
    return capture_model(model.train(), (), example(batch, images), (), loss_fn, precision)


def plan_of(case: Case) -> Plan:
    """The case's plan, memory of no concern; experts get as many rows each as ``balanced`` gives them."""
    graph = with_imbalance(graph_of(case.model, case.batch, case.images, case.precision, case.loss_fn), 1.0)
    return make_plan(graph, Cluster.parse(f"b200:1x{case.world}"), Pins(**case.pins), precision=case.precision)


@contextmanager
def real_meshes() -> Iterator[None]:
    """Device meshes made under a fake mode have real ranks: FSDP2 makes one per parameter that is split already."""
    init = DeviceMesh.__init__

    def outside(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            init(self, *args, **kwargs)

    with patch.object(DeviceMesh, "__init__", outside):
        yield


class NoModules:
    """Stands where ``MemTracker`` follows modules: it takes each once an iteration, and none around a split backward."""

    is_bw, parents = False, frozenset[str]()

    def register_user_hooks(self, *_: Any) -> None:
        """None is called."""

    clear_user_hooks = register_user_hooks

    def __enter__(self) -> None:
        """Nothing begins."""

    def __exit__(self, *_: object) -> None:
        """Nothing ends."""


def added_by_autograd(args: Sequence[Any]) -> bool:
    """Whether autograd adds two gradients of a value here, the first of which nobody else holds: it does so in place, but under
    a dispatch mode, as a tracker is, in a third tensor (torch's ``input_buffer.cpp``, ``can_accumulate_inplace``)."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("_fn", "inner", "wrapper"):  # decorators
        frame = frame.f_back
    if frame.f_code.co_name != "_engine_run_backward" or not all(isinstance(x, FakeTensor) for x in args):
        return False
    first, other = args
    held = torch._C._storage_Use_Count(first.untyped_storage()._cdata)  # by the tensor, and by this look at it
    return first.shape == other.shape and first.dtype == other.dtype and first._use_count() <= 4 and held <= 2


class Tracker(MemTracker):
    """``MemTracker``, which looks away from ``unseen_trials``, and is not asked on which device a fake tensor is: that is most
    of what it sees, and neither makes nor frees anything. It lets autograd add gradients in place (``added_by_autograd``)."""

    away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device
        if self.away:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and not kwargs and added_by_autograd(args):
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def unseen_trials(self) -> Iterator[None]:
        """DTensor tries every operator once, on fake tensors of the whole shape, which are no part of the program."""
        tries = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any, **kwargs: Any) -> Any:
            self.away = True
            try:
                return tries(*args, **kwargs)
            finally:
                self.away = False

        with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
            yield


def first_step(optimizer: torch.optim.Optimizer) -> None:
    """What a later step of a training loop finds of the first one: the optimizer's state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def given_shapes(_: Any, stages: Sequence[PipelineStage], *__: Any) -> None:
    """In place of the vote of all stages whether shapes are given, which a fake process group cannot take."""
    for one in stages:
        one._inference_mode = stage.InferenceMode.STATIC


def unread(parallel: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of the agreement before a call, which reads what the inputs hold."""
    engine, ports = parallel._engine[0], parallel._ports
    return (engine, *ports.bind(engine.program, ports.given(engine.program, args, kwargs)))


def balanced(counts: torch.Tensor, rows: int, beside: int = 0) -> list[Any]:
    """In place of the numbers of tokens that experts get, which fake tensors do not have: all the same."""
    if counts.ndim == 2:
        return [[rows // counts.numel()] * counts.shape[1]] * counts.shape[0]
    taken = len(counts) - beside
    return [rows // max(taken, 1)] * taken + [0] * beside


def tracked(plan: Plan, case: Case, rank: int = 0) -> dict[str, float]:
    """Peak bytes of a rank's training step by ``MemTracker``, in all and by its kinds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world)
    try:
        rules, _ = rules_of(plan.graph)
        program = cut_stages(rank_program(plan, rules, rank), plan.pipeline)
        stages = program.stages
        sharing = [s.holders for s in stages.stored if s.trainable and len(s.holders) > 1] if stages else []
        groups = make_groups(program.mesh, CPU, fused_axes(program), PP if stages else None, sharing)
        everything = stages.stored if stages else program.stored
        meshes = data_meshes(everything, groups)
        names = [(fqn, stored) for stored in everything for fqn in stored.fqns if stored.value not in program.constants]
        with FakeTensorMode(allow_non_fake_inputs=True), real_meshes():
            engine = PipelineStages(program, groups, meshes) if stages else assemble(program, groups, meshes)
            parallel = ParallelModule(program, groups, engine, 0, None, names)
            parallel.train()
            optimizer = torch.optim.AdamW(parallel.parameters())
            batch = example(case.batch, case.images)

            def step() -> None:
                output = parallel.forward(**batch)
                (output["loss"] if case.loss_fn is None else output).backward()
                del output
                optimizer.step()
                optimizer.zero_grad()

            tracker = Tracker()
            tracker._mod_tracker = NoModules()
            voting = hasattr(stage, "InferenceMode")  # older versions of torch do not vote
            with patch.object(_PipelineSchedule, "_warmup_p2p", given_shapes) if voting else nullcontext():
                first_step(optimizer)
                tracker.track_external(parallel, optimizer, *batch.values())
                with (
                    tracker, tracker.unseen_trials(), patch.object(ParallelModule, "_agreed", unread),
                    patch.object(tensors, "_of_all_stages", lambda places, fault, *_: fault),  # fake ranks have nothing to say
                    patch.object(draws, "seed_of", lambda draw: 0),  # nor has a fake seed a value
                    patch.object(mixture, "read_counts", balanced),
                ):
                    step()
            snapshot = tracker.get_tracker_snapshot("peak")[CPU]
            return {str(getattr(kind, "value", kind)).lower(): float(value) for kind, value in snapshot.items()}
    finally:
        dist.destroy_process_group()


def rows_of(name: str, shallow: bool) -> Iterator[dict[str, Any]]:
    """A row for every pipeline rank (one without a pipeline): predicted against tracked bytes."""
    case = case_of(name, shallow)
    plan = plan_of(case)
    found = footprints(plan, rules_of(plan.graph)[0], OPTIMIZERS["adamw"])
    assert max(one.bytes for one in found.values()) == plan.predicted.bytes_per_rank
    for number, one in found.items():
        kinds = tracked(plan, case, number * case.world // len(found))
        stage = f", pipeline rank {number}" if plan.pipeline else ""
        yield {"name": name + stage, "predicted": one.bytes, "tracked": kinds["total"],
               "error": one.bytes / kinds["total"] - 1, "kinds": dict(one.kinds), "tracked kinds": kinds}


def confirmed() -> dict[str, Any]:
    """The longest sequence of a small Llama on two devices of 48 MiB, run: what its plan was predicted to hold and held, and
    what the shortest length found not to fit holds under the same layout."""

    with torch.device("meta"):
        made = llama_narrow()
    cluster = Cluster.parse("b200:1x2").with_memory(48 * 2**20)
    found = longest(made, cluster, 1, shortest=8192, most=1 << 16, pins={"cp": 2, "zero": 3, "recompute": "full"})
    sizes = {axis: found.plan.mesh.size(axis) for axis in ("cp", "tp") if axis in found.plan.mesh.axes}
    kept = {"dp": 1, "pp": 1, "zero": found.plan.groups[0].zero, "recompute": found.plan.groups[0].recompute}
    over = {**sizes, **kept, "loss_rows": found.plan.to_pins().loss_rows or 0}
    assert found.too_long is not None
    rows: dict[str, Any] = {"capacity": cluster.capacity_bytes, "layout": f"{found.plan.mesh}, {over}"}
    too_long = Case(llama_narrow, (1, found.too_long), 2, over, "bf16", loss_fn=loss_alone)
    for what, plan, tokens in (("longest", found.plan, found.tokens), ("too long", plan_of(too_long), found.too_long)):
        held = tracked(plan, replace(too_long, batch=(1, tokens)))["total"]
        rows[what] = {"tokens": tokens, "predicted": plan.predicted.bytes_per_rank, "tracked": held}
    return rows


def main() -> int:
    """Print the table; 1 if a prediction is out of bounds."""
    parser = argparse.ArgumentParser(description="Predicted peak memory against MemTracker.")
    parser.add_argument("names", nargs="*", help="programs (default: all)")
    parser.add_argument("--list", action="store_true", help="name the programs")
    parser.add_argument("--json", action="store_true", help="print one JSON value")
    parser.add_argument("--shallow", action="store_true", help="fewer layers and micro-batches")
    parser.add_argument("--longest", action="store_true", help="run the longest sequence that fits, and one that does not")
    options = parser.parse_args()
    if options.longest:
        print(json.dumps(confirmed()))
        return 0
    if options.list:
        print("\n".join(CASES))
        return 0
    rows = []
    for name in options.names or CASES:
        for row in rows_of(name, options.shallow):
            rows.append(row)
            if not options.json:
                print(f"{row['name']:50s} predicted {row['predicted'] / 2**20:9.1f} MiB   "
                      f"tracked {row['tracked'] / 2**20:9.1f} MiB   {row['error']:+7.2%}", flush=True)
    if options.json:
        print(json.dumps(rows))
    return int(any(not -0.02 <= row["error"] <= 0.05 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
