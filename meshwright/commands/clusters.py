"""The commands about clusters instead of a plan: published systems, what is worth having, and what a machine at hand takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.commands.answers import NOTHING_FITS, errors, print_json
from meshwright.commands.models import load
from meshwright.commands.options import MODEL, Batch, Json, Sequence, finite, optimizer_of, whole_numbers, writable
from meshwright.errors import InputError
from meshwright.progress import Report
from meshwright.progress import progress as shown

PROFILED = ("fp32", "tf32", "bf16")
"""In which operators are timed."""


def zoo_command(
    name: Annotated[str, typer.Argument(help="Only systems whose name holds this.")] = "",
    search: Annotated[bool, typer.Option("--search", help="The planner's own best as well (minutes).")] = False,
    published: Annotated[bool, typer.Option("--published", help="Only what is published: nothing is priced.")] = False,
    as_json: Json = False,
) -> None:
    """Published systems: their degrees, whether they fit, predicted beside published speed.

    Example: meshwright zoo 405B
    """
    with errors(as_json):
        rows = []
        with shown(not published, "pricing") as report:
            report("reading the systems", 0.0)
            from meshwright.published import zoo

            chosen = zoo.systems(name=name)
            for number, system in enumerate(chosen, 1):
                if not published:
                    typer.echo(f"{number}/{len(chosen)} {system.name} ...", err=True)
                try:
                    rows.append(zoo.Comparison(system) if published else zoo.price(
                        system, search, _part(report, system.name, number - 1, len(chosen))))
                except KeyboardInterrupt:  # what is priced is printed all the same
                    rows += [zoo.Comparison(left, reason="interrupted") for left in chosen[number - 1:]]
                    break
                if not published:
                    typer.echo(f"    {zoo.brief(rows[-1])}", err=True)
        if as_json:
            print_json({"systems": [row.as_dict() for row in rows]})
            return
        from rich.console import Console

        console = Console(emoji=False, width=None if sys.stdout.isatty() else 240 if search else 200)
        console.print(zoo.table(rows, search))
        for note in zoo.notes(rows):
            console.print(note, highlight=False)


def size_command(
    model: Annotated[str, typer.Argument(help=MODEL)],
    device: Annotated[str, typer.Option(help='The kind of device, as in "h100".')],
    tokens: Annotated[float | None, typer.Option(min=1, help='Tokens to train on, as in "1e12".')] = None,
    longest: Annotated[bool, typer.Option(help="Find the longest sequence that trains instead.")] = False,
    most: Annotated[int, typer.Option(min=2, help="With --longest: tokens to end at.")] = 1 << 24,
    devices: Annotated[str | None, typer.Option(help='How many, as in "8,16,64" (default: one to eight nodes).')] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a device for an hour.")] = None,
    batch: Batch = 8,
    sequence: Sequence = 512,
    precision: Annotated[str, typer.Option(help='"fp32" or "bf16".')] = "bf16",
    optimizer: Annotated[str, typer.Option(help="A name, or the bytes of state per parameter.")] = "adamw",
    as_json: Json = False,
) -> None:
    """The clusters worth having for a model and a number of tokens: days, device-hours, cost; * marks those that no other one
    beats in both days and device-hours.

    --longest finds the longest sequence that trains instead, from --sequence up to --most, beside what ZeRO-3 with all-to-all
    attention alone and full recomputation reaches.

    Example: meshwright size config.json --device h100 --tokens 1e12 --batch 512 --sequence 4096 --price 2.5
    """
    with errors(as_json):
        if longest == (tokens is not None):
            raise InputError("give --tokens to size clusters for, or --longest for the longest sequence, one of the two")
        for option, number in (("--tokens", tokens), ("--price", price)):
            finite(number or 0.0, option)
        with shown(verb="sizing") as report:
            report("reading the options", 0.0)
            from meshwright.commands import sizing

            counts = sizing.default_counts(device) if devices is None else whole_numbers(devices, "--devices")
            for count in counts:
                sizing.spec_of(device, count)  # raises for what is no cluster, before the model is captured
        if longest:
            reached = _reached(model, device, counts, batch, sequence, most, precision, optimizer)
            _print_reached(reached, as_json)
            if not any(row.tokens is not None for row in reached):
                raise typer.Exit(NOTHING_FITS)
            return
        assert tokens is not None
        with shown(verb="sizing") as report:
            report("reading the model", 0.0)
            module, example = load(model, batch, sequence)
            from meshwright.api import graph_of
            from meshwright.ir.pins import Pins

            report("capturing the model", 0.0)
            graph = graph_of(module, example, optimizer=optimizer_of(optimizer), precision=precision)
            rows = sizing.sizes(graph, device, counts, tokens, price, pins=Pins(), optimizer=optimizer_of(optimizer),
                                precision=precision, report=report)
        if as_json:
            print_json({"tokens": tokens, "price": price, "clusters": [row.as_json() for row in rows]})
        else:
            from rich.console import Console

            Console(emoji=False, width=None if sys.stdout.isatty() else 120).print(sizing.table(rows))
    if not any(row.days is not None for row in rows):
        raise typer.Exit(NOTHING_FITS)


def profile_command(
    model: Annotated[str, typer.Argument(help=MODEL)],
    out: Annotated[Path, typer.Option(help="The cluster file to write, for --cluster and Cluster.from_toml.")],
    batch: Batch = 8,
    sequence: Sequence = 512,
    precision: Annotated[str, typer.Option(help='"fp32", "tf32" or "bf16".')] = "fp32",
    like: Annotated[str | None, typer.Option(help="The device of the catalogue that has the other numbers.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure.")] = 60.0,
    name: Annotated[str, typer.Option(help="The name of the device and of the node in the file.")] = "mine",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes over which torchrun's processes are spread.")] = 1,
    as_json: Json = False,
) -> None:
    """Time a model's operators on the device at hand, under torchrun collectives too: a cluster file of what was measured.

    Example: meshwright profile config.json --batch 4 --out mine.toml
    """
    with errors(as_json):
        writable(out)
        if precision not in PROFILED:
            raise InputError(f"precision {precision!r} is not measured; choose one of {', '.join(PROFILED)}")
        with shown(verb="profiling") as report:
            report("reading the model", 0.0)
            from meshwright.api import graph_of
            from meshwright.commands.profiling import check_request, write

            check_request(out, name, nodes)
            finite(seconds, "--seconds")
            module, example = load(model, batch, sequence)

            report("capturing the model", 0.0)
            graph = graph_of(module, example, precision=precision)
            found = write(out, graph, like=like, name=name, nodes=nodes, seconds=seconds, report=report)
        if as_json:
            print_json({"file": str(out), "measured": found.measured, "left_out": found.left_out})
        else:
            left = "".join(f"; {count} calls left out {reason}" for reason, count in found.left_out.items())
            typer.echo(f"{found.measured} measurements written to {out}, for plans of --precision {precision}{left}")


def _part(report: Report, name: str, done: int, all_: int) -> Report:
    """What reports on one of so many equal parts, of which ``done`` are over."""
    return lambda what, share: report(f"{name}: {what}", (done + share) / all_)


def _reached(
    model: str, device: str, counts: list[int], batch: int, sequence: int, most: int, precision: str, optimizer: str
) -> list[Any]:
    with shown(verb="sizing") as report:
        report("reading the model", 0.0)
        from meshwright.commands import reach

        module, _ = load(model, batch, sequence)
        lengths = (lambda tokens: load(model, batch, tokens)[1]) if os.path.exists(model) else None
        return reach.reaches(module, device, counts, batch, inputs=lengths, optimizer=optimizer_of(optimizer),
                             precision=precision, shortest=sequence, most=most, report=report)


def _print_reached(rows: list[Any], as_json: bool) -> None:
    if as_json:
        print_json({"longest": [row.as_json() for row in rows]})
        return
    from rich.console import Console

    from meshwright.commands import reach

    Console(emoji=False, width=None if sys.stdout.isatty() else 120).print(reach.table(rows))
