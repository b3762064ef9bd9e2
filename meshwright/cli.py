"""The command line: ``meshwright plan | show | explain | diff | verify | simulate | zoo | size | profile``.

    meshwright plan config.json --cluster h100:8x8 --batch 16 --sequence 8192 --out llama.plan.json
    meshwright plan mypackage.models:build --cluster cpu:1x4 --tp 2 --json
    meshwright show llama.plan.json          meshwright explain llama.plan.json model.layers.0.mlp.down_proj.weight
    meshwright diff old.plan.json new.plan.json              meshwright verify llama.plan.json
    meshwright simulate --schedule 1f1b --pp 4 --microbatches 8 --trace step.json
    meshwright --import my.schedules simulate --schedule mine --pp 4 --microbatches 8
    meshwright zoo "405B" --json

A model is the path of a ``transformers`` config (a folder or its config.json; nothing is downloaded, no weights are needed),
"module:callable" or "file.py:callable", a function without arguments that returns (model, example_inputs). ``--json`` prints
one JSON value on stdout, errors included; everything else that is not the answer goes to stderr.

Exit codes: 0 done (``diff`` and ``verify``: equal), 1 different (these two), 2 the command or its input is wrong, 3 no plan
fits, 4 an error inside meshwright or the model. Errors are one line on stderr; ``meshwright --debug COMMAND`` shows where they
come from. A long step shows a bar on a terminal, else a line every ten seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.commands.answers import DEBUG, DIFFERENT, Commands, errors, in_width, print_json
from meshwright.commands.clusters import profile_command, size_command, zoo_command
from meshwright.commands.models import imported, load
from meshwright.commands.options import (
    MODEL,
    Batch,
    Json,
    Sequence,
    cluster_of,
    optimizer_of,
    pin_of,
    tensor_pins,
    writable,
)
from meshwright.errors import InputError
from meshwright.progress import Report
from meshwright.progress import progress as shown

if TYPE_CHECKING:
    from meshwright.ir.plan import Plan

IMPORTED: ContextVar[tuple[str, ...]] = ContextVar("meshwright_imported", default=())
"""The modules of --import: other processes import them too."""

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, help="Plans of parallelized PyTorch models.",
                  pretty_exceptions_enable=False)

OPEN = 'one ("4"), several ("1,2,4") or up to a bound ("<=4")'
PlanFile = Annotated[Path, typer.Argument(help="A plan file, as written by 'plan --out' or plan.save(path).")]


@app.callback()
def main(
    modules: Annotated[list[str] | None, typer.Option(
        "--import", help="A module to import before: it may register schedules and rules that the command needs.",
    )] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    """Plans of parallelized PyTorch models."""
    DEBUG.set(debug)
    IMPORTED.set(tuple(modules or ()))
    with errors(as_json=False):
        for name in modules or []:
            imported(name)


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help=MODEL)],
    cluster: Annotated[str, typer.Option(help='Devices, as in "h100:8x8" (device:nodes x devices per node), or a .toml file.')],
    batch: Batch = 8,
    sequence: Sequence = 512,
    precision: Annotated[str, typer.Option(help='"fp32", "tf32", "bf16"; "fp16" and "fp8" are planned only.')] = "bf16",
    optimizer: Annotated[str, typer.Option(help="A name, or the bytes of state per parameter.")] = "adamw",
    dp: Annotated[str | None, typer.Option(help=f"Pin the data-parallel degree: {OPEN}.")] = None,
    shard: Annotated[str | None, typer.Option(help="Pin the ZeRO group within dp (HSDP).")] = None,
    tp: Annotated[str | None, typer.Option(help=f"Pin the tensor-parallel degree: {OPEN}.")] = None,
    cp: Annotated[str | None, typer.Option(help="Pin the ranks over which the sequence is split.")] = None,
    attention: Annotated[str | None, typer.Option(help='With --cp: pin "ring", "ulysses" or "all-gather".')] = None,
    ulysses: Annotated[int | None, typer.Option(help="With --cp: pin its near ranks that exchange heads.")] = None,
    ep: Annotated[str | None, typer.Option(help="Pin the data ranks over which experts are split.")] = None,
    pp: Annotated[str | None, typer.Option(help=f"Pin the pipeline degree: {OPEN}.")] = None,
    schedule: Annotated[str | None, typer.Option(help='Pin the pipeline schedule, or several: "none,1f1b".')] = None,
    virtual_stages: Annotated[str | None, typer.Option(help="Pin the stages a pipeline rank runs.")] = None,
    stages: Annotated[str | None, typer.Option(help="Pin the stages of the pipeline in all.")] = None,
    zero: Annotated[str | None, typer.Option(help='Pin the ZeRO level, 0 to 3, several ("2,3") or a bound ("<=1").')] = None,
    sequence_parallel: Annotated[bool | None, typer.Option(help="Pin Megatron's sequence parallelism on or off.")] = None,
    microbatches: Annotated[str | None, typer.Option(help="Pin the number of micro-batches.")] = None,
    micro_batch: Annotated[str | None, typer.Option(help='Pin the samples of a data rank\'s micro-batch, as in "<=4".')] = None,
    recompute: Annotated[str | None, typer.Option(help='Pin "none", "selective", "full", or several.')] = None,
    tensor: Annotated[list[str] | None, typer.Option(help='Pin parameters: "*.down_proj.weight=[_, _@tp]".')] = None,
    strict: Annotated[bool, typer.Option(help="Refuse operators without a sharding rule.")] = False,
    headroom: Annotated[float | None, typer.Option(
        help="Part of the devices' memory to leave free for communicators and the allocator; 0.03 if not given.",
    )] = None,
    expert_imbalance: Annotated[float, typer.Option(
        help="Where experts are split: rows of the device that gets most over the mean, as it is priced.",
    )] = 1.25,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    cache: Annotated[Path | None, typer.Option(help="A folder in which plans are kept and looked for.")] = None,
    progress: Annotated[bool, typer.Option(help="A progress bar on stderr, or a line every ten seconds.")] = True,
    as_json: Json = False,
) -> None:
    """Plan a model on a cluster: no processes, no GPU, any size.

    Pins may leave several values open ("1,2,4") or be bounds ("<=4").

    Example: meshwright plan config.json --cluster h100:1x8 --batch 16 --sequence 4096 --tp 1,2,4 --out plan.json
    """
    with errors(as_json):
        writable(out)
        words = {"dp": dp, "shard": shard, "tp": tp, "cp": cp, "attention": attention, "ep": ep, "pp": pp, "zero": zero,
                 "schedule": schedule, "virtual_stages": virtual_stages, "stages": stages, "microbatches": microbatches,
                 "micro_batch": micro_batch, "recompute": recompute}
        with shown(progress) as report:
            report("reading the model", 0.0)
            from meshwright.api import plan
            from meshwright.ir.pins import Pins

            pins = Pins.of({**{name: pin_of(word) for name, word in words.items()}, "ulysses": ulysses,
                            "sequence_parallel": sequence_parallel, "tensors": tensor_pins(tensor or [])})
            module, example = load(model, batch, sequence)
            found = plan(module, cluster_of(cluster), example, optimizer=optimizer_of(optimizer), precision=precision,
                         pins=pins, strict=strict, progress=progress, cache=cache, headroom=headroom,
                         expert_imbalance=expert_imbalance)
        if out is not None:
            found.save(out)
        if as_json:
            print_json({**summary(found), "file": str(out) if out is not None else None})
        else:
            from meshwright.views.report import show as printed

            printed(found)
            if out is not None:
                typer.echo(f"plan written to {out}", err=True)


@app.command()
def show(
    file: PlanFile,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML file instead.")] = None,
    as_json: Json = False,
) -> None:
    """Print a plan.

    Example: meshwright show plan.json --html plan.html
    """
    with errors(as_json):
        writable(html)
        with shown(verb="reading") as report:
            plan = _plan(file, report)
            from meshwright.views.report import show as printed

            if html is not None:
                report("writing the page", 0.0)
                printed(plan, html)
        if as_json:
            print_json({**summary(plan), "file": str(file)})
        elif html is not None:
            typer.echo(f"report written to {html}", err=True)
        else:
            printed(plan)


@app.command()
def explain(
    file: PlanFile,
    name: Annotated[str | None, typer.Argument(help="An operator, parameter or module.")] = None,
    changes: Annotated[bool, typer.Option(help="Without a name: plan what would help, too.")] = True,
    as_json: Json = False,
) -> None:
    """Say what was chosen for an operator, parameter or module, and what the alternatives would cost; without a name what
    bounds the step, and which changes of cluster, batch or sequence would help.

    Example: meshwright explain plan.json model.layers.0.mlp.down_proj.weight
    """
    with errors(as_json):
        with shown(verb="explaining") as report:
            plan = _plan(file, report)
            from meshwright.views import explain as answers

            report("planning what would help" if name is None and changes else "pricing", 0.0)
            text = answers.explain(plan, name, changes=changes)
        if as_json:
            print_json({"name": name, "text": text.splitlines()})
        else:
            typer.echo(text)


@app.command()
def diff(file: PlanFile, other: PlanFile, as_json: Json = False) -> None:
    """Print what is different in the second plan; exit code 1 if something is.

    Example: meshwright diff plan.json other.json
    """
    with errors(as_json):
        with shown(verb="comparing") as report:
            old, new = _plan(file, report), _plan(other, report)
            from meshwright.ir.serialize import plan_hash
            from meshwright.views import difference as answers

            report("pricing", 0.0)
            same = plan_hash(old) == plan_hash(new)
            text = answers.diff(old, new)
        if as_json:
            print_json({"equal": same, "differences": [] if text == "no differences" else text.splitlines()})
        else:
            typer.echo(text)
    if not same:
        raise typer.Exit(DIFFERENT)


@app.command()
def verify(
    file: PlanFile,
    model: Annotated[str | None, typer.Option(help="The model, to run: a config is shrunk; " + MODEL)] = None,
    processes: Annotated[int, typer.Option(min=1, help="CPU processes at most.")] = 4,
    programs_only: Annotated[bool, typer.Option("--programs-only", help="Check the programs, run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check every rank's program, then run: loss and gradients on CPU processes beside a single one; exit code 1 if unequal.

    Programs are lowered for every rank that may differ, and checked: shardings, gradient types, the cut into stages. A plan of
    few devices and a small model is run as it is; of another one the degrees are run, made smaller, on the model that --model
    names, or the shrunken copy of a config.

    Example: meshwright verify plan.json --model config.json
    """
    equal = True
    with errors(as_json):
        with shown(verb="verifying") as report:
            plan = _plan(file, report)
            from meshwright.commands.verifying import distinct_ranks, ran, verify_rank

            ranks = distinct_ranks(plan.mesh)
            for number, rank in enumerate(ranks):
                report(f"the program of rank {rank}", 0.1 * number / len(ranks))
                verify_rank(plan, rank)
            found = "--programs-only" if programs_only else ran(plan, model, processes, IMPORTED.get(), report)
        equal = isinstance(found, str) or found.equal
        if as_json:
            said = {"not_run": found} if isinstance(found, str) else {"run": found.as_json()}
            print_json({"verified": True, "world": plan.mesh.world, "ranks": ranks, "operators": len(plan.graph.ops), **said})
        else:
            same = "" if len(ranks) == plan.mesh.world else "; the others run one of these"
            typer.echo(in_width(f"verified: {len(ranks)} of {plan.mesh.world} ranks ({plan.mesh}) compute what the graph's "
                                f"{len(plan.graph.ops)} operators say{same}"))
            typer.echo(in_width(f"not run: {found}") if isinstance(found, str) else str(found))
    if not equal:
        raise typer.Exit(DIFFERENT)


@app.command("simulate")
def simulate_command(
    file: Annotated[Path | None, typer.Argument(help="A plan file; or else give --pp and --microbatches.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b (if not given), interleaved1f1b, zb, zbv, dualpipev, or a "
                                                           "registered one (--import).")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Micro-batches of a step.")] = None,
    virtual_stages: Annotated[int | None, typer.Option(min=1, help="Stages of a rank.")] = None,
    forward: Annotated[str | None, typer.Option(
        help='Seconds of a stage, 1 if not given, or one number a stage: "1,1,1,2".',
    )] = None,
    backward: Annotated[str | None, typer.Option(
        help="The same, 2 if not given; half of it is the gradient of the weights.",
    )] = None,
    transfer: Annotated[float | None, typer.Option(min=0, help="Seconds of a transfer between stages, 0 if not given.")] = None,
    tick: Annotated[float | None, typer.Option(min=1e-12, help="Seconds of a column (default: the shortest action).")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    what_if: Annotated[list[str] | None, typer.Option(
        help='Price the plan file again: "bandwidth=0.5", "network=2", "memory=0.5", "batch=2" (factors), "cluster=b200:1x8".',
    )] = None,
    as_json: Json = False,
) -> None:
    """Run a pipeline schedule on stage times: a row per stage, a column per tick of the clock.

    Example: meshwright simulate --schedule zb --pp 4 --microbatches 8
    """
    with errors(as_json):
        writable(trace)
        from meshwright.commands.simulating import alone, check_beside

        given = {"schedule": schedule, "pp": pp, "microbatches": microbatches, "virtual_stages": virtual_stages,
                 "forward": forward, "backward": backward, "transfer": transfer}
        check_beside({} if file is None else given, f"{file}: a plan has its own schedule and its own seconds")
        if what_if:
            from meshwright.commands.whatif import answers

            if file is None:
                raise InputError("--what-if prices a plan again: give its file")
            check_beside({"tick": tick, "trace": trace}, "--what-if: it draws no clock")
            with shown(verb="pricing") as report:
                found = list(answers(_plan(file, report), what_if, report))
            if as_json:
                print_json({"what_if": [one.as_json() for one in found]})
            else:
                typer.echo("\n".join(in_width(str(one)) for one in found))
            return
        from meshwright.cost.timeline import chrome_trace, render

        beside: Mapping[str, float] = {}
        if file is not None:
            with shown(verb="simulating") as report:
                plan = _plan(file, report)
                from meshwright.compiler.search.plans import beside_schedule, simulation_of

                run, beside = simulation_of(plan), beside_schedule(plan)
        else:
            run = alone(given)
        if trace is not None:
            trace.write_text(json.dumps(chrome_trace(run, beside)), encoding="utf-8")
        held = [int(count) for count in run.peak_per_rank]
        if as_json:
            actions = [{"rank": rank, "action": str(action), "stage": action.stage, "microbatch": action.microbatch,
                        "start": start, "end": end} for rank, action, start, end in run.spans()]
            print_json({"schedule": run.table.name, "pp": run.table.pp, "stages": run.table.stages,
                         "microbatches": run.table.microbatches, "seconds": run.makespan, "bubble": run.bubble_fraction,
                         "beside_schedule": dict(beside), "step_seconds": run.makespan + sum(beside.values()),
                         "busy_seconds": run.busy.tolist(), "in_flight": held, "actions": actions})
        else:
            typer.echo(render(run, tick=tick))
            typer.echo(in_width(f"{run.makespan:.4g} s, bubble {run.bubble_fraction:.1%}, micro-batches held by rank: {held}"))
            if beside:
                words = "".join(f" + {name} {seconds:.4g} s" for name, seconds in beside.items())
                typer.echo(in_width(f"schedule {run.makespan:.4g} s{words} = step {run.makespan + sum(beside.values()):.4g} s"))
        if trace is not None:
            typer.echo(f"trace written to {trace}", err=True)


def summary(plan: Plan) -> dict[str, Any]:
    """A plan's decisions and predictions as JSON-able values; the graph is left to the plan file."""
    from meshwright.views.facts import facts_of, sections
    from meshwright.views.words import not_told_apart

    found, shown = sections(facts_of(plan)), ("module", "weights", "result", "collectives")
    return {
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)), "cluster": plan.cluster, "world": plan.mesh.world,
        "microbatches": plan.schedule.microbatches, "precision": plan.precision, "optimizer": plan.optimizer,
        "predicted": plan.predicted and plan.predicted.as_json(),
        "certificate": plan.certificate and {**plan.certificate.as_json(), "gap": plan.certificate.gap,
                                             "not_told_apart": not_told_apart(plan.certificate.candidates)},
        "groups": [asdict(group) for group in plan.groups],
        "sections": [{"title": section.title, "blocks": section.paths,
                      "rows": [{name: getattr(row, name) for name in shown} for row in section.rows]}
                     for section in found],
        "notes": plan.notes,
    }


def _plan(file: Path, report: Report) -> Plan:
    report(f"reading {file}", 0.0)
    from meshwright.planner import load_plan

    return load_plan(file)


for _name, _command in (("zoo", zoo_command), ("size", size_command), ("profile", profile_command)):
    app.command(_name)(_command)

if __name__ == "__main__":
    app()
