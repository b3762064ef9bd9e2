"""What fits a few CPU processes: a plan's degrees made smaller, a transformers config made small.

Every degree that is more than one stays more than one as long as the processes allow it; a layer's parts keep their number of
kinds (grouped heads stay grouped, experts stay several), so what the plan does is done, on small tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.compiler.pipeline.degrees import SHARD
from meshwright.errors import InputError
from meshwright.ir.mesh import ANY, EXPERT, Mesh
from meshwright.ir.pins import ATTENTION, Pins
from meshwright.ir.plan import Plan
from meshwright.programs import degrees_of

SAMPLES, TOKENS, WIDTH, WORDS = 2, 16, 8, 96
"""Samples of a micro-batch and data rank, tokens of a sample, the width of a head, words of the vocabulary."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_KEYS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
          "shared_expert_intermediate_size")
_HEAD = ("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len")


def smaller(plan: Plan, processes: int) -> tuple[Pins, int]:
    """(the plan's degrees as pins, as small as the processes ask for; how many processes they take)."""
    mesh = plan.mesh
    recompute = Counter(group.recompute for group in plan.groups if group.path).most_common(1)
    kind = recompute[0][0] if recompute else None
    if mesh.having(ANY):
        axes = dict(zip(mesh.axes, _within(list(mesh.sizes), processes), strict=True))
        return Pins(axes=axes, recompute=kind, microbatches=min(2, plan.schedule.microbatches)), math.prod(axes.values())
    pipeline, known = plan.pipeline, degrees_of(plan)
    names = ("pp", "cp", "tp", "dp")
    sizes = [1 if pipeline is None else pipeline.degree, known["cp"], known["tp"], known["dp"]]
    pp, cp, tp, dp = _within(sizes, processes)
    zero = max((group.zero for group in plan.groups if mesh.size(group.data_axes) > 1), default=None)
    found: dict[str, Any] = dict(zip(names, (pp, cp, tp, dp), strict=True))
    folded = math.gcd(known["ep"] // known["cp"], dp) * cp if known["ep"] > mesh.size(mesh.having(EXPERT)) else 0
    found |= {"ep": folded or (math.gcd(known["ep"], dp) if known["ep"] > 1 else None), "recompute": kind,
              "zero": zero if dp * cp > 1 else None, "microbatches": min(2, plan.schedule.microbatches)}
    if SHARD in mesh.axes and dp > 3 and not dp % 2 and zero:
        found["shard"] = 2
    if pp > 1 and pipeline is not None:
        found |= {"schedule": pipeline.schedule, "virtual_stages": pipeline.stages // pipeline.degree,
                  "microbatches": 2 * pp if plan.schedule.microbatches > 1 else 1}
    forms = {factor for one in plan.assignments.values() for factor in one.values() if factor in ATTENTION}
    if cp > 1 and len(forms) == 1:
        found["attention"] = forms.pop()
    return Pins(**{name: value for name, value in found.items() if value is not None}), pp * cp * tp * dp


def _within(sizes: list[int], most: int) -> list[int]:
    """The sizes, the largest divided until their product is at most so much; of equals the last, so that stages stay longest.
    """
    found = list(sizes)
    while math.prod(found) > most:
        at = max(range(len(found)), key=lambda n: (found[n], n))
        found[at] //= _least(found[at])
    return found


def _least(size: int) -> int:
    """The smallest number of parts above one that it divides into; 1 of one."""
    return next((n for n in range(2, size + 1) if not size % n), 1)


def left_out(plan: Plan, mesh: Mesh) -> tuple[list[str], int]:
    """(the axes of a plan that have one rank each on a smaller ``mesh``, how many processes would do with all of them)."""
    lost = [axis for axis in plan.mesh.axes if plan.mesh.size(axis) > 1 and (axis not in mesh.axes or mesh.size(axis) == 1)]
    return lost, math.prod(_least(size) for size in plan.mesh.sizes)


def shrunken(path: Path, pins: Pins) -> tuple[Any, Any]:
    """(a small model of a config's kind, random and on the CPU, with an example that the degrees divide). Raises InputError."""
    import torch
    import transformers

    from meshwright.commands.models import config_of, example_of, model_of

    config = config_of(path)
    tp, pp, cp = pins.tp or 1, pins.pp or 1, pins.cp or 1
    layers = max(2, pp * (pins.virtual_stages or 1))
    heads, keys = (_first(config, names) for names in (_HEADS, _KEYS))
    keys = keys or heads or 1
    few = tp * cp
    many = few * (2 if heads and heads > keys else 1) * (2 if few == 1 else 1)
    experts, chosen = _first(config, _EXPERTS), _first(config, _CHOSEN) or 1
    ep = pins.ep or 1
    groups = _first(config, ("n_group",)) or 1  # of a router that chooses groups first: what it takes is in one
    unit = math.lcm(ep, groups)
    count = unit * -(-max(2 * ep, chosen + 1, (chosen if groups > 1 else 1) * groups) // unit)
    expand = _first(config, ("expand",)) or 1  # of a scan, whose heads are of the expanded width
    sizes: list[tuple[tuple[str, ...], int]] = [
        (_LAYERS, layers), (_HEADS, many * expand), (_HIDDEN, many * WIDTH), (_HEAD, WIDTH), (_INNER, 2 * many * WIDTH),
        (("qk_head_dim", "q_lora_rank", "kv_lora_rank"), 2 * WIDTH),
        (_KEYS, many if heads == keys else few), (_EXPERTS, min(count, experts or count)), (_LENGTH, TOKENS * cp),
        (("vocab_size",), WORDS),
    ]
    for names, size in sizes:
        for name in names:
            if isinstance(getattr(config, name, None), int):
                with suppress(AttributeError):  # some follow from others
                    setattr(config, name, size)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate", "drop_path_rate")):
            setattr(config, name, 0.0)
        if name.endswith("_token_id") and isinstance(value, int) and value >= WORDS:
            setattr(config, name, 1)
        if name == "layer_types" and isinstance(value, list):
            config.layer_types = value[:layers]
    batch = SAMPLES * (pins.dp or 1) * (pins.microbatches or 1)
    torch.manual_seed(0)
    try:
        model = model_of(config, transformers)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise InputError(f"no small model of {path} can be built ({type(error).__name__}: {error}); give a small one as "
                         "--model module:callable") from error
    return model, example_of(model, batch, TOKENS * cp)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
