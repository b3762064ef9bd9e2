"""The operators' sharding rules.

``default_rules().rule_for(op, graph)`` is all the compiler needs; ``register_rule`` is how a user adds an operator. The tables
are by subject: pointwise, matmul, views, joining, normalization, attention, indexing, reductions, loss, convolution,
recurrent, factories, random. The notation of their lines is ``meshwright.ir.notation``.
"""

from meshwright.compiler.rules.book import (
    Declaration,
    RuleBook,
    builtin_rules,
    declare,
    default_rules,
    register_rule,
    target_name,
)
from meshwright.compiler.rules.call import Call, Operand, RuleFunction, argument, rewrite

__all__ = [
    "Call", "Declaration", "Operand", "RuleBook", "RuleFunction", "argument", "builtin_rules", "declare", "default_rules",
    "register_rule", "rewrite", "target_name",
]
