"""What can go wrong, as types a caller can catch.

Every error says what was asked for, what is wrong with it, and what to do, and is a ``MeshwrightError``. Errors about a value's
own form stay beside that value (``MeshError``, ``ShardingError``, ``GraphError``, ``RuleError``). Where Python
has a type of its own for such a mistake, an error is that as well (``PlanError`` is a ``ValueError``).
"""

from __future__ import annotations

from typing import Any


class MeshwrightError(Exception):
    """Base of the errors that a user of meshwright can act on."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies without calling the constructor, which may want other arguments than the message: what one rank raises, the
        others raise too."""
        return _revive, (type(self), self.args, dict(self.__dict__))


def _revive(cls: type[MeshwrightError], args: tuple[Any, ...], state: dict[str, Any]) -> MeshwrightError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class CaptureError(MeshwrightError):
    """The model cannot be captured as one static graph. ``module``: path of the innermost module that was running;
    ``source``: "file:line" of the model's code; both empty where unknown."""

    def __init__(self, message: str, *, module: str = "", source: str = "") -> None:
        super().__init__(message)
        self.module = module
        self.source = source


class NotKeptError(MeshwrightError):
    """Something in a forward that its graph would lose, so that gradients would silently be others; ``remedy``: what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class InputError(MeshwrightError, TypeError):
    """A call whose arguments do not fit: the forward's signature, or the inputs that the plan was made for."""


class PlanError(MeshwrightError, ValueError):
    """A plan that cannot be made, read or run. ``difference``: of its graph from what a model computes, if that is why."""

    difference: str = ""


class CheckpointError(MeshwrightError, ValueError):
    """A checkpoint or state dict that cannot be read, or that is another model's."""


class ExportError(MeshwrightError, ValueError):
    """An exported program that cannot be written, or one that is damaged, or made for other devices, versions or rules."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A folder that holds no checkpoint."""

    def __new__(cls, *args: Any) -> MissingCheckpointError:
        """As an OSError, which among the bases has the larger instances."""
        return FileNotFoundError.__new__(cls, *args)

    def __str__(self) -> str:
        return str(self.args[0])


class RunError(MeshwrightError, RuntimeError):
    """What a parallel module is asked to do cannot be done in the state it is in."""


class AbsentError(RunError, AttributeError):
    """What a sub-module of the model has, and that of a parallel module has not."""


class VerifyError(MeshwrightError):
    """A lowered program that would not compute what the graph says. ``node``: the operator (or port) at fault; ``module``: the
    path of the module it comes from ("" for the root); ``expected`` and ``found``: what should be and what is."""

    def __init__(self, node: str, module: str, expected: str, found: str) -> None:
        super().__init__(
            f"{module or 'the model'}: {node}: expected {expected}, found {found}. The program was not run; this is an error "
            "of the plan or of a pass, please report it with the plan"
        )
        self.node, self.module, self.expected, self.found = node, module, expected, found


class StageWarning(MeshwrightError, UserWarning):  # noqa: N818  (a warning, until a filter makes it an error)
    """What a loop does may be another thing on every stage of a pipeline. ``simplefilter("error", StageWarning)`` of
    ``warnings`` makes an error of it."""
