"""Golden plans: what the planner decides for five models on three clusters, as JSON that a person can compare.

    python -m tests.golden            writes tests/plans/*.json anew; review the difference before committing it

A file holds decisions and the numbers they rest on, to four digits: mesh, stages, micro-batches, how blocks keep their
parameters, and for every distinct block its weights, results and collectives in the notation. Models are on the meta device, of
a size at which clusters differ; layers are few, because equal layers add nothing to what is compared.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.cost.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.pins import Pins
from meshwright.ir.plan import Plan
from meshwright.ir.writing.paths import fold_paths
from meshwright.planner import capture_model, make_plan
from meshwright.views.facts import facts_of, sections
from tests.trials import parser_of

FOLDER = Path(__file__).with_name("plans")
BATCH, LENGTH, VOCAB = 32, 512, 8192
Case = tuple[nn.Module, dict[str, torch.Tensor]]


def _tokens(**lengths: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros((BATCH, length), dtype=torch.int64) for name, length in lengths.items()}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False,
    )
    return LlamaForCausalLM(config), _tokens(input_ids=LENGTH, labels=LENGTH)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1536, n_layer=3, n_head=16, vocab_size=VOCAB, n_positions=LENGTH, use_cache=False,
                        bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config), _tokens(input_ids=LENGTH, labels=LENGTH)


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=3, num_attention_heads=16, intermediate_size=4096, vocab_size=VOCAB)
    return BertForMaskedLM(config), _tokens(input_ids=LENGTH, attention_mask=LENGTH, labels=LENGTH)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=1, num_heads=16, vocab_size=VOCAB, dropout_rate=0.0,
                      use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config), _tokens(input_ids=LENGTH, labels=LENGTH // 4)


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, num_hidden_layers=3, num_attention_heads=16, intermediate_size=4096, num_labels=1000)
    images = torch.zeros((BATCH, 3, 224, 224), device="meta")
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.zeros((BATCH,), dtype=torch.int64)}


MODELS: Mapping[str, Callable[[], Case]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit}
CLUSTERS = ("node", "tight", "nodes")
"""One node with room; one device with less memory than the fastest plan takes (``TIGHT``, MiB); slow nodes."""
TIGHT: Mapping[str, int] = {"llama": 6400, "gpt2": 5650, "bert": 3070, "t5": 1710, "vit": 980}


@cache
def graph_of(model: str) -> Graph:
    """The captured graph in bf16, parameters on the meta device."""
    with torch.device("meta"):
        module, example = MODELS[model]()
    return capture_model(module, (), example, (), None, "bf16")


def plan_of(model: str, cluster: str) -> Plan:
    """The plan with nothing pinned."""
    where = Cluster.parse({"node": "h100:1x4", "tight": "h100:1x1", "nodes": "v100-32g@pcie4:4x4"}[cluster])
    if cluster == "tight":
        where = where.with_memory(TIGHT[model] * 2**20)
    return make_plan(graph_of(model), where, Pins(), precision="bf16")


def describe(plan: Plan) -> dict[str, Any]:
    """What is compared."""
    groups = {}
    for alike, run in itertools.groupby(plan.groups, key=lambda group: replace(group, path="")):
        words = ", ".join(f"{field.name} {getattr(alike, field.name)}" for field in fields(alike) if field.name != "path")
        groups[fold_paths([group.path or "(root)" for group in run])] = words.replace("'", "")
    pipeline = plan.pipeline
    return {
        "mesh": str(plan.mesh),
        "microbatches": plan.schedule.microbatches,
        "pipeline": None if pipeline is None else f"{pipeline.schedule}, stages on {pipeline.stage_rank}",
        "step_ms": float(f"{plan.predicted.step_seconds * 1e3:.4g}"),
        "mib_per_rank": float(f"{plan.predicted.bytes_per_rank / 2**20:.4g}"),
        "parameters": groups,
        "blocks": {
            section.title: [" | ".join((row.module, "; ".join(row.weights), row.result, ", ".join(row.collectives)))
                            for row in section.rows]
            for section in sections(facts_of(plan))
        },
    }


def path_of(model: str, cluster: str) -> Path:
    """The golden file of a case."""
    return FOLDER / f"{model}-{cluster}.json"


def as_text(plan: Plan) -> str:
    """The file's content."""
    return json.dumps(describe(plan), indent=1) + "\n"


def main() -> None:
    """Write every golden file anew."""
    parser_of(__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for model, cluster in itertools.product(MODELS, CLUSTERS):
        path_of(model, cluster).write_text(as_text(plan_of(model, cluster)), encoding="utf-8")
        print(path_of(model, cluster))


if __name__ == "__main__":
    main()
