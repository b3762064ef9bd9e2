"""Random numbers as functions of (seed, salt): whatever an operator draws, it draws again when it is run again.

``draw=(seed, salt, timed)`` comes with every call of the lowered program that draws (``meshwright.ir.declared.draws``).
``seed`` is a pair on the CPU: that of the step, and that of the micro-batch, which counts if ``timed``. An operator draws from
the default generator of its device. That generator is lent to it, seeded, and put back as it was, so that what the user's own
program draws is left alone and nothing has to be known about the operator.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from meshwright.ir.declared.draws import TAGGED
from meshwright.runtime.attention.kernels import attention

Draw = tuple[Tensor, int, bool]
"""(seeds of the step and of the micro-batch, salt, whether micro-batches draw apart)."""

OVERWRITE = frozenset({
    "aten.bernoulli.p", "aten.normal_functional.default", "aten.randint_like.default", "aten.randint_like.low_dtype",
})
"""Operators that read no value of their operand, whose gradient is zero; torch has no derivative of these."""


def seed_of(draw: Draw) -> int:
    """One 63-bit seed (splitmix64's finalizer)."""
    seeds, salt, timed = draw
    word = (int(seeds[int(timed)]) * 0x9E3779B97F4A7C15 + salt) & (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = ((word ^ word >> shift) * factor) & (1 << 64) - 1
    return (word ^ word >> 31) >> 1


class BuiltModels:
    """The models that parallel modules were built of: each has a number among those that were built where torch's generator
    stood at one place, and a model of equal weights has that of the one before."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Callable[[], nn.Module | None], int, int]]] = {}

    def number(self, place: int, model: nn.Module | None, digest: int) -> int:
        """``digest``: of all weights as they are now."""
        known = self._known.setdefault(place, [])
        same = [number for of, _, number in known if model is not None and of() is model]
        alike = [number for _, had, number in known if had == digest]
        number = next(iter([*same, *alike]), len({number for *_, number in known}))
        if not same:
            of = (lambda: None) if model is None else weakref.ref(model)
            known[:] = [*(one for one in known if one[0]() is not None or one[1] != digest), (of, digest, number)]
        return number


_BUILT = BuiltModels()


def seed_of_module(model: nn.Module | None, weights: Mapping[str, int], blank: bool) -> int:
    """31 bits that a parallel module draws by: of the seed that ``torch.manual_seed`` set, of what the process has drawn since,
    and of how many other models were built there before. Two modules of one process draw apart, and each again what it drew in
    an equal run: a model of equal ``weights`` (digests of each) is the one it was, and so is the same ``model`` whose weights
    have changed since, as torch's own numbers do not depend on weights (differences under one seed are right).

    ``blank``: whether weights are on the meta device. Their initialization draws from this seed too, so that the process has
    drawn afterwards, as it has where it initializes a model itself: the next module of the kind has other weights.
    """
    place = zlib.crc32(torch.default_generator.get_state().numpy().tobytes(), torch.initial_seed() & 0xFFFFFFFF)
    if blank:
        torch.rand(())
    number = _BUILT.number(place, model, zlib.crc32(str(sorted(weights.items())).encode()))
    return zlib.crc32(f"model {number} of {place}".encode()) >> 1


def seed_of_copy(seed: int, number: int) -> int:
    """31 bits for the ``number``th copy of a module that draws by ``seed``."""
    return zlib.crc32(f"copy {number} of {seed}".encode()) >> 1


def generator_of(draw: Draw, device: torch.device, number: int) -> torch.Generator:
    """A generator of its own for the ``number``th part of what is drawn."""
    return torch.Generator(device).manual_seed((seed_of(draw) + number * 0x9E3779B97F4A7C15) & (1 << 63) - 1)


@contextmanager
def lent(device: torch.device, draw: Draw) -> Iterator[None]:
    """Within, the device's default generator draws from (seed, salt)."""
    generator = torch.default_generator
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generator = module.default_generators[module.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed(seed_of(draw))
    try:
        yield
    finally:
        generator.set_state(state)


def drawing(operator: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """An operator that takes ``draw`` too, and draws from that. One of another library may take gradients for contiguous
    without a look, as it may operands (``codegen``), and what ranks exchanged may lie otherwise than in one process: it is
    given what is."""
    overwrites = str(operator) in OVERWRITE
    foreign = getattr(operator, "namespace", "aten") not in TAGGED

    def drawn(*args: Any, draw: Draw, **kwargs: Any) -> Any:
        with lent(device, draw):
            if overwrites and args[0].requires_grad:
                return _Overwritten.apply(args[0], operator, args[1:], kwargs)
            if foreign:
                return tree_map_only(Tensor, _Contiguous.apply, operator(*args, **kwargs))
            return operator(*args, **kwargs)

    return drawn


class _Contiguous(Function):
    """The same value, whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.contiguous()


class _Overwritten(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        result: Tensor = operator(x.detach(), *args, **kwargs)
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return torch.zeros_like(dy), None, None, None


def dropout(x: Tensor, dropout_p: float, *, draw: Draw) -> Tensor:
    """Inverted dropout by a generator of its own."""
    if dropout_p == 0:
        return x
    if dropout_p == 1:
        return x * 0
    generator = torch.Generator(x.device).manual_seed(seed_of(draw))
    keep = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - dropout_p, generator=generator)
    return x * keep.div_(1 - dropout_p)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, *, draw: Draw,
) -> Tensor:
    """``scaled_dot_product_attention`` with dropout."""
    with lent(q.device, draw):
        return attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


def grouped_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool, head: int, *, draw: Draw | None = None,
) -> Tensor:
    """The same of queries that share one ``head`` of the keys and values, and without dropout."""
    k, v = (x.narrow(-3, head, 1) for x in (k, v))
    with lent(q.device, draw) if draw is not None else nullcontext():
        return attention(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
