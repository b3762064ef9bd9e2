"""How long one candidate layout takes to price once its graph is known: Llama 3.1 405B on 16,384 H100.

    python benchmarks/pricing.py [--layers 126]

The budget is 5 ms: time and bytes of a solution from the tables of its chain (``compiler.placement.problem.price``). The replay
of memory (``cost.memory.peak``) is for the plan that was chosen, and printed beside it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.compiler.placement.problem import price
from meshwright.compiler.search import blockwise
from meshwright.compiler.solver.chain import Chain, Solution
from meshwright.footprint import footprints
from meshwright.planner import rules_of


def main() -> None:
    """Plan once, then price the plan's choices again and again."""
    parser = argparse.ArgumentParser(description="Time the pricing of one layout.")
    parser.add_argument("--layers", type=int, default=126)
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=options.layers, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False, tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros((2048, 8192), dtype=torch.int64, device="meta")
    seen: list[tuple[Chain, Solution]] = []
    solve = blockwise.solve

    def watched(chain: Chain, **options: Any) -> Solution:
        solution = solve(chain, **options)
        seen.append((chain, solution))
        return solution

    blockwise.solve = watched  # type: ignore[assignment]  # to have the chain of the plan
    plan = mw.plan(model.train(), "h200:2048x8", {"input_ids": tokens, "labels": tokens}, precision="bf16",
                   pins={"dp": 2048, "tp": 8, "zero": 3, "recompute": "full", "sequence_parallel": True})
    chain, solution = seen[-1]
    runs = 20
    start = time.perf_counter()
    for _ in range(runs):
        price(chain, solution)
    each = (time.perf_counter() - start) / runs
    start = time.perf_counter()
    footprints(plan, rules_of(plan.graph)[0], 8.0)
    replay = time.perf_counter() - start
    print(f"{options.layers} layers, {len(plan.graph.ops)} operators, {len(chain.sequence)} positions: "
          f"{each * 1e3:.2f} ms to price, {replay:.2f} s to lower and replay")


if __name__ == "__main__":
    main()
