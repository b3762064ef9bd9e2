"""Operators that draw random numbers: along which dims each number is drawn on its own, so that pieces may be.

Everything else about drawing is in ``meshwright.ir.draws``. An operator that is not here is whole: every rank draws the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, dims_of, rewrite, words
from meshwright.ir.draws import Seeded
from meshwright.ir.graph import Op
from meshwright.ir.rule import Local, OpRule

ONE = words(
    "bernoulli.default bernoulli.p uniform.default exponential.default normal_functional.default cauchy.default "
    "log_normal.default geometric.default random.default random.from random.to rand_like.default randn_like.default "
    "randint_like.default randint_like.low_dtype poisson.default _standard_gamma.default normal.Tensor_float "
    "normal.float_Tensor rrelu.default alpha_dropout.default"
)
TWO = words("bernoulli.Tensor normal.Tensor_Tensor binomial.default")
SIZED = words("rand.default randn.default randint.default randint.low normal.float_float")
FEATURES = words("feature_dropout.default feature_alpha_dropout.default")
WHOLE = words("randperm.default _sample_dirichlet.default")


def _dropout(op: Op, local: Local) -> Rewritten:
    p, train = argument(op, "p"), argument(op, "train")
    if not train or not p:
        return op.target, op.args, op.kwargs
    return "mw.dropout", (argument(op, "input"), p), ()


def _sized(op: Op, local: Local) -> Rewritten:
    return rewrite(op, size=local.result_shape())


def _features(call: Call) -> OpRule:
    """A number per sample and channel, the same at every place: ranks that split the places draw alike."""
    dims = dims_of(call.operands[0])
    return call.rule([dims], [dims], localize=Seeded(None, frozenset({"dim0", "dim1"})))


def _whole(call: Call) -> OpRule:
    return call.whole()


RULES: Mapping[str, Declaration] = {
    "aten.dropout.default": declare("... -> ...", _dropout),
    "aten.native_dropout.default": declare("... -> ..., ..."),
    "aten.rrelu_with_noise_functional.default": declare("..., ... -> ..., ..."),
    "aten.multinomial.default": declare("*b k! -> *b ."),
    **{f"aten.{name}": declare("... -> ...") for name in ONE},
    **{f"aten.{name}": declare("..., ... -> ...") for name in TWO},
    **{f"aten.{name}": declare("-> ...", _sized) for name in SIZED},
    **{f"aten.{name}": declare(_features) for name in FEATURES},
    **{f"aten.{name}": declare(_whole) for name in WHOLE},
}
