"""Sample calls of the operators that work element by element, multiply matrices, or rearrange and join."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.compiler.rules import pointwise
from tests.samples import F32, F64, I64, Maker, Sample, b, c, i, n, r, s


def _unary(name: str) -> Maker:
    if name in ("bitwise_not", "logical_not"):
        return lambda: [s(i(9, 4, 8)), s(b(4, 8))]
    if name == "_conj":
        return lambda: [s(c(4, 8))]
    if name in ("acosh",):
        return lambda: [s(1 + r(4, 8))]
    extra: tuple[Any, ...] = {"clamp": (0.3, 0.6), "clamp_min": (0.5,), "clamp_max": (0.5,), "threshold": (0.5, 0.0)}.get(
        name, ()
    )
    if name == "fake_quantize_per_tensor_affine":
        extra = (0.1, 0, -128, 127)
    if name == "imag":
        return lambda: [s(c(4, 8))]
    if name in ("conj", "_conj", "conj_physical", "real", "resolve_conj", "resolve_neg"):
        return lambda: [s(c(4, 8)), s(r(4, 8))]
    return lambda: [s(r(4, 8), *extra)]


UNARY = ("neg", "clone", "contiguous", "alias", "detach")
BINARY = (
    "maximum.default", "minimum.default", "min.other", "max.other", "clamp_min.Tensor", "clamp_max.Tensor", "pow.Tensor_Tensor",
    "pow.Tensor_Scalar", "pow.Scalar", "add_.Tensor", "add_.Scalar", "add.Scalar", "sub.Scalar", "div.Tensor_mode",
    "div.Scalar_mode",
)


def _binary(name: str) -> Maker:
    base, _, overload = name.partition(".")
    mode = {"rounding_mode": "floor"} if base == "div" else {}
    integer = base.startswith(("bitwise", "__")) or base in ("gcd", "lcm")
    make = (lambda *shape: i(4, *shape)) if integer else r
    number = 2 if integer else 0.5
    if base == "special_zeta":
        return lambda: [s(2 + r(4, 8), 1 + r(8), fixed=(0, 1))]
    fixed = (0, 1) if base in ("heaviside", "nextafter", "fmod", "remainder", "copysign", "isclose", "floor_divide") else ()
    if overload == "Scalar" and base == "pow":
        return lambda: [s(number, make(4, 8))]
    if overload in ("Scalar", "Tensor_Scalar", "Scalar_mode"):
        return lambda: [s(make(4, 8), number, fixed=fixed, **mode)]
    if base.endswith("_") and not base.startswith("__"):
        return lambda: [s(make(4, 8), make(8)), s(make(4, 8), number)]
    return lambda: [s(make(4, 8), make(4, 8), fixed=fixed, **mode), s(make(2, 4, 8), make(4, 1), fixed=fixed, **mode)]


def _pointwise() -> dict[str, Maker]:
    unary = (*pointwise.READS, *pointwise.MAKES, *pointwise.STEPS, *pointwise.UNPRICED, *pointwise.UNARY_LINEAR, *UNARY)
    table = {f"{name}.default": _unary(name) for name in unary}
    table |= {f"{name}_.default": _unary(name) for name in (*pointwise.IN_PLACE_UNARY, "tanh")}
    table |= {name: _binary(name) for name in (*pointwise.BINARY, *pointwise.COMPARED, *pointwise.IN_PLACE, *BINARY)}
    return table | {
        "_to_copy.default": lambda: [
            s(n(4, 8), dtype=F32),
            s(n(4, 8), dtype=I64),
            s(b(4, 8), dtype=F64),
            s(i(5, 4), dtype=F32),
        ],
        "to.dtype": lambda: [s(n(4, 8), F32)],
        "to.device": lambda: [s(n(4, 8), torch.device("cpu"), F32)],
        "to.dtype_layout": lambda: [s(n(4, 8), dtype=F32)],
        "add.Tensor": lambda: [s(n(4, 8), n(4, 8)), s(n(2, 4, 8), n(8), alpha=2), s(n(4, 8), 1.0), s(n(4, 8), i(5, 4, 8)),
                               s(0.3333, n(4, 8), alpha=0.6667)],
        "sub.Tensor": lambda: [s(n(4, 8), n(4, 8)), s(n(4, 1), n(2, 1, 8)), s(i(9, 4, 8), 1), s(i(9, 4), i(9, 4)),
                               s(2.0, n(4, 8), alpha=0.5)],
        "mul.Tensor": lambda: [s(n(4, 8), n(4, 8)), s(n(4, 8), n(4, 1)), s(n(4, 8), 0.5), s(n(4, 8), b(4, 8)), s(n(4), n()),
                               s(0.5, n(4, 8))],
        "multiply.Tensor": lambda: [s(n(4, 8), n(4, 8)), s(0.5, n(4, 8))],
        "floor_divide.default": lambda: [s(n(4, 8), r(8), fixed=(0, 1)), s(7, i(5, 4, 8) + 1)],
        **{
            f"{name}.Tensor": lambda: [s(n(4, 8), r(4, 8)), s(n(4, 8), r(8)), s(n(4), 2.0), s(n(), r()), s(2.0, r(4, 8))]
            for name in ("div", "true_divide", "divide")
        },
        "mul.Scalar": lambda: [s(n(4, 8), 0.5)],
        "div.Scalar": lambda: [s(n(4, 8), 0.5)],
        "where.self": lambda: [s(b(4, 8), n(4, 8), n(4, 8)), s(b(8), n(4, 8), n(4, 1)), s(b(4, 1), n(8), n())],
        "where.ScalarOther": lambda: [s(b(4, 8), n(4, 8), 0), s(b(4, 8), n(8), 1.0)],
        "where.ScalarSelf": lambda: [s(b(4, 8), 0, n(4, 8)), s(b(4, 8), 2.0, n(4, 8))],
        "where.Scalar": lambda: [s(b(4, 8), 0.0, 1.0)],
        "masked_fill.Scalar": lambda: [s(n(4, 8), b(8), 0), s(n(4, 8), b(4, 8), -1e9)],
        "masked_fill.Tensor": lambda: [s(n(4, 8), b(4, 8), n())],
        "copy.default": lambda: [s(n(4, 8), n(8), fixed=(0, 1)), s(n(4, 8), n(4, 8), fixed=(0, 1))],
        "fill.Tensor": lambda: [s(n(4, 8), n())],
        "polygamma.default": lambda: [s(1, r(4, 8))],
        "round.decimals": lambda: [s(n(4, 8), decimals=1)],
        "fill.Scalar": lambda: [s(n(4, 8), 2.0)],
        "zero.default": lambda: [s(n(4, 8))],
        "masked_fill_.Scalar": lambda: [s(n(4, 8), b(4, 8), 2.0)],
        "copy_.default": lambda: [s(n(4, 8), n(8))],
        "clamp.Tensor": lambda: [s(n(4, 8), r(8) - 1, r(4, 1)), s(n(4, 8), None, r(8))],
        "addcmul.default": lambda: [s(n(4, 8), n(4, 8), n(8), value=2)],
        "addcdiv.default": lambda: [s(n(4, 8), n(4, 8), r(8), value=2)],
        "lerp.Scalar": lambda: [s(n(4, 8), n(4, 8), 0.3)],
        "lerp.Tensor": lambda: [s(n(4, 8), n(4, 8), r(4, 8))],
        "complex.default": lambda: [s(n(4, 8), n(4, 8))],
        "polar.default": lambda: [s(n(4, 8), n(4, 8))],
        "expand_as.default": lambda: [s(n(4, 1), n(2, 4, 8)), s(n(8), n(4, 8))],
        "view_as_complex.default": lambda: [s(n(4, 8, 2))],
        "view_as_real.default": lambda: [s(c(4, 8))],
        "type_as.default": lambda: [s(n(4, 8), r(4, 8).float(), fixed=(1,)), s(n(4, 8), r(6), fixed=(1,))],
        "broadcast_tensors.default": lambda: [s((n(4, 8), n(8))), s((n(4, 1), n(1, 8)))],
        "bucketize.Tensor": lambda: [s(r(4, 8), torch.tensor([0.2, 0.4, 0.6]), fixed=(0, 1))],
        "searchsorted.Tensor": lambda: [
            s(torch.tensor([0.2, 0.4, 0.6]), r(4, 8).float(), fixed=(0, 1)),
            s(r(4, 6).sort().values, r(4, 8), fixed=(0, 1)),
        ],
        "isin.Tensor_Tensor": lambda: [s(i(9, 4, 8), i(9, 3))],
        "prelu.default": lambda: [s(n(4, 8, 2), n(8)), s(n(4, 8), n(1))],
        "_prelu_kernel.default": lambda: [s(n(4, 8), n(1, 8))],
    }


def _matmul() -> dict[str, Maker]:
    return {
        "mw.fused_linear": lambda: [
            s(n(4, 6, 8), n(12, 8), None, 3, False), s(n(2, 8), n(8, 16), n(16), 2, True), s(n(8), n(8, 8), n(8), 2, False),
        ],
        "linear.default": lambda: [s(n(4, 6, 8), n(4, 8)), s(n(2, 4, 8), n(8, 8), n(8)), s(n(8), n(4, 8), n(4))],
        "mm.default": lambda: [s(n(4, 8), n(8, 6))],
        "bilinear.default": lambda: [s(n(4, 2, 3), n(4, 2, 5), n(8, 3, 5), n(8)), s(n(4, 3), n(4, 5), n(8, 3, 5))],
        "cdist.default": lambda: [s(n(2, 4, 3), n(2, 6, 3)), s(n(4, 3), n(2, 6, 3)), s(n(4, 3), n(8, 3), 1.0)],
        "bmm.default": lambda: [s(n(4, 2, 8), n(4, 8, 6))],
        "mv.default": lambda: [s(n(4, 8), n(8))],
        "dot.default": lambda: [s(n(8), n(8))],
        "vdot.default": lambda: [s(n(8), n(8))],
        "outer.default": lambda: [s(n(4), n(8))],
        "addmm.default": lambda: [
            s(n(4), n(4, 8), n(8, 4)),
            s(n(4, 6), n(4, 8), n(8, 6), beta=2, alpha=3),
            s(n(4, 1), n(4, 8), n(8, 6)),
        ],
        "baddbmm.default": lambda: [s(n(4, 2, 6), n(4, 2, 8), n(4, 8, 6), beta=0.5)],
        "addmv.default": lambda: [s(n(4), n(4, 8), n(8))],
        "matmul.default": lambda: [
            s(n(4, 2, 6, 8), n(2, 8, 4)),
            s(n(4, 8), n(8, 2)),
            s(n(8), n(8)),
            s(n(8), n(4, 8, 2)),
            s(n(4, 2, 8), n(8)),
            s(n(8), n(8, 4)),
            s(n(4, 8), n(8)),
            s(n(4, 1, 6, 8), n(1, 2, 8, 4)),
        ],
        "einsum.default": lambda: [
            s("bik,bjk->bij", (n(4, 2, 8), n(4, 6, 8))),
            s("...k,nk->...n", (n(2, 4, 8), n(6, 8))),
            s("ij,jk", (n(4, 8), n(8, 6))),
            s("ii->i", (n(4, 4),)),
            s("bi,bi->b", (n(4, 8), n(1, 8))),
        ],
        "tensordot.default": lambda: [s(n(4, 6, 8), n(8, 6, 2), (1, 2), (1, 0))],
        "_grouped_mm.default": lambda: [
            s(i(3, 8, 32).bfloat16(), i(3, 2, 32, 32).bfloat16(), torch.tensor([3, 8], dtype=torch.int32), fixed=(0, 1)),
        ],
    }


def _views() -> dict[str, Maker]:
    def reshape() -> list[Sample]:
        return [
            s(n(4, 2, 8), (4, 2, 4, 2)),
            s(n(4, 2, 8), (8, 8)),
            s(n(8, 8), (4, 2, 8)),
            s(n(6, 4), (8, 3)),
            s(n(1, 4, 6), (4, 1, 6)),
            s(n(4, 8), (1, 32)),
            s(n(), (1,)),
            s(n(4, 0), (0, 8)),
            s(n(2, 4, 8), (64,)),
        ]

    def triangle() -> list[Sample]:
        return [s(n(4, 8)), s(n(2, 4, 4), 1), s(n(6, 6), -2)]

    return {
        **dict.fromkeys(("reshape.default", "view.default", "_unsafe_view.default"), reshape),
        "flatten.using_ints": lambda: [s(n(4, 2, 8), 1), s(n(4, 2, 8), 0, 1)],
        "unflatten.int": lambda: [s(n(4, 8), 1, (4, 2))],
        "permute.default": lambda: [s(n(4, 2, 8), (2, 0, 1)), s(n(4, 2, 8), (-1, 0, 1))],
        "transpose.int": lambda: [s(n(4, 2, 8), 1, -1)],
        "t.default": lambda: [s(n(4, 8)), s(n(4))],
        "numpy_T.default": lambda: [s(n(4, 8))],
        "mT.default": lambda: [s(n(2, 4, 8))],
        "adjoint.default": lambda: [s(n(2, 4, 8))],
        "movedim.intlist": lambda: [s(n(4, 2, 8), (0, 1), (-1, 0))],
        "movedim.int": lambda: [s(n(4, 2, 8), 0, 2)],
        "diag_embed.default": lambda: [s(n(4, 8)), s(n(4, 2, 6), 1, 0, 2), s(n(4, 8), -1)],
        "diagonal.default": lambda: [s(n(4, 8)), s(n(4, 2, 8), 1, 2, 0)],
        "unsqueeze.default": lambda: [s(n(4, 8), 1), s(n(4, 8), -1)],
        "squeeze.default": lambda: [s(n(4, 1, 2))],
        "squeeze.dim": lambda: [s(n(4, 1, 2), 1), s(n(4, 2), 0)],
        "squeeze.dims": lambda: [s(n(4, 1, 2, 1), (1, 3, 2))],
        "expand.default": lambda: [s(n(4, 1, 8), (4, 6, 8)), s(n(8), (4, 8)), s(n(4, 1), (2, 4, 8)), s(n(4, 8), (-1, 8))],
        "broadcast_to.default": lambda: [s(n(4, 1), (4, 8))],
        "repeat.default": lambda: [s(n(4, 1), (1, 8)), s(n(4, 8), (2, 1, 2)), s(n(4, 8), (1, 1)), s(n(3, 2), (4, 1, 2))],
        "tile.default": lambda: [s(n(4, 1), (8,)), s(n(4, 8), (1, 2))],
        "repeat_interleave.self_int": lambda: [s(n(4, 8), 2, 0), s(n(4, 8), 3, -1, output_size=24), s(n(4), 2), s(n(2, 4), 2)],
        "tril.default": triangle,
        "triu.default": triangle,
    }


def _joining() -> dict[str, Maker]:
    return {
        "cat.default": lambda: [s((n(4, 8), n(4, 2)), 1), s((n(4, 8), n(2, 8))), s((n(4, 8), n(0), n(4, 8)), -1)],
        "stack.default": lambda: [s((n(4, 8), n(4, 8)), 1), s((n(4), n(4), n(4)), -1)],
        "slice.Tensor": lambda: [
            s(n(4, 8), 1, 2, 6),
            s(n(4, 8), 0, 0, 2**63 - 1),
            s(n(4, 8), 1, None, None, 2),
            s(n(4, 8), 0, -2),
        ],
        "narrow.default": lambda: [s(n(4, 8), 1, 2, 4)],
        "split.Tensor": lambda: [s(n(4, 8), 3, 1), s(n(4, 8), 2)],
        "split_with_sizes.default": lambda: [s(n(4, 8), (2, 6), -1)],
        "chunk.default": lambda: [s(n(4, 8), 3, -1)],
        "select.int": lambda: [s(n(4, 8, 2), 1, 3), s(n(4, 8), -1, -1)],
        "unbind.int": lambda: [s(n(3, 4, 8)), s(n(4, 2), 1)],
        "slice_scatter.default": lambda: [s(n(4, 8), n(4, 2), 1, 2, 4)],
        "select_scatter.default": lambda: [s(n(4, 8), n(4), 1, 2)],
        "flip.default": lambda: [s(n(4, 8), (1,))],
        "roll.default": lambda: [s(n(4, 8), (2,), (1,)), s(n(4, 2), (3,))],
        "pad.default": lambda: [
            s(n(4, 8), (1, 2)),
            s(n(4, 8), (0, 0, 1, 0), "constant", 1.0),
            s(n(2, 4, 8), (1, 1), "replicate"),
        ],
        "constant_pad_nd.default": lambda: [s(n(4, 8), (1, 2)), s(n(4, 8), (0, 0, 1, 1), 3.0)],
        "unfold.default": lambda: [s(n(4, 8), 1, 4, 2)],
        "meshgrid.indexing": lambda: [s((n(4), n(6)), indexing="ij"), s((n(4), n(6), n(2)), indexing="xy")],
        "diff.default": lambda: [s(n(4, 8)), s(n(4, 8), 1, 0, n(2, 8))],
    }


TABLES = _pointwise, _matmul, _views, _joining
