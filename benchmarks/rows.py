"""What a row of published runs says, column by column: hardware, software, model, degrees, and what was measured.

Whatever a row says is read by tables that any source shares. Nothing is read from the name of a model or of a source but the
year that a source bears, which bounds the kernels there were. A blank column takes what the table beside it says and is
reported (``assumed``); where nothing sensible can be taken the row is Unpriced, with the reason. A row that leaves its
attention kernel, recomputation, loss or stages open is priced in every way there is (``completions_of``): as a range.

    gpu                       the device of the catalogue (its names and aliases; of several, the one of that memory)
    interconnect              the node: named clouds (``INSTANCES``), else the device's own with the NICs that are stated
    attention, notes          attention kernel (``KERNELS``), fusion (``FUSED``), norm (``normed``), overlap (``OVERLAPPED``)
    schedule, dtype, notes    what recomputation runs again (``CHECKPOINTED``)
    family                    the architecture (``FAMILIES``); experts make it a mixture
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from words import (
    AGES,
    BALANCED,
    CHECKPOINTED,
    CUTS,
    FAMILIES,
    FLASH,
    FUSED,
    HYBRID,
    INSTANCES,
    KEPT_LOGITS,
    KERNELS,
    LATEST,
    LOSSES,
    MEASURED,
    MEGATRON,
    MERGED,
    NO,
    PORTS,
    SCHEDULES,
    SEVERAL,
    SOFTWARE,
    SOFTWARE_KERNELS,
    SPLIT,
    SPLITS,
    STOPS,
    SUMS,
    TRAINED,
    UNFUSED,
    UNSAID,
    WHOLE_LOGITS,
    YES,
)

from meshwright.cost.catalogue import catalogue
from meshwright.cost.cluster import Cluster
from meshwright.cost.tables import MeasuredCollective
from meshwright.ir.pins import Pins
from meshwright.ir.schedules import schedule_of
from meshwright.published.architectures import Architecture
from meshwright.published.zoo import zero_of_stages

DATA = Path(__file__).parent / "data"
Row = Mapping[str, str]


class Unpriced(ValueError):  # noqa: N818 - a reason, not a failure
    """Why a row has no prediction."""


class Shape(NamedTuple):
    """A model by its dimensions, at its global batch."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int
    top_k: int
    batch: int
    seq: int
    tied: bool = False

    @property
    def architecture(self) -> Architecture:
        """As ``meshwright.published.architectures`` builds it."""
        return Architecture(
            self.family, self.layers, self.hidden, self.heads, self.ffn, self.vocab, self.kv_heads, 0, self.experts, self.top_k,
            {"tie_word_embeddings": True} if self.tied and self.family not in ("gpt", "palm") else {},
        )


# ------------------------------------------------------------------------------------------------------ columns


def text_of(row: Row, *keys: str) -> str:
    """Columns side by side, in lower case; blank where they are missing."""
    return " ".join(str(row.get(key) or "").strip() for key in keys).strip().lower()


def number(row: Row, key: str, default: float | None = None) -> float | None:
    """A column as a number, ``default`` where it is blank or no number ("1,024" is one, and so is "41.2%")."""
    try:
        value = float(text_of(row, key).replace(",", "").rstrip("%") or "nan")
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def integer(row: Row, key: str, default: int | None = None) -> int:
    """A column as an integer. Raises Unpriced where it is blank and has no default."""
    value = number(row, key, default)
    if value is None:
        raise Unpriced(f"the source does not state {key}")
    return int(value)


def degree(row: Row, key: str) -> int:
    """A degree of parallelism, 1 where blank. Raises Unpriced for what is none."""
    value = number(row, key) if text_of(row, key) else 1.0
    if value is None or value < 1 or value != int(value):
        raise Unpriced(f"{key} = {row.get(key)!r} is no degree of parallelism")
    return int(value)


def word_of(text: str, table: Sequence[tuple[str, str]]) -> str | None:
    """The entry of the first words that the text holds."""
    return next((value for words, value in table if words.lower() in text.lower()), None)


def published_in(row: Row) -> tuple[int, int] | None:
    """(year, month) that a source bears: an arXiv number or a year in words; None where it bears none."""
    text = text_of(row, "source")
    found = re.search(r"\b(\d\d)(0[1-9]|1[0-2])\.\d{4,5}\b", text)
    if found:
        return 2000 + int(found[1]), int(found[2])
    year = re.search(r"\b(20[12]\d)\b", text)
    return (int(year[1]), 12) if year else None


# ----------------------------------------------------------------------------------------------------- hardware


def device_of(row: Row) -> str:
    """The catalogue's name of the row's device: the longest of its names in the column, of the memory that is stated."""
    text = text_of(row, "gpu")
    if not text:
        raise Unpriced("the source does not state gpu")
    plain = re.sub(r"\b(rtx|tpu)[ -]*(?=v?\d)", r"\1-", text)
    tables = catalogue()["device"]
    aliases = {alias: key for key, table in tables.items() for alias in (key, *table.get("aliases", ()))}
    found = [alias for alias in aliases if re.search(rf"(?<![a-z0-9]){re.escape(alias)}(?![a-z0-9])", plain)]
    if not found:
        raise Unpriced(f"no device of the catalogue for {row['gpu']!r}")
    name: str = aliases[max(found, key=len)]
    memory = re.search(r"(\d+) ?g(?:i?b)?\b", plain)
    kin = [name, *(key for key in tables if key.partition("-")[0] == name.partition("-")[0])]
    return next((key for key in kin if memory and key.endswith(f"-{memory[1]}g")), name)


def nics_of(text: str, per_node: int, nics: int, rate: float) -> tuple[int, float]:
    """(NICs of a node, bits per second of each) that an "interconnect" states; ``nics``, ``rate``: the device's own.

    >>> nics_of("NVLink3 300GB/s + 4x200Gb HDR per node", 8, 8, 2e11), nics_of("1600 Gbps RoCE/node", 8, 8, 4e11)
    ((4, 200000000000.0), (8, 200000000000.0))
    >>> nics_of("NDR 400Gb/s per GPU", 4, 8, 2e11), nics_of("8xHDR100", 8, 4, 2e11), nics_of("NVSwitch", 8, 8, 2e11)
    ((4, 400000000000.0), (8, 100000000000.0), (8, 200000000000.0))
    """
    ports = "|".join(sorted(PORTS, key=len, reverse=True))
    count = re.search(rf"(\d+) ?[x×] ?(?:(?:{ports}) ?)?(\d+(?:\.\d+)?) ?([GTgt])b", text)
    named = re.search(rf"(?:(\d+) ?[x×] ?)?\b({ports})\b", text.replace("x", "x ")) or re.search(rf"()({ports})", text)
    plain = re.search(r"(\d+(?:\.\d+)?) ?([GTgt])b", text)
    if count:
        return int(count[1]), _bits(count[2], count[3])
    if plain:
        bits = _bits(plain[1], plain[2])
        if re.search(r"(?:/|per ?)(?:gpu|device|chip|accelerator)", text, re.IGNORECASE):
            return per_node, bits
        node = re.search(r"(?:/|per ?)(?:node|server|host|machine|instance)|ethernet|\bEN\b", text, re.IGNORECASE)
        return (nics, bits / nics) if node else (nics, bits)
    if named:
        return int(named[1] or nics), PORTS[named[2]] * 1e9
    return nics, rate


def _bits(value: str, unit: str) -> float:
    return float(value) * {"g": 1e9, "t": 1e12}[unit.lower()]


def world_of(row: Row) -> int:
    """Devices: as stated, or the product of the degrees."""
    stated = number(row, "n_gpus")
    return int(stated) if stated else math.prod(degree(row, key) for key in ("dp", "tp", "pp", "cp"))


def wired(row: Row) -> Cluster:
    """The devices of a row on their nodes."""
    device, world, wires = device_of(row), world_of(row), str(row.get("interconnect") or "")
    node = next((name for words, on, name in INSTANCES if words.lower() in wires.lower() and device.startswith(on)), "")
    if "pcie" in (wires + text_of(row, "gpu")).lower() and not re.search("nvlink|nvswitch", wires, re.IGNORECASE):
        node = node or "pcie4"
    reference = Cluster.parse(f"{device}{'@' + node if node else ''}:1x1").node
    stated = number(row, "gpus_per_node") or reference.per_node
    per_node = math.gcd(world, int(stated)) if world > stated else world
    island = Cluster.parse(f"{device}{'@' + node if node else ''}:{world // per_node}x{per_node}").island
    own = island.node
    if node in ("", "pcie4") and own.nics:
        nics, bits = nics_of(wires, int(stated), own.nics, own.nic_bandwidth * 8)
        island = replace(island, node=replace(own, nics=nics, nic_bandwidth=bits / 8, per_node=int(stated)))
    known = word_of(wires, MEASURED)
    return Cluster((replace(island, node=replace(island.node, measured=_collectives(known))) if known else island,))


@lru_cache
def _collectives(file: str) -> tuple[MeasuredCollective, ...]:
    """The collectives of a file of ``data``."""
    return Cluster.from_toml(DATA / file).island.node.measured


# ----------------------------------------------------------------------------------------------------- software


def kernel_of(row: Row) -> str | None:
    """The attention kernel that a row states ("attention", notes) or its software brings; None: it says nothing."""
    stated = text_of(row, "attention")
    notes = re.sub(r"[\s_-]+", "", text_of(row, "notes"))
    return stated or word_of(notes, KERNELS) or word_of(notes, SOFTWARE_KERNELS)


def kernels_of(row: Row) -> tuple[str, ...]:
    """The attention kernels that a row may have run on, as far as its device has them: the one that it states, or all that
    there were."""
    named, date, there = kernel_of(row), published_in(row), Cluster.parse(f"{device_of(row)}:1x1").device.attention
    if named not in (None, FLASH):
        return (str(named),)
    ages = next((kernels for until, kernels in AGES if date is not None and date <= until), LATEST)
    found = tuple(kernel for kernel in ages if kernel in there or (kernel == "scores" and named is None))
    return found or (next(iter(there)),)


def completions_of(row: Row) -> tuple[Row, ...]:
    """The row with what it leaves open filled in, in every way there is: its attention kernel, its recomputation (none, all),
    its stages a rank (as few and as many as its schedule has), where they start, the kernel of its loss, what gradients are
    summed in. What ran is one of them, and nobody knows which."""
    kernels = [{"attention": kernel} for kernel in kernels_of(row)]
    runs = [{}] if text_of(row, "recompute") else [{"recompute": "none"}, {"recompute": "full"}]
    stages: list[dict[str, str]] = [{}]
    if degree(row, "pp") > 1 and not number(row, "vpp"):
        several = schedule_of(_schedule({**row, "vpp": "2"}))
        most = integer(row, "n_layers") // degree(row, "pp")
        if several.stages is None and several.usual > 1 and most > 1:
            said = word_of(text_of(row, "schedule"), SCHEDULES) == several.name
            stages = [{"vpp": str(count), "schedule": several.name if count > 1 else text_of(row, "schedule")}
                      for count in (1 + said, _most(row, most))]
    losses = [{}] if loss_of(row) else [{"loss": "merged"}, {"loss": "eager"}]
    both = degree(row, "pp") > 1 and _heavy_head(row) and not cuts_of(row)
    cuts = [{"cuts": "even"}, {"cuts": "searched"}] if both else [{}]
    sums = [{}] if sums_of(row) else [{"sums": "narrow"}, {"sums": "fp32"}]
    ways = itertools.product(kernels, runs, stages, cuts, losses, sums)
    return tuple({**row, **a, **b, **c, **d, **e, **f} for a, b, c, d, e, f in ways)


def _most(row: Row, most: int) -> int:
    """The largest number of stages a rank up to ``most`` that cuts the layers evenly, 2 if none does."""
    layers, pp = integer(row, "n_layers"), degree(row, "pp")
    return next((n for n in range(most, 1, -1) if layers % (n * pp) == 0), 2)


def fused(row: Row) -> bool:
    """Whether chains of pointwise operators run as one kernel; PyTorch runs them one by one unless a row says otherwise."""
    notes = text_of(row, "notes")
    return any(words in notes for words in FUSED) and not UNFUSED.search(notes)


def normed(row: Row) -> bool:
    """Whether an RMS norm is one kernel, as a layer norm is (Apex, FlashAttention and Transformer Engine have one since 2022):
    yes, unless the notes name the kernels ("kernel=") and none for it."""
    notes = text_of(row, "notes")
    return "rms kernel" in notes or "kernel=" not in notes


def loss_of(row: Row) -> str | None:
    """The kernel of the loss: "merged" in one each way (FlashAttention's package has one since 2022), "sharded" in many in
    place (Megatron-LM's), "eager" in many (before June 2022, and where notes name the kernels and none for it); None: nothing
    tells."""
    notes = re.sub(r"[\s_-]+", "", text_of(row, "notes"))
    stated = text_of(row, "loss") or word_of(notes, LOSSES)
    known = fused(row) or "kernel=" in notes or (published_in(row) or MERGED) < MERGED
    return stated or ("sharded" if megatron(row) else "eager" if known else None)


def torch_of(row: Row) -> tuple[int, int]:
    """The version of torch that the notes name ("torch 2.0"), a late one where they name none."""
    found = re.search(r"\btorch (\d+)\.(\d+)", text_of(row, "notes"))
    return (int(found[1]), int(found[2])) if found else (9, 9)


def cuts_of(row: Row) -> str | None:
    """Where the stages of a pipeline start whose head weighs more than a layer: "even", as many layers in each (Megatron-LM
    cuts no other way), "modules", as many of its parts, the embedding, the last norm and the head being one each (DeepSpeed's
    "uniform" and its kin's), or "searched", by what they take; None: nothing tells."""
    stated = text_of(row, "cuts") or word_of(text_of(row, "notes"), CUTS)
    return stated or ("even" if megatron(row) else None)


def sums_of(row: Row) -> str | None:
    """What micro-batches' gradients are summed in: "fp32" (Megatron-LM, NeMo, FSDP), "narrow", the compute dtype (the default
    of DeepSpeed's 16-bit optimizers); None: nothing tells. It plays no part where each is reduced (ZeRO 2, 3) or there is
    one."""
    words = text_of(row, "schedule", "dtype", "notes")
    stated = text_of(row, "sums") or word_of(words, SUMS)
    if stated or fused(row) or megatron(row) or precision_of(row) != "bf16" or any(word in words for word in CHECKPOINTED):
        return stated or "fp32"
    once = zero_of(row) in (0, 1) and batch_of(row) > (number(row, "micro_batch") or math.inf) * replicas(row)
    return None if once else "fp32"


def megatron(row: Row) -> bool:
    """Whether the columns say that Megatron-LM ran."""
    said = text_of(row, "schedule", "recompute")
    return (number(row, "vpp") or 1) > 1 or any(word in said for word in MEGATRON)


def cluster_of(row: Row) -> Cluster:
    """The devices, nodes and software of a row. Every 1F1B that is public waits for what it sends: torch's and Megatron-LM's
    send and receive at once (``send_forward_recv_backward``), nanotron's and DeepSpeed's kin's sends block the stream."""
    cluster, kernel = wired(row), kernel_of(row)
    text = text_of(row, "schedule", "dtype", "notes")
    said = {name: any(words in text for words in table) for name, table in SOFTWARE.items()}
    added = said["overlapped"] or (megatron(row) and (published_in(row) or MERGED) >= MERGED)
    return cluster.with_kernels(
        kernel if kernel in cluster.device.attention else None, fused=fused(row), accumulates=added,
        repeats=torch_of(row) < STOPS or not any(words in text for words in CHECKPOINTED),
        merged_loss=loss_of(row) == "merged", sharded_loss=loss_of(row) == "sharded", narrow_sums=sums_of(row) == "narrow",
        kept_logits=2 * any(words in text for words in KEPT_LOGITS), waits=True, **said,
    )


def precision_of(row: Row) -> str:
    """The planner's name of a dtype column."""
    dtype = text_of(row, "dtype")
    if re.search("mxfp|nvfp|int8", dtype):
        raise Unpriced(f"no price for dtype {row['dtype']!r}")
    if "fp8" in dtype or "tf32" in dtype:
        return "fp8" if "fp8" in dtype else "tf32"
    if not dtype or re.search("bf16|fp16|float16|half|mixed|amp|16-bit|16bit", dtype):
        return "bf16"
    if re.search("fp32|float32|single", dtype):
        return "fp32"
    raise Unpriced(f"no price for dtype {row['dtype']!r}")


# -------------------------------------------------------------------------------------------------------- model


def shape_of(row: Row) -> Shape:
    """The row's model at its global batch. Raises Unpriced for what the source does not state."""
    layers, hidden, heads, vocab, seq = (integer(row, key) for key in ("n_layers", "hidden", "n_heads", "vocab", "seq_len"))
    batch, experts = batch_of(row), integer(row, "n_experts", 0)
    if batch < 1:
        raise Unpriced("the source does not state the global batch")
    kv_heads = integer(row, "n_kv_heads", 0) or heads
    family = _family(row, experts)
    experts_ffn = integer(row, "moe_ffn_hidden", 0) if family == "moe" else 0
    ffn = experts_ffn or integer(row, "ffn_hidden", _usual_ffn(family, hidden))
    if hidden % heads or heads % kv_heads:
        raise Unpriced(f"hidden {hidden}, {heads} heads and {kv_heads} key and value heads do not divide")
    tied = bool(re.search(r"tied embeddings\s*[=:]\s*(yes|true)", text_of(row, "notes")))
    return Shape(family, layers, hidden, heads, kv_heads, ffn, vocab, experts, integer(row, "top_k", 0), int(batch), seq, tied)


def _family(row: Row, experts: int) -> str:
    text = text_of(row, "family")
    if not text:
        raise Unpriced("the source does not state family")
    known = word_of(text, FAMILIES)
    if not known:
        raise Unpriced(f"no architecture for family {row['family']!r}")
    shares = number(row, "n_kv_heads") not in (None, 0.0, number(row, "n_heads"))
    return "moe" if experts > 1 else "nemotron" if known == "gpt" and shares else known


def _usual_ffn(family: str, hidden: int) -> int | None:
    return 4 * hidden if family in ("gpt", "nemotron", "palm") else None


def batch_of(row: Row) -> float:
    """Sequences of a step: as stated; tokens a second times seconds; micro-batches of every data rank times their number
    ("grad_accum" in the notes), one where the row says no more; 0 where it says nothing."""
    stated, rate, seconds = number(row, "global_batch_seqs"), number(row, "tokens_per_s_per_gpu"), number(row, "step_time_s")
    if stated:
        return stated
    if rate and seconds and number(row, "seq_len"):
        return float(round(rate * seconds * world_of(row) / (number(row, "seq_len") or 1.0)))
    accumulated = re.search(r"grad_accum\w*\s*[=:]\s*(\d+)", text_of(row, "notes"))
    return (number(row, "micro_batch") or 0.0) * replicas(row) * (int(accumulated[1]) if accumulated else 1)


def replicas(row: Row) -> int:
    """Data-parallel ranks: as stated, or what the other degrees leave of the devices."""
    return int(number(row, "dp") or world_of(row) // math.prod(degree(row, key) for key in ("tp", "pp", "cp")))


def imbalance_of(row: Row) -> float:
    """The rows of the device that gets most over the mean, where experts are split."""
    return 1.0 if any(words in text_of(row, "notes") for words in BALANCED) else TRAINED


def expert_ranks(row: Row) -> int:
    """Data ranks that share out the experts. Where the notes say over how many ranks each expert is split ("ETP1"), experts lie
    over ep x etp devices side by side, of which tp are one data rank (Megatron-Core's parallel folding); else over ep of them.
    Raises Unpriced for fewer devices than tensor ranks."""
    ep, tp, stated = degree(row, "ep"), degree(row, "tp"), re.search(r"\betp ?=? ?(\d+)", text_of(row, "notes"))
    devices = ep * (int(stated[1]) if stated else tp)
    if devices % tp:
        raise Unpriced(f"experts over {devices} devices share tensor ranks of {tp}")
    return devices // tp


def assumed(row: Row) -> str:
    """What was taken for the columns that are blank or ambiguous, for the reader."""
    words = [] if text_of(row, "dtype") else ["dtype bf16"]
    words += [] if number(row, "ffn_hidden") or number(row, "moe_ffn_hidden") else ["ffn_hidden = 4 hidden"]
    words += [] if number(row, "global_batch_seqs") else [f"{batch_of(row):.0f} sequences a step"]
    words += [] if number(row, "gpus_per_node") or world_of(row) <= 8 else ["the device's own node"]
    several = batch_of(row) != (number(row, "micro_batch") or 0.0) * replicas(row)
    words += ["gradients reduced once a step"] if degree(row, "pp") > 1 and (zero_of(row) or 0) > 1 and several else []
    words += [f"attention of {' or '.join(kernels_of(row))}"] if len(kernels_of(row)) > 1 else []
    words += [] if text_of(row, "recompute") else ["recomputation of none or all"]
    uneven = degree(row, "ep") > 1 and imbalance_of(row) > 1
    words += [f"{imbalance_of(row):g} times the mean of rows on the fullest device"] if uneven else []
    words += [] if loss_of(row) else ["a loss of one kernel or of many"]
    words += [] if sums_of(row) else ["gradients summed in 16 or 32 bits"]
    both = degree(row, "pp") > 1 and _heavy_head(row) and not cuts_of(row)
    words += ["stages of as many layers or of as much work"] if both else []
    words += ["any number of stages a rank"] if degree(row, "pp") > 1 and not number(row, "vpp") else []
    return "assumed: " + ", ".join(words) if words else ""


# --------------------------------------------------------------------------------------------------------- pins


def pins_of(row: Row, world: int, blocks: Sequence[str] = ()) -> Pins:
    """The published degrees. What the source leaves open is searched, but for recomputation: programs do it where they are told
    to. ``blocks``: the layers' names; stages of equal layers are pinned where no other cut is faster. Raises Unpriced for
    degrees that do not make up ``world`` devices."""
    tp, pp, cp = (degree(row, key) for key in ("tp", "pp", "cp"))
    stated, ep = number(row, "dp"), expert_ranks(row)
    dp = world // (tp * pp * cp)
    if dp * tp * pp * cp != world:
        raise Unpriced(f"tp {tp} x pp {pp} x cp {cp} do not divide {world} devices")
    if stated and stated != dp and stated * ep != dp:
        raise Unpriced(f"dp {stated:.0f} x tp {tp} x pp {pp} x cp {cp} are not {world} devices")
    batch, micro = batch_of(row), number(row, "micro_batch")
    vpp = number(row, "vpp")
    schedule = _schedule(row) if pp > 1 else None
    known = None if schedule is None else schedule_of(schedule)
    fixed = known is not None and (known.stages or 1) > 1
    several = known is not None and known.stages is None and known.usual > 1  # how many is left to the search
    microbatches = max(1, round(batch / (dp * micro))) if batch and micro else None
    level = zero_of(row) if microbatches == 1 else zero_of_stages(zero_of(row), pp)
    split = text_of(row, "sp") in YES and tp > 1
    hybrid = any(words in text_of(row, "zero/fsdp", "dtype", "schedule", "notes") for words in HYBRID)
    return Pins(
        dp=dp, shard=dp if level and not hybrid else None, tp=tp, pp=pp, cp=cp, ep=ep, zero=level,
        sequence_parallel=None if tp > 1 and not text_of(row, "sp") else split,
        schedule=schedule, stage_cuts=_even_cuts(row, pp * int(vpp or not several), blocks),
        virtual_stages=None if pp == 1 or fixed else int(vpp) if vpp else None if several else 1,
        microbatches=microbatches, recompute=recompute_of(row),
        operators={} if hybrid else _layout(row, {"dp": dp // ep, "ep": ep, "cp": cp, "tp": tp}),
    )


def _layout(row: Row, sizes: Mapping[str, int]) -> dict[str, str]:
    """{operators: what splits them} of a row's tensor parallelism: as all software does (``SPLITS``), and a loss on gathered
    logits by samples alone. ``sizes``: of the axes."""
    if sizes["tp"] == 1:
        return {}
    dims = {"dp": "b0", "ep": "b0", "cp": "b1"}
    batch = [f"{axis}={dims[axis]}" for axis, size in sizes.items() if size > 1 and axis in dims]
    named = SPLITS.get(_family(row, integer(row, "n_experts", 0)), SPLIT)
    whole = {"*:cross_entropy": ", ".join(batch)} if any(words in text_of(row, "notes") for words in WHOLE_LOGITS) else {}
    return {f"*{name}": ", ".join([*batch, f"tp={dim}"]) for name, dim in named.items()} | whole


def zero_of(row: Row) -> int | None:
    """The level of a "zero/fsdp" column: a digit, or words; None where it is blank."""
    text = text_of(row, "zero/fsdp")
    found = re.search(r"[0-3]", text)
    if not text or found:
        return int(found[0]) if found else None
    if text in NO or "ddp" in text:
        return 0
    if "fsdp" in text or "full" in text or text in YES:
        return 3
    return 1 if "dist" in text else None  # a distributed optimizer


def recompute_of(row: Row) -> str:
    """What is run again in the backward; nothing where the source does not say."""
    text = text_of(row, "recompute")
    if not text or text in NO or text.startswith("no"):
        return "none"
    if "select" in text:
        return "selective"
    if any(word in text for word in (*YES, "every", "checkpoint", "all")):
        return "full"
    raise Unpriced(f"recompute = {row['recompute']!r} is not known")


def _schedule(row: Row) -> str:
    text = text_of(row, "schedule")
    known = word_of(text, SCHEDULES)
    if known == "":
        raise Unpriced(f"schedule {row['schedule']!r} is not planned")
    known = known or UNSAID
    return SEVERAL.get(known, known) if (number(row, "vpp") or 1) > 1 else known


def _even_cuts(row: Row, stages: int, blocks: Sequence[str]) -> tuple[str, ...] | None:
    """The layers at which stages start, as many in each. Where the head weighs less than a layer no other cut is faster: fewer
    layers in the last stage are more in another. Where it weighs more, programs cut evenly or by cost (``cuts_of``). Else, and
    where they do not divide, None: searched."""
    if stages > 1 and blocks and cuts_of(row) == "modules":
        parts = ["", *blocks, "", ""]
        few, more = divmod(len(parts), stages)
        starts = itertools.accumulate(few + (stage < more) for stage in range(stages - 1))
        return tuple(parts[start] for start in starts)
    if stages < 2 or not blocks or len(blocks) % stages or (_heavy_head(row) and cuts_of(row) != "even"):
        return None
    return tuple(blocks[len(blocks) // stages :: len(blocks) // stages])


def _heavy_head(row: Row) -> bool:
    """Whether the head weighs more than a layer."""
    shape = shape_of(row)
    layer = shape.hidden * (2 * shape.hidden * (1 + shape.kv_heads / shape.heads) + 2 * shape.ffn)
    return shape.hidden * shape.vocab > layer


# ----------------------------------------------------------------------------------------------------- measured


def tokens_of(row: Row) -> float:
    """Tokens of a step, 1 where the row does not say."""
    return (batch_of(row) or 1.0) * (number(row, "seq_len") or 1.0)


def measured_seconds(row: Row) -> float | None:
    """Seconds of a step, or tokens over throughput."""
    seconds = number(row, "step_time_s") or number(row, "step_time_s_derived")
    speed = (number(row, "tokens_per_s_per_gpu") or 0.0) * world_of(row)
    return seconds or (tokens_of(row) / speed if speed and batch_of(row) else None)


def measured_tflops(row: Row, peak: float) -> float | None:
    """TFLOP/s of a device: as stated, or the MFU (in percent, or a fraction) of ``peak``."""
    stated, mfu = number(row, "measured_tflops_per_gpu"), number(row, "mfu")
    return stated or (mfu / (100.0 if mfu > 1 else 1.0) * peak / 1e12 if mfu else None)


def counted(row: Row) -> float:
    """FLOPs that the row's TFLOP/s count, over model FLOPs: with the forward that full recomputation repeats where the notes
    say so (Narayanan et al. 2021), without it elsewhere."""
    hardware = any(words in text_of(row, "notes") for words in ("incl recompute", "incl. full recompute", "hardware flops"))
    return 4 / 3 if hardware and recompute_of(row) == "full" else 1.0
