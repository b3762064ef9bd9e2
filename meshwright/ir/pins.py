"""Pins: the parts of a plan that a person decides; what is not pinned is searched."""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.ir.mesh import ANY, HEADS, ORDER, PP, SAMPLED, Mesh, role_of
from meshwright.ir.schedules import schedules, unknown
from meshwright.ir.writing.lines import pins_of_lines
from meshwright.ir.writing.names import ROOT as ROOT

RECOMPUTE = ("none", "selective", "full")
GATHER, ULYSSES, RING = "all-gather", "ulysses", "ring"
ATTENTION = (GATHER, ULYSSES, RING)
"""How attention runs whose sequence is split: keys and values are gathered, sequence is exchanged for heads, or keys and values
pass by."""
WINDOW = "window"
"""How attention within a window runs then, whether gathering or passing by is asked for: what the window reaches is fetched."""
NO_STAGES = "none"
"""The name of having no pipeline among schedules."""
_COUNTS = ("dp", "shard", "tp", "cp", "pp", "ep", "virtual_stages", "stages", "microbatches", "micro_batch")
BOUNDED = (*_COUNTS, "zero")
"""Pins that may be bounds, such as "<=4"."""
OPEN = (*BOUNDED, "schedule", "recompute", "attention", "sequence_parallel")
"""Pins that may be lists of values."""
_NAMED = ("tensors", "operators", "values", "blocks")
_WORDS: Mapping[str, Sequence[str]] = {"recompute": RECOMPUTE, "attention": ATTENTION}
_ROWS: Mapping[str, str] = {"loss_rows": "logits", "mlp_rows": "inner values"}
_BOUND = re.compile(r"<=\s*(\d{1,18})")
_MOST, _MANY, _LONGEST = 1 << 31, 4096, 100
"""A number that is pinned is at most so large, as it is in a plan's file. A list has so many values at most. An error shows a
value of so many characters."""


def named_by(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pin is for: the one that it is to the letter, brackets and all, else those that it matches."""
    names = list(names)
    return [pattern] if pattern in names else fnmatch.filter(names, pattern)


_LOOKED_AT, _COMBINED, _VALUES = 400, 200_000, 16
"""Of the settings near pins so many are looked at for each number of changes, the nearest, where there are not more in all, and
so many other values of one pin."""


class PinError(MeshwrightError, ValueError):
    """Pins that contradict each other, the devices or the model."""


@dataclass(frozen=True)
class Pins:
    """Degrees of parallelism and other decisions taken by hand; None is searched.

    ``dp`` data, ``shard`` the ZeRO group within dp (dp/shard replicas: HSDP), ``tp`` tensor, ``cp`` context, ``pp`` pipeline,
    ``ep`` those of the data ranks over which experts are split; ``zero`` 0 to 3; ``sequence_parallel`` (Megatron's: activations
    between blocks split over tp along the sequence); ``attention`` under cp: "all-gather", "ulysses" or "ring"; ``ulysses``: of
    the cp ranks the near ones (axis ``up``) that exchange sequence for heads, while attention runs over the others as it does;
    ``microbatches``; ``recompute``; ``loss_rows``: the loss in pieces, the logits of so many of a rank's tokens at a time (0:
    all at once); ``mlp_rows``: MLPs in pieces, the inner values of so many tokens at a time (0: all at once); ``tensors``:
    {pattern of a parameter name: sharding in the notation}, as a table prints it ("f32[14336@tp, 4096]") or without what does
    not matter ("[_@tp, _]").

    What ``Plan.to_pins`` writes (``ir.writing``): ``axes``: {axis: size} of the mesh, the outermost first, instead of the
    degrees (those with roles lie as ``mesh.ORDER`` says, unless everything is pinned); ``operators``:
    {name or pattern: choice}; ``values``: {name: the sharding that its readers share}; ``blocks``: {path: how its parameters
    are kept}. In a dict a name with ":" or "." may stand beside the other keys; text is read as lines of a printed plan.

    Some may be left open in part: to a list of values (``OPEN``), or up to a bound (``BOUNDED``). ``stages``: of a pipeline in
    all; ``micro_batch``: samples of a data rank's micro-batch; the schedule "none" is no pipeline. ``among`` and ``most`` hold
    what was read from lists and bounds, of a dict (``of``) or of arguments.

    >>> Pins(dp=2, tp=2).degrees()
    {'dp': 2, 'tp': 2}
    >>> print(Pins.of({"tp": [1, 2, 4], "micro_batch": "<=4", "schedule": ["none", "1f1b"]}))
    tp among 1, 2, 4; schedule among none, 1f1b; micro_batch <= 4
    >>> print(Pins.of({"schedule": "none"}))
    pp=1
    """

    dp: int | None = None
    shard: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    microbatches: int | None = None
    recompute: str | None = None
    attention: str | None = None
    ulysses: int | None = None
    stage_cuts: tuple[str, ...] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, int] | None = None
    micro_batch: int | None = None
    stages: int | None = None
    loss_rows: int | None = None
    mlp_rows: int | None = None
    among: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read_named()
        self._read_open()
        if self.stage_cuts is not None:
            _check_cuts(self.stage_cuts)
        if self.shard is not None:
            if self.dp is not None and self.dp % self.shard:
                low = [n for n in range(1, math.isqrt(self.dp) + 1) if self.dp % n == 0]
                legal = [n for n in (*low, *(self.dp // n for n in reversed(low))) if n > bool(self.zero)]
                near = min(legal, key=lambda n: abs(n - (self.shard or n)), default=None)
                raise PinError(f"pin shard={self.shard} must divide dp={self.dp}: it is the ZeRO group within the data ranks; "
                               + (f"pin a divisor of it, such as shard={near}" if near else "drop it"))
            if self.zero and self.shard == 1 and self.dp != 1 and not self.says("cp"):
                raise PinError(f"pins shard=1 and zero={self.zero} contradict: a group of one rank splits nothing; drop one")
            if self.zero == 0 and self.shard > 1:
                raise PinError(f"pins shard={self.shard} and zero=0 contradict: zero=0 keeps whole replicas; drop one")
        for name in ("schedule", "stage_cuts", "virtual_stages"):
            if self.pp == 1 and getattr(self, name) not in (None, 1):
                raise PinError(f"pin {name}={getattr(self, name)!r} needs pp > 1: without a pipeline there are no stages; "
                               "pin pp=2 or more, or drop it")
        if self.axes is not None:
            _check_axes(self)
        if self.says("attention") and self.cp == 1:
            raise PinError(f"pin {self.shown('attention')} needs cp > 1, found cp=1: it says how attention runs whose sequence "
                           "is split; drop it, or pin another cp")
        if self.sequence_parallel and self.tp == 1:
            raise PinError("pin sequence_parallel=True needs tp > 1: the sequence is split over the tensor-parallel ranks; pin "
                           "tp=2 or more, or drop it")

    @classmethod
    def of(cls, pins: Pins | Mapping[str, Any] | str | None) -> Pins:
        """From a dict, checking its keys, or from lines of a printed plan; None is no pins."""
        if pins is None:
            return cls()
        if isinstance(pins, Pins):
            return pins
        if isinstance(pins, str):
            try:
                pins = pins_of_lines(pins)
            except ValueError as error:
                raise PinError(str(error)) from None
        if not isinstance(pins, Mapping):
            raise PinError(f"pins {_brief(pins)} are no dict of pins; give {{name: value}}, such as {{'tp': 2}}, or lines of a "
                           "printed plan as text")
        known = [f.name for f in fields(cls)]
        named = {key: text for key, text in pins.items() if key not in known and isinstance(key, str)
                 and ("." in key or ":" in key)}
        if named:
            pins = {key: value for key, value in pins.items() if key not in named}
            for key, text in named.items():
                kept = isinstance(text, str) and text.lstrip().startswith("ZeRO ")
                name = "blocks" if kept else "operators" if ":" in key else "tensors"
                beside = pins.get(name)
                if beside is None or isinstance(beside, Mapping):  # else it is refused as it stands
                    pins[name] = {**(beside or {}), key: text}
        for key in pins:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1) if isinstance(key, str) else []
                hint = f"; did you mean {near[0]!r}? Known" if near else "; known"
                raise PinError(f"unknown pin {_brief(key)}{hint} pins: {', '.join(known)}")
        return cls(**pins)

    def _read_named(self) -> None:
        """What is pinned by name is a dict of texts; None is nothing, as it is of the other pins."""
        for name in _NAMED:
            given: Any = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, {})
            elif not isinstance(given, Mapping):
                raise PinError(f"pin {name}={_brief(given)} is no dict; give {{name: text}}, the names and what is pinned for "
                               "them")
            elif wrong := [pair for pair in given.items() if not all(isinstance(text, str) for text in pair)]:
                key, text = map(_brief, wrong[0])
                raise PinError(f"pin {name}: {key}: {text} must be two texts, a name and what is pinned for it")

    def _read_open(self) -> None:
        """Lists and bounds among the arguments become ``among`` and ``most``; no pipeline as a schedule becomes pp=1."""
        among, most = _opened("among", self.among, OPEN), _opened("most", self.most, BOUNDED)
        for key in OPEN:
            value = getattr(self, key)
            if isinstance(value, str) and key in BOUNDED and (bound := _BOUND.fullmatch(value.strip())):
                most[key] = int(bound[1])
            elif isinstance(value, list | tuple | set | frozenset | range):
                among[key] = value
            else:
                continue
            object.__setattr__(self, key, None)
        for key, bound in most.items():
            least = 0 if key == "zero" else 1
            if not _is_count(bound, least):
                raise PinError(f"pin {key}={f'<={_brief(bound)}'!r} leaves nothing; the least is {least}")
        among = {key: _options(key, value) for key, value in among.items()}
        for key in [key for key, options in among.items() if len(options) == 1]:
            object.__setattr__(self, key, among.pop(key)[0])
        if set(among.get("sequence_parallel", ())) == {True, False}:
            del among["sequence_parallel"]
        object.__setattr__(self, "among", among)
        object.__setattr__(self, "most", most)
        for name in (*_COUNTS, "ulysses", "zero", "sequence_parallel", *_ROWS, "schedule", *_WORDS):
            if (value := getattr(self, name)) is not None:
                _check_value(name, value)
        if self.schedule == NO_STAGES:
            if not self.allows("pp", 1):
                raise PinError(f"pins {self.shown('pp')} and schedule={NO_STAGES!r} contradict: without a pipeline pp is 1; "
                               "drop one")
            object.__setattr__(self, "schedule", None)
            object.__setattr__(self, "pp", 1)
            among.pop("pp", None)
            most.pop("pp", None)

    def says(self, name: str) -> bool:
        """Whether something is said of this pin, be it a list or a bound."""
        return getattr(self, name) not in (None, {}) or name in self.among or name in self.most

    @property
    def attentions(self) -> tuple[str, ...]:
        """The ways that are open in which attention may run whose sequence is split."""
        return tuple(one for one in ATTENTION if self.allows("attention", one))

    def allows(self, name: str, value: Any) -> bool:
        """Whether a value of what may be left open in part is open.

        >>> Pins.of({"tp": [1, 2]}).allows("tp", 4), Pins.of({"tp": "<=4"}).allows("tp", 4), Pins().allows("tp", 4)
        (False, True, True)
        """
        return (
            getattr(self, name) in (None, value) and value in self.among.get(name, (value,))
            and (name not in self.most or value <= self.most[name])
        )

    def near(self, context: int) -> int:
        """Of so many ranks that split the sequence, those that exchange it for heads while attention runs over the others."""
        wanted = self.ulysses or 1
        return wanted if context > wanted and context % wanted == 0 else 1

    def by_degrees(self) -> Pins:
        """The same with degrees in the place of axes that have roles.

        >>> print(Pins(axes={"dp_replicate": 2, "dp_shard": 4, "tp": 1}).by_degrees())
        dp=8; shard=4; tp=1; cp=1; pp=1; ep=1
        """
        if self.axes is None or any(role_of(axis.removesuffix("*")) == ANY for axis in self.axes):
            return self
        sizes = {axis.removesuffix("*"): size for axis, size in self.axes.items()}
        data = math.prod(size for axis, size in sizes.items() if role_of(axis) in SAMPLED)
        given = {"dp": data, **{name: sizes.get(name, 1) for name in ("tp", "cp", "pp", "ep")}}
        if HEADS in sizes:
            given |= {"cp": given["cp"] * sizes[HEADS], "ulysses": sizes[HEADS]}
        if "dp_shard" in sizes:
            given["shard"] = sizes["dp_shard"] * sizes.get("ep", 1)
        return Pins.of({**vars_of(self), "axes": None, **given})

    @property
    def free_axes(self) -> bool:
        """Whether the mesh is pinned, of axes that may split anything."""
        return self.axes is not None and self.by_degrees() is self

    @property
    def partly(self) -> bool:
        """Whether the search may choose among some candidates only, which layouts whose axes may split anything do not tell."""
        told = {*self.among, *self.most} - {"zero", "recompute", "attention"}
        return bool(told) or self.micro_batch is not None or self.stages is not None

    def without(self, name: str) -> Pins:
        """The others, this one left to the search."""
        among = {key: options for key, options in self.among.items() if key != name}
        most = {key: bound for key, bound in self.most.items() if key != name}
        return Pins.of({**vars_of(self), name: None, "among": among, "most": most})

    def shown(self, name: str) -> str:
        """One pin in words."""
        if name in self.among:
            return f"{name} among {', '.join(map(str, self.among[name]))}"
        return f"{name} <= {self.most[name]}" if name in self.most else f"{name}={getattr(self, name)}"

    def __str__(self) -> str:
        plain = [name for name, value in vars_of(self).items() if name not in ("among", "most") and value not in (None, {})]
        return "; ".join(self.shown(name) for name in (*plain, *self.among, *self.most)) or "none"

    def degrees(self) -> dict[str, int]:
        """The pinned degrees, outermost axis first."""
        names = ("pp", "dp", "cp", "ep", "tp")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def needs_stages(self, world: int) -> bool:
        """Whether only a pipeline can serve the pins on ``world`` devices."""
        asked = self.schedule is not None or self.stage_cuts is not None or (self.virtual_stages or 1) > 1
        asked = asked or (self.stages or 1) > 1 or not (self.allows("pp", 1) and self.allows("schedule", NO_STAGES))
        known = (self.dp or 0) * (self.tp or 0) * (self.cp or 1)
        rest = self.pp is None and "cp" not in {*self.among, *self.most} and 0 < known < world
        return (self.pp or 1) > 1 or asked or rest

    def check_world(self, world: int) -> None:
        """Raise PinError if the degrees cannot make up ``world`` devices. ep lies within dp x cp x tp, with none of its own."""
        if self.axes is not None and (there := math.prod(self.axes.values())) != world:
            raise PinError(f"pin axes={dict(self.axes)} makes {there} devices but there are {world}")
        degrees = {name: size for name, size in self.degrees().items() if name != "ep"}
        product = math.prod(degrees.values())
        shown = " x ".join(f"{name}={size}" for name, size in degrees.items())
        if world % product:
            raise PinError(f"pins {shown} make {product} devices, which does not divide the {world} there are; pin degrees "
                           "whose product does, or leave some to the search")
        if product != world and None not in (self.dp, self.tp, self.pp) and "cp" not in {*self.among, *self.most}:
            rest = f", or pin cp={world // product} to split sequences" if self.cp is None else ""
            raise PinError(f"pins {shown} make {product} devices but there are {world}; change one or leave one to the search"
                           f"{rest}")


def _brief(value: Any) -> str:
    """A value in an error: what can be told in a line, else its type."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        text = ""
    return text if text and len(text) <= _LONGEST and "\n" not in text else f"a value of type {type(value).__name__}"


def _is_count(value: Any, least: int) -> bool:
    """Whether it is a whole number from ``least`` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_value(name: str, value: Any) -> None:
    """Raise PinError for what is no value of a pin."""
    pin = f"pin {name}={_brief(value)}"
    if _is_count(value, _MOST + 1):
        raise PinError(f"{pin} is more than the {_MOST} that a plan counts to; give a smaller number")
    if name in (*_COUNTS, "ulysses") and not _is_count(value, 1):
        raise PinError(f"{pin} is not a positive integer; give one"
                       + (", several in a list, or a bound such as '<=4'" if name in BOUNDED else ""))
    if name == "zero" and not (_is_count(value, 0) and value <= 3):
        raise PinError(f"{pin}: the levels are 0 (replicas), 1, 2 and 3")
    if name == "sequence_parallel" and type(value) is not bool:
        raise PinError(f"{pin}: it is True or False")
    if name in _ROWS and not _is_count(value, 0):
        raise PinError(f"{pin}: give the tokens whose {_ROWS[name]} are there at a time, or 0 for all")
    if name == "schedule" and not (isinstance(value, str) and value in (NO_STAGES, *schedules())):
        raise PinError(f"pin {unknown(value)}" if isinstance(value, str) else f"{pin} is no schedule; give its name as text")
    if name in _WORDS and not (isinstance(value, str) and value in _WORDS[name]):
        raise PinError(f"{pin} is unknown; choose one of {', '.join(_WORDS[name])}")


def _check_cuts(cuts: Any) -> None:
    """Raise PinError for what are no names of the places at which stages start."""
    if not (isinstance(cuts, list | tuple) and cuts and all(isinstance(name, str) and name.strip() for name in cuts)):
        raise PinError(f"pin stage_cuts={_brief(cuts)}: name the modules or operators at which stages start, in a list")
    if twice := [name for name in cuts if cuts.count(name) > 1]:
        raise PinError(f"pin stage_cuts: {twice[0]!r} is named twice, and between the two there is nothing to be a stage; name "
                       "every place once")


def _opened(name: str, given: Any, known: Sequence[str]) -> dict[str, Any]:
    """What is left open in part, of the pins that may be. Raises PinError."""
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise PinError(f"pin {name}={_brief(given)}: it is read from lists and bounds, so give these, such as {{'tp': [2, 4]}} "
                       f"or {{'tp': '<=4'}}, of {', '.join(known)}")
    return dict(given)


def _options(name: str, given: Any) -> tuple[Any, ...]:
    """The values that are open, each once. Raises PinError where one of them is none, or there are none."""
    if not isinstance(given, list | tuple | set | frozenset | range):
        raise PinError(f"pin {name}={_brief(given)} is no list of values; give one, such as [2, 4]")
    options = tuple(itertools.islice(given, _MANY + 1))
    if not options:
        raise PinError(f"pin {name}={_brief(given)} leaves nothing; name at least one value, or drop the pin")
    if len(options) > _MANY:
        raise PinError(f"pin {name} names more than {_MANY} values; name fewer"
                       + (", or give a bound such as '<=4'" if name in BOUNDED else ""))
    for one in options:
        if one is None:
            raise PinError(f"pin {name}={_brief(given)}: None leaves a pin to the search, so it is none of several values; "
                           "take it out, or drop the pin")
        _check_value(name, one)
    return tuple(dict.fromkeys(options))


def _check_axes(pins: Pins) -> None:
    """Raise PinError for axes that are no mesh, or beside degrees."""
    given: Any = pins.axes
    how = "give {name: size}, such as {'dp': 2, 'tp': 4} or {'x': 8}"
    if not isinstance(given, Mapping):
        raise PinError(f"pin axes={_brief(given)} is no dict; {how}")
    if not given:
        raise PinError(f"pin axes={_brief(given)} names no axis; {how}, or drop it")
    axes = dict(given)
    for axis, size in axes.items():
        good = isinstance(axis, str) and axis.removesuffix("*").isidentifier() and _is_count(size, 1) and size <= _MOST
        if not good:
            raise PinError(f"pin axes={_brief(axes)}: {_brief(axis)}: {_brief(size)} is no axis and its ranks; {how}")
        if axis.endswith("*") and axis != "cp*":
            raise PinError(f"pin axes={_brief(axes)}: only the axis 'cp' may have a *, for a sequence in two chunks a rank; "
                           f"name the axis {axis.removesuffix('*')!r}")
        if axis.endswith("*") and axis[:-1] in axes:
            raise PinError(f"pin axes={_brief(axes)}: the axis {axis[:-1]!r} is named twice, with * and without; name it once")
    for name in ("dp", "tp", "cp", "ep", "pp", "shard", "ulysses"):
        if pins.says(name):
            raise PinError(f"pins axes and {name} contradict: the axes have their sizes; drop one")
    roles = {role_of(axis.removesuffix("*")) == ANY for axis in axes}
    if len(roles) > 1:
        raise PinError(f"pin axes={axes!r}: axes that may split anything have no others beside them; name all of them "
                       "dp, cp, tp, pp, or none")
    staged = pins.schedule is not None or pins.stage_cuts is not None or (pins.virtual_stages or 1) > 1
    if staged and PP not in axes:
        raise PinError("pin axes has no pp, and schedule, stage_cuts or virtual_stages ask for stages; add it or drop these")


def is_laid_out(axes: Mapping[str, int], mesh: Mesh) -> bool:
    """Whether a mesh has the pinned axes in their order, those of one rank aside.

    >>> is_laid_out({"dp": 4, "tp": 2}, Mesh.of(dp=4, cp=1, tp=2)), is_laid_out({"tp": 2, "dp": 4}, Mesh.of(dp=4, tp=2))
    (True, False)
    """
    have = [(axis + "*" * (axis in mesh.mirrored), mesh.size(axis)) for axis in mesh.axes if mesh.size(axis) > 1]
    return have == [(axis, size) for axis, size in axes.items() if size > 1]


def vars_of(pins: Pins) -> dict[str, Any]:
    """The pins as keyword arguments."""
    return {f.name: getattr(pins, f.name) for f in fields(pins)}


Change = tuple[float, str, Any]
"""How far away another value of a pin is, the pin, and that value; None: it is left to the search."""


def nearest(pins: Pins, world: int, batch: int, runs: Callable[[Pins], bool]) -> str:
    """The least changes of pins after which they run, in words, and the least that leave alone what these change; "" if none
    that was looked at does. On ``world`` devices, with ``batch`` samples.

    >>> nearest(Pins(dp=3, tp=2), 4, 8, lambda pins: (pins.dp or 1) * (pins.tp or 1) == 4)
    'dp=2'
    """
    options = _changes(pins, world, batch)
    best = _first(pins, options, runs)
    other = _first(pins, [one for one in options if one[1] not in {name for _, name, _ in best}], runs) if best else ()
    return ", or ".join(
        " with ".join(f"no pin {name}" if value is None else f"{name}={value!r}" for _, name, value in changes)
        for changes in (best, other) if changes
    )


def _first(pins: Pins, options: Sequence[Change], runs: Callable[[Pins], bool]) -> tuple[Change, ...]:
    """The least changes after which pins run, one before two before three."""
    for number in range(1, 4):
        some = itertools.combinations(options, number) if len(options) ** number < _COMBINED else ()
        apart = [changes for changes in some if len({name for _, name, _ in changes}) == number]
        for changes in sorted(apart, key=lambda changes: sum(away for away, _, _ in changes))[:_LOOKED_AT]:
            with suppress(PinError):
                other = pins
                for _, name, _ in changes:
                    other = other.without(name)
                new = {name: value for _, name, value in changes if value is not None}
                if runs(Pins.of({**vars_of(other), **new})):
                    return changes
    return ()


def _changes(pins: Pins, world: int, batch: int) -> list[Change]:
    """Other values of every pin: numbers are as far away as the powers of two between them, names are one apart, levels of ZeRO
    less than half of that (two change less than half the ranks of an axis do), and a pin that is dropped is two away."""
    named: Mapping[str, Sequence[Any]] = {"schedule": tuple(schedules()), "attention": ATTENTION, "recompute": RECOMPUTE}
    degrees, samples = ([n for n in range(1, size + 1) if size % n == 0] for size in (world, batch))
    counts: Mapping[str, Sequence[int]] = {
        **dict.fromkeys(("dp", "tp", "cp", "pp", "ep", "ulysses", "shard"), degrees),
        **dict.fromkeys(("microbatches", "micro_batch"), samples),
        **dict.fromkeys(("virtual_stages", "stages"), range(1, world + 1)),
    }
    found: list[Change] = []
    for name in (*counts, *named, "zero", "sequence_parallel", "stage_cuts", "loss_rows", "mlp_rows", "axes"):
        value = getattr(pins, name)
        if name in counts and value is not None:
            found += sorted((abs(math.log2(n / value)), name, n) for n in counts[name] if n != value)[:_VALUES]
        elif name == "zero" and value is not None:
            found += [(0.4 * abs(n - value), name, n) for n in range(4) if n != value]
        elif name in named and value is not None:
            found += [(1.0, name, one) for one in named[name] if one != value]
        found += [(2.0, name, None)] * pins.says(name)
    if pins.axes is not None and not pins.free_axes:
        found += [(away, "axes", axes) for away, axes in _laid_otherwise(pins.axes)]
        if "cp" in pins.axes and not pins.says("attention"):  # in one chunk a rank
            found.append((0.6, "attention", ULYSSES))
    elif (pins.says("attention") or pins.says("ulysses")) and not pins.says("cp"):
        found += [(math.log2(n), "cp", n) for n in degrees[1:]]
    return found


def _laid_otherwise(axes: Mapping[str, int]) -> Iterator[tuple[float, dict[str, int]]]:
    """How far away, and the same axes in the order in which a search lays them out, and with the sequence in as many chunks a
    rank as it is not pinned in."""
    marked = {"cp": "cp*", "cp*": "cp"}
    for away, order in ((0.0, [*axes]), (0.4, sorted(axes, key=lambda axis: ORDER.index(axis.removesuffix("*"))))):
        for more, marks in ((0.0, {}), (0.5, marked)):
            other = {marks.get(axis, axis): axes[axis] for axis in order}
            if [*other] != [*axes]:
                yield away + more, other
