"""A small model and its lowered programs, written by hand: the runtime's tests need no planner.

    x = embedding(ids); twice: x = x + down(gelu(q) * k + v), q, k, v = up(norm(x)); loss = cross_entropy(head(x), labels)

The head is tied to the embedding, ``up`` is fused of three parts, the biases of ``up`` are split with it, one parameter is
unused, one is a number (``gain``, on the logits), one is frozen.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.compiler.rules import builtin_rules
from meshwright.ir.graph import Graph, Op, Param, Ref, Value
from meshwright.ir.mesh import Mesh
from meshwright.ir.program import Port, Program, Segment, Stored
from meshwright.ir.sharding import Sharding, piece
from meshwright.runtime.state.layout import local_of

WIDTH = 8


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(self.norm(x)).chunk(3, -1)
        return x + self.down(F.gelu(q) * k + v)


class Tiny(nn.Module):
    def __init__(self, vocab: int = 12, inner: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.spare = nn.Parameter(torch.ones(3, 5))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.25), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.arange(1.0, WIDTH + 1), persistent=False)
        self.blocks = nn.ModuleList([Block(inner), Block(inner)])
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.steps += 1
        x = self.embed(ids) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.gain
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()), logits


class LiveBytes(TorchDispatchMode):
    """The most bytes that real tensors held at one time, beside those of ``given``."""

    def __init__(self, given: nn.Module | None = None) -> None:
        super().__init__()
        self.held: dict[StorageWeakRef, int] = {}
        old = (*given.parameters(), *given.buffers()) if given is not None else ()
        self.given = {StorageWeakRef(tensor.untyped_storage()) for tensor in old}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = local_of(tensor).untyped_storage()
                self.held[StorageWeakRef(storage)] = storage.nbytes()
        self.held = {ref: size for ref, size in self.held.items() if not ref.expired() and ref not in self.given}
        self.peak = max(self.peak, sum(self.held.values()))
        return result


class Writer:
    """A segment being written: values by name, with LOCAL shapes left out where nobody reads them."""

    def __init__(self, inputs: tuple[str, ...], params: tuple[Param, ...]) -> None:
        self.inputs, self.params, self.ops = inputs, params, []

    def __call__(self, out: str | tuple[str, ...], target: str, *args: Any, **kwargs: Any) -> None:
        def refs(arg: Any) -> Any:
            return Ref(arg[1:]) if isinstance(arg, str) and arg.startswith("%") else arg

        outputs = (out,) if isinstance(out, str) else out
        args = tuple(tuple(map(refs, a)) if isinstance(a, tuple) else refs(a) for a in args)
        self.ops.append(Op(outputs[0], target, args, tuple(kwargs.items()), outputs))

    def segment(self, path: str, *outputs: str, **options: Any) -> Segment:
        names = {*self.inputs, *(p.value for p in self.params), *(o for op in self.ops for o in op.outputs)}
        values = {name: Value(name, (), torch.float32) for name in names}
        return Segment(path, Graph(values, self.inputs, self.params, tuple(self.ops), tuple(map(Ref, outputs))), **options)


def tiny_program(
    mesh: Mesh, rank: int, batch: int, length: int, *, vocab: int = 12, inner: int = 4, data: tuple[str, ...] = (),
    shard: tuple[str, ...] = (), tp: str = "", zero: int = 0, microbatches: int = 1, recompute: str = "none",
    compute_dtype: torch.dtype | None = None,
) -> Program:
    """``Tiny`` for one rank: the batch split over ``data``; vocabulary and inner width over ``tp``."""
    here = mesh.coordinates(rank)
    tps = (tp,) if tp else ()
    dtype = torch.float32

    def stored(value: str, fqns: tuple[str, ...], shape: tuple[int, ...], split: int | None = None, **more: Any) -> Stored:
        dims = tuple(tps if dim == split else () for dim in range(len(shape)))
        options = {"trainable": True, "buffer": False, "persistent": True, "data_axes": data, "shard_axes": shard} | more
        return Stored(value, fqns, shape, options.pop("dtype", dtype), tensor=Sharding(dims), **options)

    frozen = {"trainable": False, "data_axes": (), "shard_axes": ()}
    every = [
        stored("w", ("embed.weight", "head.weight"), (vocab, WIDTH), 0),
        stored("spare", ("spare",), (3, 5)),
        stored("gain", ("gain",), ()),
        stored("shift", ("shift",), (WIDTH,), **frozen),
        stored("steps", ("steps",), (), dtype=torch.int64, buffer=True, **frozen),
        stored("scale", ("scale",), (WIDTH,), buffer=True, **frozen | {"persistent": False}),
    ]
    for i in range(2):
        at = f"blocks.{i}."
        every += [
            stored(f"n{i}", (at + "norm.weight",), (WIDTH,)), stored(f"m{i}", (at + "norm.bias",), (WIDTH,)),
            stored(f"u{i}", (at + "up.weight",), (3 * inner, WIDTH), 0, fused=3),
            stored(f"v{i}", (at + "up.bias",), (3 * inner,), 0, fused=3),
            stored(f"d{i}", (at + "down.weight",), (WIDTH, inner), 1), stored(f"e{i}", (at + "down.bias",), (WIDTH,)),
        ]
    params = {s.value: Param(s.value, s.fqns, s.trainable, s.buffer, s.persistent) for s in every}

    def of(*names: str) -> tuple[Param, ...]:
        return tuple(params[name] for name in names)

    first, rows = piece(vocab, mesh, tps, here)
    compute = compute_dtype or torch.float32
    prologue = Writer(("ids", "labels"), ())
    prologue("valid", "aten.ne.Scalar", "%labels", -100)
    prologue("count0", "aten.sum.default", "%valid")
    count = "count0"
    for axis in data:
        prologue(f"count_{axis}", "mw.all_reduce", f"%{count}", axis=axis)
        count = f"count_{axis}"
    prologue("ids_all", "mw.identity", "%ids")
    prologue("labels_all", "mw.identity", "%labels")
    begin = Writer(("ids_all",), of("w", "scale", "shift", "steps"))
    begin("new_steps", "aten.add.Tensor", "%steps", 1)
    if tp:
        begin("found", "mw.embedding", "%w", "%ids_all", first, rows, -1, False, False)
        begin("x_whole", "mw.all_reduce", "%found", axis=tp)
    else:
        begin("x_whole", "aten.embedding.default", "%w", "%ids_all")
    begin("x_scaled", "aten.mul.Tensor", "%x_whole", "%scale")
    begin("x_shifted", "aten.add.Tensor", "%x_scaled", "%shift")
    begin("x0", "aten._to_copy.default", "%x_shifted", dtype=compute)
    segments = [
        prologue.segment("", count, "ids_all", "labels_all", prologue=True), begin.segment("", "x0", "new_steps", zero=zero)
    ]
    for i in range(2):
        block = Writer((f"x{i}",), of(*(f"{name}{i}" for name in "nmuvde")))
        block("normed", "aten.layer_norm.default", f"%x{i}", [WIDTH], f"%n{i}", f"%m{i}", 1e-5)
        read = "normed"
        if tp:
            block("varied", "mw.vary", "%normed", axis=tp)
            read = "varied"
        block("qkv", "aten.linear.default", f"%{read}", f"%u{i}", f"%v{i}")
        block(("q", "k", "v"), "aten.split.Tensor", "%qkv", piece(inner, mesh, tps, here)[1], -1)
        block("g", "aten.gelu.default", "%q")
        block("gk", "aten.mul.Tensor", "%g", "%k")
        block("gkv", "aten.add.Tensor", "%gk", "%v")
        block("y", "aten.linear.default", "%gkv", f"%d{i}")
        if tp:
            block("y_whole", "mw.all_reduce", "%y", axis=tp)
        block("y_bias", "aten.add.Tensor", "%y_whole" if tp else "%y", f"%e{i}")
        block("sum", "aten.add.Tensor", f"%x{i}", "%y_bias")
        block("sums", "aten.unsqueeze.default", "%sum", 0)
        block(f"x{i + 1}", "aten.squeeze.dim", "%sums", 0)  # a view leaves the block, as reshapes do in real models
        segments.append(block.segment(f"blocks.{i}", f"x{i + 1}", zero=zero, recompute=recompute))
    end = Writer(("x2", "labels_all", count), of("w", "gain"))
    if tp:
        end("x2_varied", "mw.vary", "%x2", axis=tp)
        end("gain_varied", "mw.vary", "%gain", axis=tp)
    end("logits_raw", "aten.linear.default", "%x2_varied" if tp else "%x2", "%w")
    end("logits", "aten.mul.Tensor", "%logits_raw", "%gain_varied" if tp else "%gain")
    split = {"offset": first, "vocab": vocab, "axes": (tp,)} if tp else {}
    end(("sum", "unused_count"), "mw.cross_entropy", "%logits", "%labels_all", -100, 0.0, **split)
    total = "sum"
    for axis in data:
        end(f"sum_{axis}", "mw.all_reduce", f"%{total}", axis=axis)
        total = f"sum_{axis}"
    end("loss", "aten.div.Tensor", f"%{total}", f"%{count}")
    segments.append(end.segment("", "loss", "logits", zero=zero))
    whole = Sharding((data, ()))
    return Program(
        operators=builtin_rules().operators, mesh=mesh, rank=rank, segments=tuple(segments), stored=tuple(every),
        inputs=(Port("ids", (batch, length), torch.int64, whole), Port("labels", (batch, length), torch.int64, whole)),
        outputs=(
            Port("loss", (), torch.float32, Sharding(()), "sum"),
            Port("logits", (batch, length, vocab), compute, Sharding((data, (), tps)), 0),
        ),
        output_tree=(Ref("loss"), Ref("logits")), loss="loss", mutations=(("steps", "new_steps"),),
        microbatches=microbatches, cuts=(("ids_all", 0), ("labels_all", 0)) if microbatches > 1 else (),
        compute_dtype=compute_dtype,
    )
