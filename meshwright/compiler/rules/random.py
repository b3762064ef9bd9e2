"""Operators that draw random numbers.

Dropout passes every dim; its mask comes from (seed, salt), where the salt is made of the operator's name and the index of this
rank's piece: replicas draw the same mask, pieces different ones. Other draws are made in full on every rank from torch's
default generator, which the ranks must seed alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Rewritten, argument, words
from meshwright.ir.graph import Op, Ref
from meshwright.ir.program import SEED
from meshwright.ir.rule import Local, OpRule

WHOLE = words(
    "rand.default rand_like.default randn.default randn_like.default randint.default randint.low randperm.default "
    "bernoulli.default bernoulli.p normal.Tensor_float multinomial.default uniform.default "
    "alpha_dropout.default feature_dropout.default exponential.default"
)


def salt(op: Op, local: Local) -> int:
    """A number that tells this operator and this piece of its result from all others."""
    index = local.mesh.index(local.coordinates, local.placed.results[0].split_axes)
    return zlib.crc32(f"{op.name}/{index}".encode())


def _dropout(op: Op, local: Local) -> Rewritten:
    p, train = argument(op, "p"), argument(op, "train")
    if not train or not p:
        return op.target, op.args, op.kwargs
    return "mw.dropout", (argument(op, "input"), p, Ref(SEED), salt(op, local)), ()


def _native_dropout(call: Call) -> OpRule:
    """Returns its mask too. Where it draws it is whole; a captured graph has ``aten.dropout`` in its place."""
    return call.whole() if call["p"] and call["train"] is not False else call.line("... -> ..., ...")


def _whole(call: Call) -> OpRule:
    return call.whole()


RULES: Mapping[str, Declaration] = {
    "aten.dropout.default": declare("... -> ...", _dropout),
    "aten.native_dropout.default": declare(_native_dropout),
    **{f"aten.{name}": declare(_whole) for name in WHOLE},
}
