"""Operators along a sequence: scaled dot product attention, recurrent layers and cells.

Of attention batch dims and heads pass. Query ``[*b, h, s, d]``, key ``[*b, g, t, d]``, value ``[*b, g, t, e]``, mask
broadcasting to ``[*b, h, s, t]``. With grouped queries (``enable_gqa``) consecutive query heads share a key head, so heads are
split in units of key heads; over more ranks than there are of these each works with one (``SHARED``), and has all. The head dim
is whole, and so is the sequence, which only these algorithms split:

    all-gather   queries, rows of the mask and results are split, keys and values are read whole
    ring         the same, and keys and values are split as well and pass by
    ulysses      is the heads' own split, what is split along the sequence before and after being exchanged by an all-to-all.
                 Where there are more ranks than key heads it is an algorithm of its own: a rank's queries share one key
                 head, which is dealt to it whole

Of recurrent layers samples pass, time and features are whole: a step in time reads all that the step before made, so neither
can be split, and the weights are read whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from meshwright.compiler.rules.book import Declaration, declare
from meshwright.compiler.rules.call import Call, Operand, Rewritten, argument, broadcast_dims, words
from meshwright.ir.declared.operator import SCORE_ROWS, Cost, Saves, Work
from meshwright.ir.graph import Op
from meshwright.ir.pins import GATHER, RING, ULYSSES
from meshwright.ir.rule import SHARED, Factor, Local, OpRule, SequenceAlgorithm
from meshwright.ir.sharding import ceil_div

Block = tuple[int, int, int, int, int, bool]
"""(q0, q1, k0, k1, m0, causal): see ``runtime.attention.forms``."""
WIDE = 4
"""Bytes of an element in fp32, in which outputs are merged and gradients summed."""
Range = tuple[int, int, int]
"""(first row in a piece, the row after its last, its place in the whole sequence) of a chunk."""


def _attention(call: Call) -> OpRule:
    """Heads are ``h``, with as many units as there are key heads (a single key head serves any split of the query heads)."""
    leading = call.shape[:-2]
    factors: list[Factor | None] = [*(f"b{i}" for i in range(len(leading) - 1)), *["h"] * bool(leading)]
    key = call["key"].shape[:-2]
    shared = bool(leading) and call["enable_gqa"] and 1 < key[-1] < leading[-1]

    def dims(tensor: Operand) -> list[Factor | None]:
        own = broadcast_dims(tensor.shape[:-2], leading, factors)
        if shared and own and tensor.shape[-3] == key[-1]:
            own[-1] = "h"
        return [*own, *[None] * min(tensor.ndim, 2)]  # a mask may be as short as the keys

    units: dict[Factor, int] = {"h": key[-1]} if shared else {}
    rule = call.rule([dims(operand) for operand in call.operands], [dims(call.results[0])], units=units,
                     algorithms=_algorithms(call), grouped=grouped(call) if shared else {}, inner=["h"] if leading else [])
    return replace(rule, alike=(_keys(call),))


def _keys(call: Call) -> tuple[tuple[int, int], ...]:
    """The dims that are as long as there are keys."""
    key, value, mask = (call[name] for name in ("key", "value", "attn_mask"))
    found = [(key.position, key.ndim - 2), (value.position, value.ndim - 2)]
    if mask is not None and mask.ndim and mask.shape[-1] == key.shape[-2]:
        found.append((mask.position, mask.ndim - 1))
    return tuple(found)


def grouped(call: Call, masked: bool = True) -> dict[str, SequenceAlgorithm]:
    """How more ranks than there are key heads split the query heads: keys and values are whole. ``masked``: the call may have
    a mask."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    mask = call["attn_mask"] if masked else None
    if key.ndim < 3 or value.ndim < 3 or key.shape[-3] != value.shape[-3]:
        return {}
    heads: list[int | None] = [query.ndim - 3, None, None]
    if mask is not None:
        heads.append(mask.ndim - 3 if mask.ndim > 2 and mask.shape[-3] == query.shape[-3] else None)
    return {SHARED: SequenceAlgorithm(tuple(heads), (query.ndim - 3,), (query.shape[-3],), heads=key.shape[-3],
                                      shared=(key.position, value.position))}


def _algorithms(call: Call) -> dict[str, SequenceAlgorithm]:
    """How queries in pieces are served. Keys pass by where they are cut as the queries are, or nothing depends on where."""
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    rows, keys = query.shape[-2], key.shape[-2]
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value)]
    alike = len({x.shape[:-3] for x in (query, key, value)}) == 1 and heads[1] == heads[2] and heads[0] % heads[1] == 0
    if rows < 2 or not alike or (heads[0] != heads[1] and not call["enable_gqa"]):
        return {}
    by_rows: list[int | None] = [query.ndim - 2, None, None]
    by_both: list[int | None] = [query.ndim - 2, key.ndim - 2, value.ndim - 2]
    if mask is not None:
        split = mask.ndim - 2 if mask.ndim > 1 and mask.shape[-2] == rows else None
        by_rows.append(split)
        by_both.append(split)
    result, causal = (query.ndim - 2,), bool(call["is_causal"])
    algorithms = {GATHER: SequenceAlgorithm(tuple(by_rows), result, (rows,), uneven=causal)}
    if keys > 1 and (rows == keys or not causal):
        algorithms[RING] = SequenceAlgorithm(tuple(by_both), result, (rows, keys), (key.position, value.position), causal)
    if call["enable_gqa"] and heads[1] < heads[0] and query.ndim == 4 and keys > 1:
        by_heads: list[int | None] = [1, 2, 2]
        if mask is not None:
            by_heads.append(mask.ndim - 3 if mask.ndim > 2 and mask.shape[-3] == heads[0] else None)
        algorithms[ULYSSES] = SequenceAlgorithm(tuple(by_heads), (1,), (heads[0], keys),
                                                dealt=(key.position, value.position), heads=heads[1])
    return algorithms


def _local_attention(op: Op, local: Local) -> Rewritten:
    """A piece of the queries looks at blocks of keys; with dropout it lends the kernel a generator."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments = tuple(argument(op, name) for name in names)
    *tensors, dropout, causal, scale, _ = arguments
    gathered, passing, dealt, shared = (local.axes_of(name) for name in (GATHER, RING, ULYSSES, SHARED))
    last = len(local.operand_shapes[0]) - 2
    if shared:
        return "mw.grouped_sdpa", (*arguments, key_head(local)), ()
    if passing:
        return "mw.ring", (*tensors, dropout, scale, *_passing_by(local, passing[0], last, causal)), (("axis", passing[0]),)
    if dealt:
        axis = dealt[0]
        lengths = tuple(
            local.operand_chunks(1, 2, {**local.coordinates, axis: rank})[0][1] for rank in range(local.mesh.size(axis))
        )
        return "mw.dealt", (*arguments[:7], lengths), (("axis", axis),)
    if gathered and causal:
        return "mw.attend", (*tensors, dropout, scale, _gathered(local, last)), ()
    if not dropout:
        return op.target, op.args, op.kwargs
    return "mw.sdpa", arguments, ()


def key_head(local: Local) -> int:
    """The key head that this rank's queries share, where ``SHARED`` splits them."""
    queries, keys = (local.operand_shapes[at][-3] for at in (0, 1))
    return local.operand_chunks(0, len(local.operand_shapes[0]) - 3)[0][0] // (queries // keys)


def _gathered(local: Local, dim: int) -> tuple[Block, ...]:
    """The blocks of causal attention on keys that are whole, for every chunk of the queries."""
    keys, blocks, first = local.operand_shapes[1][-2], list[Block](), 0
    for offset, length in local.operand_chunks(0, dim):
        blocks += [(first + q0, first + q1, *rest) for q0, q1, *rest in _causal(offset, length, keys)]  # type: ignore[misc]
        first += length
    return tuple(blocks)


def _causal(offset: int, length: int, keys: int) -> list[Block]:
    """Rows offset.. of causal attention on all keys: what lies before the first row, then a square, then rows that see all."""
    prefix, end = min(offset, keys), min(offset + length, keys)
    square, below = end - prefix, length - (end - prefix)
    blocks: list[Block] = [(0, length, 0, prefix, 0, False)] * bool(prefix)
    blocks += [(0, square, prefix, end, prefix, True)] * bool(square)
    blocks += [(square, length, prefix, end, prefix, False)] * bool(square and below)
    return blocks


def _passing_by(local: Local, axis: str, dim: int, causal: bool) -> tuple[tuple[tuple[Block, ...], ...], int]:
    """(the blocks at every step of a ring, the length of the longest piece of the keys)."""
    ranks, mine = local.mesh.size(axis), local.coordinates[axis]
    masked = len(local.operand_shapes) > 3
    rows, longest = _ranges(local.operand_chunks(0, dim)), ceil_div(local.operand_shapes[1][dim], ranks)
    steps = []
    for step in range(ranks):
        keys = _ranges(local.operand_chunks(1, dim, {**local.coordinates, axis: (mine - step) % ranks}))
        steps.append(_square(rows) if causal and not step else tuple(_pairs(rows, keys, causal, masked)))
    return tuple(steps), longest


def _square(rows: Sequence[Range]) -> tuple[Block, ...]:
    """This rank's queries on its own keys: chunks in order, so the whole is one causal square."""
    return ((0, rows[-1][1], 0, rows[-1][1], 0, True),)


def _pairs(rows: Sequence[Range], keys: Sequence[Range], causal: bool, masked: bool) -> Iterator[Block]:
    """Blocks of some chunks of queries on another rank's chunks of keys. Chunks that lie side by side are one block, unless a
    mask says where the keys are."""
    seen = [[k for k in keys if not causal or k[2] < q[2]] for q in rows]
    whole = all(chunks == seen[0] for chunks in seen)
    for (first, last, _), chunks in [((rows[0][0], rows[-1][1], 0), seen[0])] if whole else zip(rows, seen, strict=True):
        together = [(chunks[0][0], chunks[-1][1], 0)] if chunks and not masked else chunks
        yield from ((first, last, start, stop, offset, False) for start, stop, offset in together)


def _ranges(chunks: Sequence[tuple[int, int]]) -> list[Range]:
    """Chunks as (first row, last, offset in the whole) of the piece that they make."""
    found, first = list[Range](), 0
    for offset, length in chunks:
        found.append((first, first + length, offset))
        first += length
    return found


def _read(call: Call, dims: list[Factor | None], state: list[Factor | None]) -> list[list[Factor | None]]:
    """The factors of the input, the states and the weights."""
    states = 1 if isinstance(call["hx"], Operand) else len(call["hx"])
    weights: list[list[Factor | None]] = [[None] * weight.ndim for weight in call.operands[1 + states :]]
    return [dims, *[state] * states, *weights]


def _layers(call: Call) -> OpRule:
    """Input ``[n, t, i]`` or ``[t, n, i]``, states ``[layers, n, h]``."""
    if call["input"].ndim < 3:
        return call.whole()
    dims: list[Factor | None] = ["n", None, None] if call["batch_first"] else [None, "n", None]
    state: list[Factor | None] = [None, "n", None]
    return call.rule(_read(call, dims, state), [dims, *[state] * (len(call.results) - 1)])


def _cell(call: Call) -> OpRule:
    """Input ``[n, i]``, states ``[n, h]``."""
    if call["input"].ndim < 2:
        return call.whole()
    dims: list[Factor | None] = ["n", None]
    return call.rule(_read(call, dims, dims), [dims] * len(call.results))


def _statistics(work: Work) -> float:
    """The log-sum-exp of every row of the query. Where the mask takes a gradient (T5's position bias) torch writes attention
    out in fp32: it keeps the probabilities, and query, key and value in fp32 in the place of their own."""
    if len(work.gradients) <= 3 or not work.gradients[3]:
        return _rows(work)
    rows, given = math.prod(work.operands[0][:-1]), sum(math.prod(shape) for shape in work.operands[:3])
    return float(rows * work.operands[1][-2] * WIDE + given * max(0, WIDE - work.reads.itemsize))


def _written_out(work: Work) -> tuple[float, float]:
    """Where torch writes attention out (``_statistics``): forward the scores, backward their gradients and the others'."""
    if len(work.gradients) <= 3 or not work.gradients[3]:
        return 0.0, 0.0
    scores = float(math.prod(work.operands[0][:-1]) * work.operands[1][-2] * WIDE)
    return scores, 2 * scores


def _rows(work: Work) -> float:
    """The log-sum-exp of every row of the query."""
    return math.prod(work.operands[0][:-1]) * 4


def _merging(work: Work) -> tuple[float, float]:
    """What blocks need while they are merged: forward the output of one, weighted, and copies of its operands in a row;
    backward the sums of gradients in fp32, and those of one block with copies of its operands."""
    query, keys = math.prod(work.operands[0]), sum(math.prod(shape) for shape in work.operands[1:3])
    item, made = work.reads.itemsize, math.prod(work.results[0])
    cast = WIDE if item < WIDE else 0
    forward = made * (item + WIDE + cast) + (query + keys) * item
    return float(forward), float((query + keys) * (cast + 2 * item) + 2 * made * item)


def _attending(work: Work) -> tuple[float, float]:
    """The same, and the scores of a block where they are formed."""
    forward, backward = _merging(work)
    scores = [_scores(work, last - first, stop - start) for first, last, start, stop, *_ in work.args[6]]
    return forward, backward + max(scores, default=0.0) + _mask_sum(work)


def _passing(work: Work) -> tuple[float, float]:
    """As ``_merging``, and pieces on their way; in the backward the most of any moment of ``runtime.attention.forms``, without
    the gradients that it hands on."""
    forward, _ = _merging(work)
    item, steps, length = work.reads.itemsize, work.args[6], work.args[7]
    query, made = (math.prod(shape) for shape in (work.operands[0], work.results[0]))
    rows, key = work.operands[0][-2], sum(math.prod(shape) // shape[-2] for shape in work.operands[1:3])
    keys, wide = key * length * item, key * length * max(item, WIDE)  # a message, and one of gradients
    most = 0.0
    for step, blocks in enumerate(steps):
        sent = keys * (step + 1 < len(steps)) + 2 * wide * (step > 0)  # on its way: keys, and gradients with where they land
        made_before = 0.0
        for first, last, start, stop, *_ in blocks:
            part, seen = (last - first) / rows, stop - start
            copies = part * (query + 2 * made) + seen * key * (seen < length)
            gradients = part * query + seen * key
            scores = _scores(work, last - first, seen)
            most = max(most, wide + sent + item * (copies + gradients + made_before) + scores)
            made_before = gradients
        most = max(most, 2 * wide + sent)
    most = max(most, 2 * wide + (query + key * length) * (item if item < WIDE else 0))
    handed = (query + sum(math.prod(shape) for shape in work.operands[1:3])) * item
    return forward + 2 * keys, query * max(item, WIDE) + keys + most - handed + _mask_sum(work)


def _scores(work: Work, rows: int, keys: int) -> float:
    """Bytes of the scores that the backward of a block forms where no flash kernel does it, as the mask takes a gradient or
    probabilities are dropped: of some rows at a time, fp32; and the mask's gradient of the block."""
    masked, dropped = len(work.gradients) > 3 and work.gradients[3], bool(work.args[4])
    if not masked and not dropped:
        return 0.0
    at_once = 4 + dropped + (rows > SCORE_ROWS)  # probabilities, their gradients and a difference; some of the rows before
    formed = math.prod(work.operands[0][:-2]) * min(rows, SCORE_ROWS) * keys * at_once
    if masked:
        *_, high, wide = 1, 1, *(mask := work.operands[3])
        formed += math.prod(mask[:-2]) * (rows if high > 1 else 1) * (keys if wide > 1 else 1)
    return formed * WIDE


def _mask_sum(work: Work) -> float:
    """Bytes by which the mask's gradient is wider while it is summed over blocks."""
    masked = len(work.gradients) > 3 and work.gradients[3]
    return float(math.prod(work.operands[3]) * max(0, WIDE - work.reads.itemsize)) if masked else 0.0


def _head(work: Work) -> float:
    """Bytes of the key and the value head that a rank is dealt."""
    rows = sum(work.args[7])
    return float(sum(math.prod(shape[:-3]) * rows * shape[-1] for shape in work.operands[1:3]) * work.reads.itemsize)


def _dealt(work: Work) -> float:
    """The heads that a rank is dealt, and the log-sum-exp."""
    return _head(work) + _rows(work)


def _dealing(work: Work) -> tuple[float, float]:
    """What is sent and what has come, before it is a key and a value."""
    ranks = len(work.args[7])
    sent = sum(math.prod(shape) // shape[-3] for shape in work.operands[1:3]) * ranks * work.reads.itemsize
    return float(sent + _head(work)), float(sent + 2 * _head(work))


attention = partial(declare, cost=Cost("attention", space=_written_out), saves=Saves.parse("0 1 2 r0", extra=_statistics))
in_blocks = partial(declare, None, saves=Saves.parse("0 1 2 3 r0", extra=_rows))

RULES: Mapping[str, Declaration] = {
    "aten.scaled_dot_product_attention.default": attention(_attention, _local_attention),
    "mw.sdpa": attention(None), "mw.grouped_sdpa": attention(None),
    "mw.attend": in_blocks(cost=Cost("attention", space=_attending)),
    "mw.ring": in_blocks(cost=Cost("attention", space=_passing)),
    "mw.dealt": declare(None, cost=Cost("attention", space=_dealing), saves=Saves.parse("0 3 r0", extra=_dealt)),
    **{f"aten.{name}.input": declare(_layers) for name in words("lstm gru rnn_tanh rnn_relu")},
    **{f"aten.{name}.default": declare(_cell) for name in words("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")},
}
