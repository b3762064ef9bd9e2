"""What the epilogue of the micro-batches holds: what is collected of them, and the gradients from which each goes back."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.cost.memory.replay import ACTIVATIONS, WORK, Heap, Storage, Tape, backward, forward, script_of
from meshwright.ir.graph import refs
from meshwright.ir.program import Program


class Epilogue:
    """What the epilogue holds, if there is one: what is collected, and its gradients until the last micro-batch went back."""

    def __init__(self, program: Program, heap: Heap) -> None:
        self.program, self.heap = program, heap
        self.segments = [segment for segment in program.segments if segment.epilogue]
        held = [stored.value for stored in program.stored]
        self.scripts = [script_of(segment.graph, held, program.operators) for segment in self.segments]
        values = {name: value for segment in self.segments for name, value in segment.graph.values.items()}
        self.values = {one.whole: values[one.whole] for one in program.collected if one.whole in values}
        self.collected: dict[str, Storage] = {}
        self.back_from: dict[str, Storage] = {}

    def back(self, env: Mapping[str, Storage]) -> None:
        """From the loss to what is collected, of which as much lies there as at the end."""
        self.collected = {name: self.heap.new(float(value.bytes_), ACTIVATIONS) for name, value in self.values.items()}
        if not self.makes_the_loss:
            return
        grads = {str(self.program.loss): self.heap.new(4.0, WORK)}
        tapes, made = self._run(env)
        for tape in reversed(tapes):
            backward(tape, self.heap, grads, {})
        self.back_from = {name: grads.pop(name) for name in self.values if name in grads}
        for storage in (*grads.values(), *made.values()):
            self.heap.drop(storage)

    def gradients(self) -> dict[str, Storage]:
        """From which a micro-batch goes back: as large as what it made of each, at most."""
        pairs = ((one.value, self.back_from.get(one.whole)) for one in self.program.collected)
        cut = {one.value: self.program.microbatches if isinstance(one.time, int) else 1 for one in self.program.collected}
        return {name: self.heap.new(whole.bytes / cut[name], WORK) for name, whole in pairs if whole is not None}

    def end(self, env: Mapping[str, Storage]) -> dict[str, Storage]:
        """Behind the last micro-batch: what leaves the program, held once; all else is let go."""
        tapes, made = self._run(env)
        kept = [storage for tape in tapes for one in tape.kept.values() for storage in one]
        for storage in (*kept, *self.back_from.values(), *self.collected.values()):
            self.heap.drop(storage)
        leaving = set(leaving_of(self.program))
        for name in made.keys() - leaving:
            self.heap.drop(made[name])
        return {name: storage for name, storage in made.items() if name in leaving}

    def _run(self, env: Mapping[str, Storage]) -> tuple[list[Tape], dict[str, Storage]]:
        tapes, known = list[Tape](), {**env, **self.collected}
        made: dict[str, Storage] = {}
        for script in self.scripts:
            tape, outputs = forward(script, self.heap, known)
            tapes.append(tape)
            made |= outputs
            known |= outputs
        return tapes, made

    @property
    def makes_the_loss(self) -> bool:
        """Whether micro-batches go back from gradients in what is collected of them."""
        return any(self.program.loss in segment.graph.outputs for segment in self.segments)


def leaving_of(program: Program) -> list[str]:
    """Values that the program hands back."""
    names = [*(port.name for port in program.outputs), *(ref.name for ref in refs(program.output_tree))]
    return list(dict.fromkeys([*names, *(new for _, new in program.mutations), *([program.loss] if program.loss else [])]))
