"""Short names for the tensors of sample calls.

Dims are 2, 4, 6 or 8, so that they split over one axis of 2, over two, and unevenly over 3; floats are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.testing import Sample as Sample


def s(*args: Any, fixed: Sequence[int] = (), values: bool = True, **kwargs: Any) -> Sample:
    return Sample(args, kwargs, tuple(fixed), values)


def r(*shape: int) -> Tensor:
    """Random numbers in (0.1, 0.9): inside the domain of every operator, away from kinks."""
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def n(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def b(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def c(*shape: int) -> Tensor:
    return torch.complex(n(*shape), n(*shape))


Maker = Callable[[], list[Sample]]
F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
