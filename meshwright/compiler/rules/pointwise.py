"""Operators that work element by element, with broadcasting.

Every dim passes through; a dim of size 1 that broadcasts is free. Pending sums pass where the operator is linear: through
one operand of a product, through both of a sum together, through the numerator of a quotient, through casts between
floating types. An operator with a number instead of a tensor is linear only if it scales: ``x + 1`` is not. Of sums, products
and quotients the number may come first (``torch.add(1, x)``): torch keeps it there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, words
from meshwright.ir.declared.operator import Cost, Saves, Work
from meshwright.ir.graph import Ref
from meshwright.ir.rule import Factor, OpRule

elementwise = partial(declare, elementwise=True)

READS = words(
    "abs clamp clamp_max clamp_min cos erf gelu hardsigmoid hardswish hardtanh leaky_relu log log1p log2 logit mish silu sin "
    "softplus square"
)
"""One operand, which the gradient needs."""
MAKES = words("elu exp expm1 reciprocal relu rsqrt sigmoid sqrt tanh")
"""One operand; the gradient needs the result."""
STEPS = words("bitwise_not ceil floor isinf isnan logical_not round sign")
"""One operand; the gradient is zero, or there is none."""
UNPRICED = words(
    "acos acosh angle asin asinh atan atanh cosh deg2rad digamma erfc erfinv exp2 fake_quantize_per_tensor_affine frac i0 "
    "isfinite isneginf isposinf lgamma log10 log_sigmoid nan_to_num rad2deg relu6 selu sgn signbit sinc sinh special_bessel_j0 "
    "special_bessel_j1 special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri tan trunc "
    "threshold hardshrink softshrink celu"
)
"""One operand, priced as an operator that nobody declared."""
UNARY_LINEAR = words("positive conj _conj conj_physical resolve_conj resolve_neg real imag")
CASTS = ("_to_copy.default", "to.dtype", "to.device", "to.dtype_layout")
BINARY = words(
    "atan2.default bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor "
    "bitwise_right_shift.Tensor_Scalar copysign.Tensor __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar "
    "__xor__.Tensor __xor__.Scalar __lshift__.Tensor __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar fmax.default "
    "fmin.default fmod.Tensor fmod.Scalar gcd.default heaviside.default hypot.default isclose.default lcm.default ldexp.Tensor "
    "logaddexp.default logaddexp2.default nextafter.default special_xlog1py.default special_zeta.default xlogy.Tensor"
)
"""Priced as an operator that nobody declared."""
COMPARED = words(
    "bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar eq.Tensor "
    "eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar "
    "floor_divide.Scalar logical_and.default logical_or.default logical_xor.default remainder.Tensor "
    "remainder.Scalar rsub.Scalar"
)
"""The gradient needs nothing, or there is none."""
IN_PLACE = words("sub_.Tensor mul_.Tensor div_.Tensor mul_.Scalar div_.Scalar pow_.Scalar fill_.Scalar")
EITHER = "...?, ...? -> ..."
"""Two tensors, or a tensor and a number on either side."""
IN_PLACE_UNARY = words("relu silu sigmoid exp neg clamp clamp_min zero")


def _alike(work: Work) -> Collection[int]:
    """The operands that have the result's shape: the gradient of a sum is theirs."""
    return () if "alpha" in dict(work.kwargs) else [i for i, shape in enumerate(work.operands) if shape == work.results[0]]


def _first_alike(work: Work) -> Collection[int]:
    return [0] if work.operands[0] == work.results[0] and not _number_first(work.args) else ()


def _number_first(args: Sequence[Any]) -> bool:
    """Whether the first of two operands is a plain number, so that the tensor at position 0 is the second one."""
    return bool(args) and not isinstance(args[0], Ref)


def _quotient_saves(args: tuple[Any, ...]) -> Saves:
    """The divisor; the numerator too where the divisor takes a gradient."""
    return Saves.parse("0" if _number_first(args) else "0:1 1:0,1")


def _one_more(work: Work) -> tuple[float, float]:
    return 0.0, float(work.made_bytes())


def _two_more(work: Work) -> tuple[float, float]:
    return 0.0, 2.0 * work.made_bytes()


SUM, DIFFERENCE = Cost("linear", passes=_alike), Cost("linear", passes=_first_alike, space=_one_more)
QUOTIENT, POWER = Cost("pointwise", space=_one_more), Cost("pointwise", space=_two_more)


def _sum_of_two(call: Call) -> OpRule:
    """``x + alpha * y``: linear in both together, if both are tensors."""
    both = all(isinstance(call[side], Operand) for side in ("self", "other"))
    return call.line("..., ... -> ... ; +0,1" if both else EITHER)


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


def _line(name: str) -> str:
    """The line of an overload of two tensors, or of a tensor and a number."""
    two = name.rpartition(".")[2] in ("Tensor", "default", "Tensor_Tensor", "Tensor_mode", "other")
    return "..., ...? -> ..." if two else "... -> ..."


def _unary() -> dict[str, Declaration]:
    one, scaled = "... -> ...", "... -> ... ; +0"
    space = {"rsqrt": POWER}
    rules = {f"aten.{name}.default": elementwise(one, cost="pointwise") for name in READS}
    rules |= {f"aten.{name}.default": elementwise(one, cost=space.get(name, "pointwise"), saves="r0") for name in MAKES}
    rules |= {f"aten.{name}.default": elementwise(one, cost="linear", saves="") for name in STEPS}
    rules |= {f"aten.{name}.default": elementwise(one) for name in UNPRICED}
    rules |= {f"aten.{name}.default": elementwise(scaled) for name in UNARY_LINEAR}
    rules |= {f"aten.{name}_.default": declare(one) for name in IN_PLACE_UNARY}
    rules |= {f"aten.{name}": elementwise(scaled, cost="linear", saves="") for name in CASTS}
    return rules | {
        "aten.neg.default": elementwise(scaled, cost="linear", saves=""),
        "aten.clone.default": declare(scaled, cost=Cost("copy", passes=lambda work: [0], layout="first"), saves=""),
        "aten.contiguous.default": declare(scaled, cost=Cost("view", layout="contiguous"), saves=""),
        "aten.alias.default": declare(scaled, cost="view", saves=""),
        "aten.detach.default": declare(scaled, cost="view", saves="", gradient=False),
        "aten.tanh_.default": declare(one, cost="pointwise", saves="r0"),
        "aten.polygamma.default": elementwise(one),
        "aten.round.decimals": elementwise(one, cost="linear", saves=""),
        "aten.fill.Scalar": declare(one),
        "aten.zero.default": declare(one),
        "aten.view_as_complex.default": declare("*b . -> *b ; +0", dense=True),
        "aten.view_as_real.default": declare("*b -> *b . ; +0"),
    }


def _binary() -> dict[str, Declaration]:
    two, quotient = "..., ...? -> ...", f"{EITHER} ; +0"
    rules = {f"aten.{name}": elementwise(_line(name)) for name in BINARY}
    rules |= {f"aten.{name}": elementwise(_line(name), cost="linear", saves="") for name in COMPARED}
    rules |= {f"aten.{name}.default": elementwise(two, cost="pointwise", saves="0 1") for name in ("maximum", "minimum")}
    rules |= {f"aten.{name}.other": declare(_line(".other"), cost="reduce", saves="r1") for name in ("min", "max")}
    rules |= {f"aten.{name}.Tensor": elementwise(two, cost="pointwise") for name in ("clamp_min", "clamp_max")}
    rules |= {f"aten.pow.{name}": elementwise(_line(name), cost=POWER) for name in ("Tensor_Tensor", "Tensor_Scalar", "Scalar")}
    rules |= {f"aten.{name}": declare(_line(name)) for name in IN_PLACE}
    rules |= {f"aten.add_.{name}": declare(_line(name), cost="linear", saves="") for name in ("Tensor", "Scalar")}
    for name, cost in (("add", SUM), ("sub", DIFFERENCE)):
        rules[f"aten.{name}.Tensor"] = elementwise(_sum_of_two, cost=cost, saves="")
        rules[f"aten.{name}.Scalar"] = elementwise("... -> ...", cost=cost, saves="")
    for name in ("Tensor", "Scalar"):
        rules[f"aten.mul.{name}"] = elementwise(
            f"{EITHER} ; +0 +1" if name == "Tensor" else "... -> ... ; +0", cost="pointwise", saves="0:1 1:0"
        )
        rules[f"aten.div.{name}"] = elementwise(
            quotient if name == "Tensor" else "... -> ... ; +0", cost=QUOTIENT, saves="0:1 1:0,1", saves_of=_quotient_saves
        )
        line = EITHER if name == "Tensor" else "... -> ..."
        rules[f"aten.div.{name}_mode"] = elementwise(line, cost=QUOTIENT, saves="0:1 1:0,1", saves_of=_quotient_saves)
        rules[f"aten.masked_fill.{name}"] = elementwise(_masked_fill, cost="linear", saves="1")
    return rules | {
        "aten.multiply.Tensor": elementwise(f"{EITHER} ; +0 +1"),
        "aten.true_divide.Tensor": elementwise(quotient),
        "aten.divide.Tensor": elementwise(quotient),
        "aten.floor_divide.default": elementwise(EITHER, cost="linear", saves=""),
    }


def _others() -> dict[str, Declaration]:
    rules = {
        f"aten.where.{name}": elementwise(_where, cost="pointwise") for name in ("self", "ScalarOther", "ScalarSelf", "Scalar")
    }
    return rules | {
        "aten.copy_.default": declare("..., ... -> ...", saves=""),
        "aten.copy.default": declare("..., ... -> ... ; +1", saves=""),
        "aten.fill.Tensor": declare("..., () -> ... ; +1"),
        "aten.masked_fill_.Scalar": declare("..., ... -> ..."),
        "aten.clamp.Tensor": elementwise("..., ...?, ...? -> ...", cost="pointwise"),
        "aten.addcmul.default": elementwise("..., ..., ... -> ... ; +0,1 +0,2", cost="pointwise", saves="0 1:0 2:0"),
        "aten.addcdiv.default": elementwise("..., ..., ... -> ... ; +0,1"),
        "aten.lerp.Scalar": elementwise("..., ... -> ... ; +0,1"),
        "aten.lerp.Tensor": elementwise("..., ..., ... -> ... ; +0,1"),
        "aten.complex.default": elementwise("..., ... -> ... ; +0,1"),
        "aten.polar.default": elementwise("..., ... -> ..."),
        "aten.expand_as.default": declare("..., ... -> ... ; +0", cost="view", saves=""),
        "aten.type_as.default": declare(_type_as, cost="linear", saves=""),
        "aten.broadcast_tensors.default": declare(_broadcast_tensors),
        "aten.bucketize.Tensor": declare("..., . -> ..."),
        "aten.searchsorted.Tensor": declare(_searchsorted),
        "aten.isin.Tensor_Tensor": declare(_isin),
        "aten.prelu.default": declare(_prelu),
        "aten._prelu_kernel.default": elementwise("..., ... -> ..."),
    }


RULES: Mapping[str, Declaration] = {**_unary(), **_binary(), **_others()}
