"""Precisions that a plan can ask for.

    fp32   everything in fp32
    tf32   the same, but matrix products round their operands (``torch.set_float32_matmul_precision("high")`` is yours to set)
    bf16   compute in bf16; masters, gradients at rest and their sums in fp32
    fp16   the same in fp16: planned, not run (its loss must be scaled)
    fp8    bf16 whose products run in fp8, operands cast before each: planned, not run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """``compute``: the dtype that parameters are cast to, None for none; ``products``: the format of matrix products, where it
    is another; ``runs``: whether a program of it can be run, not only planned."""

    compute: torch.dtype | None = None
    products: str = ""
    runs: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element in compute."""
        return 4 if self.compute is None else self.compute.itemsize


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(), "tf32": Precision(products="tf32"), "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, runs=False), "fp8": Precision(torch.bfloat16, "f8e4m3", runs=False),
}
