"""Operators that draw random numbers. A dim along which every number is drawn independently of the others may be split.

Everything else about drawing is in ``meshwright.ir.declared.draws``. An operator without an entry here is not split: every rank
draws the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, dims_of, rewrite, words
from meshwright.ir.declared.draws import Seeded
from meshwright.ir.declared.operator import Cost, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.rule import Local, OpRule

ONE = words(
    "bernoulli.default bernoulli.p uniform.default exponential.default normal_functional.default cauchy.default "
    "log_normal.default geometric.default random.default random.from random.to poisson.default normal.Tensor_float "
    "normal.float_Tensor"
)
LIKE = words("rand_like.default randn_like.default randint_like.default randint_like.low_dtype")
CHANGED = words("_standard_gamma.default rrelu.default alpha_dropout.default")
TWO = words("bernoulli.Tensor normal.Tensor_Tensor binomial.default")
SIZED = words("rand.default randn.default randint.default randint.low normal.float_float")
FEATURES = words("feature_dropout.default feature_alpha_dropout.default")


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


def _mask(work: Work) -> float:
    """A mask as wide as the data."""
    active = work.literal(1, "p", 0.5) != 0 and bool(work.literal(2, "train", True))
    return math.prod(work.results[0]) * work.reads.itemsize if active else 0


def _drawn(work: Work) -> tuple[float, float]:
    return float(work.made_bytes()), 0.0


MASKED = Saves.parse("", extra=_mask)
made = partial(declare, cost="factory", saves="")

RULES: Mapping[str, Declaration] = {
    "aten.dropout.default": declare("... -> ... ; +0", _dropout, cost="pointwise", saves=MASKED),
    "mw.dropout": declare(None, cost=Cost("pointwise", space=_drawn), saves=MASKED),
    "aten.native_dropout.default": declare("... -> ..., ...", cost="pointwise", saves="r1"),
    "aten.rrelu_with_noise_functional.default": declare("..., ... -> ..., ..."),
    "aten.multinomial.default": made("*b k! -> *b ."),
    "aten.randperm.default": made(_whole),
    "aten._sample_dirichlet.default": declare(_whole),
    **{f"aten.{name}": made("... -> ...") for name in ONE},
    **{f"aten.{name}": made("... -> ...", gradient=False) for name in LIKE},
    **{f"aten.{name}": declare("... -> ...") for name in CHANGED},
    **{f"aten.{name}": made("..., ... -> ...") for name in TWO},
    **{f"aten.{name}": made("-> ...", _sized) for name in SIZED},
    **{f"aten.{name}": declare(_features) for name in FEATURES},
}
