"""What can go wrong, as types a caller can catch.

Every error says what was asked for, what is wrong with it, and what to do. Errors about a value's own form stay beside
that value (``MeshError``, ``ShardingError``, ``GraphError``, ``RuleError``).
"""

from __future__ import annotations


class MeshwrightError(Exception):
    """Base of the errors that a user of meshwright can act on."""


class CaptureError(MeshwrightError):
    """The model cannot be captured as one static graph. ``module``: path of the innermost module that was running;
    ``source``: "file:line" of the model's code; both empty where unknown."""

    def __init__(self, message: str, *, module: str = "", source: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.source = source


class InputError(MeshwrightError, TypeError):
    """A call whose arguments do not fit: the forward's signature, or the inputs that the plan was made for."""


class VerifyError(MeshwrightError):
    """A lowered program that would not compute what the graph says. ``node``: the operator (or port) at fault; ``module``: the
    path of the module it comes from ("" for the root); ``expected`` and ``found``: what should be and what is."""

    def __init__(self, node: str, module: str, expected: str, found: str) -> None:
        super().__init__(
            f"{module or 'the model'}: {node}: expected {expected}, found {found}. The program was not run; this is an error "
            "of the plan or of a pass, please report it with the plan"
        )
        self.node, self.module, self.expected, self.found = node, module, expected, found
