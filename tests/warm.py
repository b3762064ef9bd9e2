"""What the worker processes of ``tests.pool`` have imported before they are forked: seconds once, not once for each of them.

Nothing is made here and nothing runs: what is forked from a process with threads or process groups could hang.
"""

from __future__ import annotations

import gc
from importlib import import_module

import transformers

for _name in (
    "torch._dynamo",  # FSDP2 imports it when first used
    "torch.distributed.fsdp", "torch.distributed.pipelining", "meshwright.api", "meshwright.exported",
    "meshwright.passes.typecheck", "meshwright.runtime.module",
):
    import_module(_name)
for _name in (
    "BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification",
):
    getattr(transformers, _name)  # imported when it is first asked for
gc.freeze()  # modules live as long as the processes: no collection of garbage looks through them again
