"""Words by which rows of published runs say what hardware and software they ran on: tables that any source shares.

Read by ``rows``, which says in which columns. Nothing here is the name of a model or of a source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

INSTANCES: Sequence[tuple[str, str, str]] = (
    # words in "interconnect", device they are on ("" any), node of the catalogue
    ("4 x 100 Gb/s", "a100", "p4d"), ("p4d", "a100", "p4d"), ("EFA", "a100", "p4d"), ("EFA", "h", "p5"), ("p5", "h", "p5"),
    ("A3 Mega", "h100", "a3-mega"), ("A3 High", "h100", "a3-high"), ("A800", "a", "hgx-a800"), ("H800", "h", "hgx-h800"),
    ("DGX-1", "v100", "dgx1-v100"), ("Omni-Path", "v100", "jeanzay-v100"),
)
"""Where none matches, the device's own node: the vendor's reference design."""

MEASURED: Sequence[tuple[str, str]] = (("HF cluster", "playbook.toml"),)
"""Words in "interconnect" of clusters whose own collectives were measured: what stands before the formulas, as in a user's file
(in ``data``)."""

PORTS: Mapping[str, float] = {"FDR": 56, "EDR": 100, "HDR100": 100, "HDR": 200, "NDR200": 200, "NDR": 400, "XDR": 800}
"""Gb/s of an InfiniBand port."""

FLASH = "flash"
"""FlashAttention of a version that is not said: a row with it is priced with every one there was."""
KERNELS: Sequence[tuple[str, str]] = (
    # words in "notes" (without blanks, hyphens and underscores), attention kernel
    ("noflash", "scores"), ("withoutflash", "scores"), ("flash=off", "scores"), ("flash=no", "scores"),
    ("flashattentionintriton", "triton"),
    ("flashattention3", "flash3"), ("flashattentionv3", "flash3"), ("flashattn3", "flash3"), ("cudnnattention", "flash3"),
    ("flashattention2", "flash2"), ("flashattentionv2", "flash2"), ("flashattn2", "flash2"), ("flashattnv2", "flash2"),
    ("flashattention1", "flash1"), ("flashattentionv1", "flash1"), ("flashattn1", "flash1"), ("flashattnv1", "flash1"),
    ("xformers", "flash1"),
    ("kernel=torch", "torch"),  # scores, mask and softmax, each an operator of its own
    ("flashattention", FLASH), ("flashattn", FLASH),
    ("kernel=", "scores"),  # any other kernel that a row names forms the matrix of scores, scaled and masked in its softmax
)
AGES: Sequence[tuple[tuple[int, int], tuple[str, ...]]] = (
    ((2022, 5), ("scores",)), ((2023, 7), ("scores", "flash1")), ((2024, 6), ("flash1", "flash2")), ((9999, 12), ("flash2",)),
)
"""What was published up to (year, month) may have run on these kernels, the slowest first: Dao et al. 2022 is of that May, Dao
2023 of that July, whose package took the first one's place; the third (Shah et al. 2024) has one of its own and is named."""
LATEST = ("flash1", "flash2")
"""What bears no date."""
SOFTWARE_KERNELS: Sequence[tuple[str, str]] = (("nemo", "flash3"), ("transformerengine", "flash3"))
"""Words in "notes" of software with an attention kernel of its own (Transformer Engine runs cuDNN's)."""

LOSSES: Sequence[tuple[str, str]] = (
    # words in "notes" (without blanks, hyphens and underscores), the kernels of a cross entropy: one, or many in place
    ("fusedcrossentropy", "merged"), ("flashcrossentropy", "merged"), ("liger", "merged"), ("shardedcrossentropy", "sharded"),
)
CUTS: Sequence[tuple[str, str]] = (
    # words in "notes", where stages start
    ("stages cut by cost", "searched"), ("stages of as many layers", "even"), ("stages of as many modules", "modules"),
)

FUSED: Sequence[str] = ("nemo", "transformer engine", "compile", "xla", "jax")
"""Words in "notes" of software that fuses norms and what is around them (Transformer Engine is what NeMo runs on)."""
UNFUSED = re.compile(r"(?:\bno|\bnot|without|w/o)\s+(?:torch\.)?compil|compiled?\s*[=:]\s*(?:no|off|false|0)", re.IGNORECASE)

OVERLAPPED: Sequence[str] = ("tp comm overlap", "nemo", "transformer engine")
"""Words in "notes" of software whose products run their collectives in pieces and add up gradients (Transformer Engine)."""

MEGATRON: Sequence[str] = ("megatron", "interleaved", "selective")
"""Words in "schedule" or "recompute" of Megatron-LM, which brought the interleaved schedule and selective recomputation; a
"vpp" above 1 says the same."""

MERGED = (2022, 5)
"""Korthikanti et al. 2022. Megatron-LM since then adds a weight's gradient to its fp32 sum within the product that makes it."""

CHECKPOINTED: Sequence[str] = ("fsdp", "torchtitan")
"""Words in "schedule", "dtype" or "notes" of software that recomputes with torch's checkpoint, which stops at the last value
that the backward needs; Megatron-LM's and its kin's run the whole block again, and so does torch's before ``STOPS``."""
STOPS = (2, 1)
"""The version of torch whose checkpoint stops early (``set_checkpoint_early_stop``)."""

BALANCED: Sequence[str] = ("force balance", "token drop cf1")
"""Words in "notes" of runs whose experts all get as many rows: routing forced to, or a capacity of the mean filled up."""
TRAINED = 1.06
"""Rows of the fullest device over the mean under a router trained to balance, as all these runs have: Mixtral 8x22B takes 465 /
445 of the time (R05463, R05462) that it takes with forced balance, and its experts are about 0.7 of that. Plans assume more,
for a user's router may be at its start (``IMBALANCE``)."""

HYBRID: Sequence[str] = ("hsdp", "hybrid", "mics", "hpz")
"""Words of state that is split over some of the data ranks; all other software splits it over all of them."""

BUCKETED: Sequence[str] = ("ddp bucket",)
"""Words in "schedule", "dtype" or "notes" of software whose gradients lie in the buckets of torch's DDP."""

PLAIN_LOSS: Sequence[str] = ("torch cross entropy",)
"""Words in "notes" of software whose loss is torch's own cross entropy: its softmax is kept, whose gradient lies beside that of
the loss."""

KEPT_LOGITS: Sequence[str] = ("outputs of two micro-batches",)
"""Words in "schedule" or "notes" of software that keeps what the last stage hands on, logits, in two buffers (DeepSpeed's
pipeline engine and its kin)."""

KEPT_HEADS: Sequence[str] = ("heads of one product",)
"""Words in "notes" of software in which the values of attention are a slice of one product with queries and keys, which is kept
whole for them, that lays the result of several samples out anew before the next product, and picks what turns queries and keys
by their positions in every layer. Its FlashAttention is the one for packed sequences (``packed``)."""

FLAT: Sequence[str] = ("flat optimizer state",)
"""Words in "notes" of software whose ZeRO holds a rank's part of all parameters, and of their state, in one tensor each."""

FLAT_UNITS: Sequence[str] = ("fsdp1",)
"""Words in "schedule", "dtype" or "notes" of FullyShardedDataParallel, whose units are flat tensors that are gathered and
reduced as they are; ``fully_shard`` copies."""

OWN_UNITS: Sequence[str] = ("each a unit",)
"""Words in "notes" of software in which embedding, last norm and head are units of FSDP as layers are."""

NARROW_LOSS: Sequence[str] = ("16-bit logits",)
"""Words in "notes" of software whose cross entropy works in place on logits that it does not widen."""

FUSED_ACTIVATIONS: Sequence[str] = ("gated activations in one kernel",)
"""Words in "notes" of software whose SwiGLU is one kernel each way, which keeps what it reads alone."""

GATHER_BUFFER: Sequence[str] = ("gathers in one buffer",)
"""Words in "notes" of software with Megatron-LM's layers, in which the sequence is the first dim and what linears gather along
it lies in a buffer that stays."""

KEPT: Sequence[str] = ("gathered inputs kept", "dtensor", "torchtitan")
"""Words in "schedule", "dtype" or "notes" of software whose linears keep for the backward what they gathered."""

WHOLE_LOGITS: Sequence[str] = ("gathered logits",)
"""Words in "notes" of software whose loss is computed on whole logits, gathered from the tensor ranks, on each of them: by
torch.distributed's own functions, as in the layers of Megatron-LM that such software has."""

ALONE: Sequence[str] = ("deepspeed",)
"""Words in "schedule", "dtype" or "notes" of software whose ZeRO gathers and reduces every parameter alone."""

SOFTWARE: Mapping[str, Sequence[str]] = {
    "overlapped": OVERLAPPED, "alone": ALONE, "buckets": BUCKETED, "keeps_gathered": KEPT, "plain_loss": PLAIN_LOSS,
    "keeps_heads": KEPT_HEADS, "packed": KEPT_HEADS, "flat_state": FLAT, "plain_collectives": WHOLE_LOGITS,
    "narrow_loss": NARROW_LOSS, "fused_activations": FUSED_ACTIVATIONS, "flat_units": FLAT_UNITS, "own_units": OWN_UNITS,
    "gather_buffer": GATHER_BUFFER,
}
"""What software does (``Cluster.with_kernels``) of which "schedule", "dtype" or "notes" hold one of these words."""

SPLIT: Mapping[str, str] = {"embed_tokens:embedding": "v", "o_proj:linear": "k", "down_proj:linear": "k"}
SPLITS: Mapping[str, Mapping[str, str]] = {
    "gpt": {"tokens:embedding": "v", "out:linear": "k", "down:linear": "k"},
    "palm": {"embedding:embedding": "v", "out:linear": "k", "down:linear": "k"},
    "moe": {"embed_tokens:embedding": "v", "o_proj:linear": "k"},
}
"""What tensor parallelism splits, by operator: of the embedding the words, of the second product of a pair the rows of its
weight. Columns first and rows then is what it is in all published software (Shoeybi et al. 2019, section 3: Megatron-LM, NeMo,
DeepSpeed, nanotron, the plans for DTensor); that a search may find a faster layout is nothing that ran. ``SPLITS``: by
architecture; ``SPLIT``: of all others."""

SUMS: Sequence[tuple[str, str]] = (
    # words in "dtype" or "notes", what micro-batches' gradients are summed in
    ("fp32 grad", "fp32"), ("fp32 accumulation", "fp32"), ("bf16 grad", "narrow"), ("fp16 grad", "narrow"),
)

FAMILIES: Sequence[tuple[str, str]] = (
    # words in "family", architecture
    ("palm", "palm"), ("deepseek", ""), ("moe", "moe"), ("mixtral", "moe"), ("mixture", "moe"),
    *((word, "llama") for word in ("llama", "mistral", "qwen", "yi", "gemma", "olmo", "internlm", "swiglu", "gated")),
    *((word, "gpt") for word in ("gpt", "opt", "bloom", "mpt", "falcon", "neox", "nemotron", "megatron", "dense")),
)

SCHEDULES: Sequence[tuple[str, str]] = (
    # words in "schedule" of a pipeline, schedule
    ("interleaved", "interleaved1f1b"), ("1f1b", "1f1b"), ("gpipe", "gpipe"), ("afab", "gpipe"), ("all forward", "gpipe"),
    ("dualpipev", "dualpipev"), ("dualpipe", ""), ("zbv", "zbv"), ("zb-v", "zbv"), ("zb", "zb"), ("zero bubble", "zb"),
    ("chimera", ""),
)
UNSAID = "1f1b"
"""What a pipeline runs of which nothing is said."""
SEVERAL: Mapping[str, str] = {"1f1b": "interleaved1f1b"}
"""What is meant by a schedule of one stage where a rank has several."""
NO = ("no", "none", "off", "false", "0")
YES = ("yes", "on", "true", "1", "full", "uniform", "block")
