"""Operators that work element by element, with broadcasting.

Every dim passes through; a dim of size 1 that broadcasts is free. Pending sums pass where the operator is linear: through
one operand of a product, through both of a sum together, through the numerator of a quotient, through casts between
floating types. An operator with a second number instead of a tensor is linear only if it scales: ``x + 1`` is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, words
from meshwright.ir.rule import Factor, OpRule

UNARY = words(
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu "
    "hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid "
    "logical_not logit mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh "
    "softplus sqrt square tan tanh trunc clamp clamp_min clamp_max threshold hardshrink softshrink celu"
)
UNARY_LINEAR = words("neg positive clone contiguous alias detach conj conj_physical resolve_conj resolve_neg real imag")
CASTS = ("_to_copy.default", "to.dtype", "to.device", "to.dtype_layout")
BINARY = words(
    "atan2.default bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor "
    "bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor copysign.Tensor __and__.Tensor __and__.Scalar "
    "__or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar "
    "le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar floor_divide.default floor_divide.Scalar fmax.default "
    "fmin.default fmod.Tensor fmod.Scalar hypot.default isclose.default logaddexp.default logaddexp2.default "
    "logical_and.default logical_or.default logical_xor.default maximum.default minimum.default pow.Tensor_Tensor "
    "pow.Tensor_Scalar pow.Scalar remainder.Tensor remainder.Scalar rsub.Scalar xlogy.Tensor clamp_min.Tensor "
    "clamp_max.Tensor min.other max.other add.Scalar sub.Scalar div.Tensor_mode div.Scalar_mode"
)
IN_PLACE = words(
    "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor add_.Scalar mul_.Scalar div_.Scalar pow_.Scalar fill_.Scalar"
)
IN_PLACE_UNARY = words("relu silu sigmoid tanh exp neg clamp clamp_min zero")


def _sum_of_two(call: Call) -> OpRule:
    """``x + alpha * y``: linear in both together, if both are tensors."""
    both = isinstance(call["other"], Operand)
    return call.line("..., ...? -> ... ; +0,1" if both else "..., ...? -> ...")


def _where(call: Call) -> OpRule:
    """``where(condition, x, y)``: linear in x and y together; a number on one side must be 0."""
    sides = (call["self"], call["other"])
    tensors = [side.position for side in sides if isinstance(side, Operand)]
    zero = all(isinstance(side, Operand) or side == 0 for side in sides)
    line = ", ".join(["..."] * len(call.slots)) + " -> ..."
    return call.line(line, linear=[tensors] if zero and tensors else [])


def _masked_fill(call: Call) -> OpRule:
    """Linear if what is filled in is 0, or a tensor that is pending too."""
    value = call["value"]
    if isinstance(value, Operand):
        return call.line("..., ..., ... -> ... ; +0,2")
    return call.line("..., ... -> ... ; +0" if value == 0 else "..., ... -> ...")


def _type_as(call: Call) -> OpRule:
    """The second operand lends its dtype alone: it may be split as the first where the shapes allow, else it stays whole."""
    x, other = call["self"], call["other"]
    if x.shape == other.shape:
        return call.line("..., ... -> ... ; +0")
    dims = [f"dim{i}" for i in range(x.ndim)]
    return call.rule([dims, [None] * other.ndim], [dims], linear=[[0]])


def _prelu(call: Call) -> OpRule:
    """A slope for every channel (dim 1), or one for all."""
    x, slope = call["self"], call["weight"]
    dims: list[Factor | None] = [f"dim{i}" for i in range(x.ndim)]
    own = [dims[1] if slope.shape[0] > 1 and x.ndim > 1 else None] if slope.ndim else []
    return call.rule([dims, own], [dims])


def _searchsorted(call: Call) -> OpRule:
    """One sorted row for all, or one for each row that is sought in."""
    row, sought = call["sorted_sequence"], call["self"]
    if call["sorter"] is not None:
        return call.whole()
    dims: list[Factor | None] = [f"dim{i}" for i in range(sought.ndim)]
    if row.ndim > 1:
        dims[-1] = None
    return call.rule([[None] if row.ndim == 1 else dims, dims], [dims])


def _isin(call: Call) -> OpRule:
    elements, tested = call["elements"], call["test_elements"]
    dims = [f"dim{i}" for i in range(elements.ndim)]
    return call.rule([dims, [None] * tested.ndim], [dims])


def _broadcast_tensors(call: Call) -> OpRule:
    """Every operand broadcast to the common shape."""
    terms = ", ".join(["..."] * len(call.operands))
    return call.line(f"{terms} -> {terms}")


def _two(name: str) -> bool:
    """Whether an overload of BINARY takes two tensors, not a tensor and a number."""
    return name.rpartition(".")[2] in ("Tensor", "default", "Tensor_Tensor", "Tensor_mode", "other")


def _rules() -> dict[str, Declaration]:
    pointwise, scaled = "... -> ...", "... -> ... ; +0"
    rules = {f"aten.{name}.default": declare(pointwise) for name in UNARY}
    rules |= {f"aten.{name}.default": declare(scaled) for name in UNARY_LINEAR}
    rules |= {f"aten.{name}_.default": declare(pointwise) for name in IN_PLACE_UNARY}
    rules |= {f"aten.{name}": declare(scaled) for name in CASTS}
    rules |= {f"aten.{name}": declare("..., ...? -> ..." if _two(name) else pointwise) for name in BINARY}
    rules |= {f"aten.{name}": declare("..., ...? -> ..." if _two(name) else pointwise) for name in IN_PLACE}
    rules |= {f"aten.{name}.Tensor": declare(_sum_of_two) for name in ("add", "sub")}
    rules |= {f"aten.{name}.Tensor": declare("..., ...? -> ... ; +0 +1") for name in ("mul", "multiply")}
    rules |= {f"aten.{name}.Tensor": declare("..., ...? -> ... ; +0") for name in ("div", "true_divide", "divide")}
    rules |= {f"aten.{name}.Scalar": declare(scaled) for name in ("mul", "div")}
    rules |= {f"aten.where.{name}": declare(_where) for name in ("self", "ScalarOther", "ScalarSelf", "Scalar")}
    rules |= {f"aten.masked_fill.{name}": declare(_masked_fill) for name in ("Scalar", "Tensor")}
    rules |= {
        "aten.copy_.default": declare("..., ... -> ..."),
        "aten.copy.default": declare("..., ... -> ... ; +1"),
        "aten.fill.Tensor": declare("..., () -> ... ; +1"),
        "aten.fill.Scalar": declare(pointwise),
        "aten.zero.default": declare(pointwise),
        "aten.masked_fill_.Scalar": declare("..., ... -> ..."),
        "aten.clamp.Tensor": declare("..., ...?, ...? -> ..."),
        "aten.addcmul.default": declare("..., ..., ... -> ... ; +0,1 +0,2"),
        "aten.addcdiv.default": declare("..., ..., ... -> ... ; +0,1"),
        "aten.lerp.Scalar": declare("..., ... -> ... ; +0,1"),
        "aten.lerp.Tensor": declare("..., ..., ... -> ... ; +0,1"),
        "aten.complex.default": declare("..., ... -> ... ; +0,1"),
        "aten.polar.default": declare("..., ... -> ..."),
        "aten.expand_as.default": declare("..., ... -> ... ; +0"),
        "aten.view_as_complex.default": declare("*b . -> *b ; +0"),
        "aten.view_as_real.default": declare("*b -> *b . ; +0"),
        "aten.type_as.default": declare(_type_as),
        "aten.broadcast_tensors.default": declare(_broadcast_tensors),
        "aten.bucketize.Tensor": declare("..., . -> ..."),
        "aten.searchsorted.Tensor": declare(_searchsorted),
        "aten.isin.Tensor_Tensor": declare(_isin),
        "aten.prelu.default": declare(_prelu),
        "aten._prelu_kernel.default": declare("..., ... -> ..."),
    }
    return rules


RULES: Mapping[str, Declaration] = _rules()
