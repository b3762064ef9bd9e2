"""Every command of the command line over config folders of many kinds of models.

    python benchmarks/commands.py [--only REGEX] [--verify REGEX] [--seconds 240] [--log FILE] [--list]

The folders are written here, from the default configurations of ``transformers`` made small (``tests.families``). For each
the commands ``plan``, ``show``, ``explain``, ``diff``, ``simulate``, ``verify`` and ``size`` run, with and without
``--json``, and each answer is held to what the documents say (docs/cli.md):

    0, or 1 of ``diff``      lines of at most 120 columns, or one JSON value on stdout
    2 and 3                  one line on stderr with a remedy; the JSON value has the same words
    anything else            FAULT: an error inside, several lines, no JSON, or no end within ``--seconds``

``--verify`` says for which models the plan is run too, on CPU processes; of the others ``verify`` checks the programs. The exit
status is 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script: find tests/

WIDTH = 120
KINDS: Mapping[str, str] = {
    # encoders
    "bert": "BertForMaskedLM", "roberta": "RobertaForSequenceClassification", "albert": "AlbertForMaskedLM",
    "distilbert": "DistilBertForQuestionAnswering", "electra": "ElectraForTokenClassification",
    "deberta-v2": "DebertaV2ForSequenceClassification",
    "modernbert": "ModernBertForMaskedLM", "mpnet": "MPNetForMaskedLM",
    # decoders
    "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM", "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM", "gpt_neox": "GPTNeoXForCausalLM", "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM", "mpt": "MptForCausalLM", "cohere": "CohereForCausalLM",
    # an encoder and a decoder
    "t5": "T5ForConditionalGeneration", "bart": "BartForConditionalGeneration", "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    # images
    "vit": "ViTForImageClassification", "swin": "SwinForImageClassification", "convnext": "ConvNextForImageClassification",
    "resnet": "ResNetForImageClassification", "dinov2": "Dinov2ForImageClassification", "beit": "BeitForImageClassification",
    # speech
    "whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2ForSequenceClassification",
    "audio-spectrogram-transformer": "ASTForAudioClassification",
    # several kinds of input
    "clip": "CLIPModel", "llava": "LlavaForConditionalGeneration", "vision-encoder-decoder": "VisionEncoderDecoderModel",
    # mixtures
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "olmoe": "OlmoeForCausalLM",
    # scans
    "mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM", "jamba": "JambaForCausalLM",
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32}, "gptj": {"n_layer": 2},
    "bloom": {"n_layer": 2, "n_head": 4}, "mpt": {"n_layers": 2, "n_heads": 4}, "t5": {"num_layers": 2, "d_kv": 8, "d_ff": 64},
    "distilbert": {"n_layers": 2, "n_heads": 4, "dim": 32, "hidden_dim": 64},
    "resnet": {"depths": [2, 2], "hidden_sizes": [16, 32]},
    "convnext": {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 32, 64]}, "albert": {"embedding_size": 16},
    "swin": {"depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8], "embed_dim": 8, "window_size": 4, "image_size": 128},
    "wav2vec2": {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0,
                 "apply_spec_augment": False},
    "m2m_100": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}, "deberta-v2": {"relative_attention": True},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "whisper": {"decoder_attention_heads": 4, "decoder_layers": 2},
    "mamba": {"state_size": 4, "intermediate_size": 64, "time_step_rank": 4},
}
"""What the names of sizes do not tell."""


def write(kind: str, folder: Path) -> None:
    """A folder with the config of a small model of this kind."""
    from transformers import CONFIG_MAPPING

    from tests.families import MORE as LARGER
    from tests.families import _merged, _shrunk

    of = CONFIG_MAPPING[kind]
    if kind == "vision-encoder-decoder":
        parts = [CONFIG_MAPPING[part](**_shrunk(CONFIG_MAPPING[part](), count(32))) for part in ("vit", "mbart")]
        sizes = of.from_encoder_decoder_configs(*parts).to_dict()
    else:
        sizes = _shrunk(of(), count(32))
    config = of(**_merged(sizes, {**LARGER.get(kind, {}), **MORE.get(kind, {})}))
    config.architectures = [KINDS[kind]]
    config.save_pretrained(folder)


def commands(folder: Path, run: bool) -> Iterator[tuple[str, list[str]]]:
    """(title, words); each may use the files of those before."""
    config, first, second = str(folder / "model"), str(folder / "plan.json"), str(folder / "other.json")
    sizes = ["--batch", "16", "--sequence", "16"]
    yield "plan", ["plan", config, "--cluster", "h100:1x8", *sizes, "--out", first]
    yield "plan --pp 2", ["plan", config, "--cluster", "a100:1x4", *sizes, "--pp", "2", "--out", second]
    if not Path(second).exists():
        yield "plan --dp 4", ["plan", config, "--cluster", "a100:1x4", *sizes, "--dp", "4", "--out", second]
    yield "show", ["show", first]
    yield "show --html", ["show", first, "--html", str(folder / "plan.html")]
    yield "explain", ["explain", first]
    name = named(Path(first))
    yield f"explain {name}", ["explain", first, name]
    yield "diff", ["diff", first, second]
    yield "simulate", ["simulate", second]
    factors = [word for what in ("bandwidth=0.5", "memory=0.5", "batch=2") for word in ("--what-if", what)]
    yield "simulate --what-if", ["simulate", second, *factors]
    yield "verify", ["verify", second, *(["--model", config] if run else ["--programs-only"])]
    mine = str(folder / "mine.toml")
    yield "profile", ["profile", config, *sizes, "--seconds", "2", "--out", mine]
    yield "plan by a profile", ["plan", config, "--cluster", mine, *sizes]
    yield "size", ["size", config, "--device", "h100", "--devices", "2,4", "--tokens", "1e9", *sizes, "--price", "2"]


def named(file: Path) -> str:
    """The module of some weight in the middle of a plan."""
    if not file.exists():
        return "model"
    from meshwright.ir.plan import Plan

    fqns = [param.fqns[0] for param in Plan.load(file).graph.params if not param.buffer]
    return fqns[len(fqns) // 2]


def fault(title: str, words: Sequence[str], code: int, out: str, err: str) -> str:
    """What an answer lacks of what the documents say; empty for nothing."""
    if code not in (0, 2, 3, *([1] if title == "diff" else [])):
        return f"exit code {code}: {err.strip()[-300:]}"
    if "Traceback" in err:
        return f"a trace: {err.strip()[-300:]}"
    if "--json" in words:
        try:
            answer = json.loads(out)
        except ValueError:
            return f"no JSON on stdout: {out[:100]!r}"
        if code > 1 and not {"error", "message"} <= answer.keys():
            return "an error without its words in the JSON"
    elif code < 2 and (wide := max(map(len, out.splitlines()), default=0)) > WIDTH:
        return f"a line of {wide} columns"
    said = [line for line in err.splitlines() if line.startswith("meshwright: ") and not line.endswith(" s")]
    if code > 1 and not (said and said[-1] == err.splitlines()[-1] and (";" in said[-1] or "do: " in said[-1])):
        return f"no line with a remedy: {err.strip()[-300:]!r}"
    return ""


def answered(words: Sequence[str]) -> tuple[int, str, str, float]:
    """(exit code, stdout, stderr, seconds of CPU) of a command, here."""
    from typer.testing import CliRunner

    from meshwright.cli import app

    before = time.process_time()
    found = CliRunner().invoke(app, list(words))
    code = found.exit_code if found.exception is None or isinstance(found.exception, SystemExit) else 4
    err = found.stderr + ("" if code != 4 or found.exception is None else f"\n{found.exception!r}")
    return code, found.stdout, err, time.process_time() - before


def sweep(kind: str, run: bool, told: Any) -> None:
    """Every command for one kind, each told as it is done: title, exit code, seconds, fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(kind, folder / "model")
        for title, words in commands(folder, run):
            if not title.startswith("plan") and not (folder / "plan.json").exists():
                break  # refused, which stands in the line before
            for asked in (words, [*words, "--json"]):
                if "--json" in asked and title in ("plan --pp 2", "plan --dp 4", "size", "explain", "show --html"):
                    continue
                code, out, err, seconds = answered(asked)
                told({"title": title + (" --json" if "--json" in asked else ""), "code": code, "seconds": seconds,
                      "fault": fault(title, asked, code, out, err), "said": err.strip().splitlines()[-1:] if code > 1 else []})


def elsewhere(kind: str, run: bool, limit: float) -> list[dict[str, Any]]:
    """One kind in a process of its own, with a limit on its seconds."""
    words = [sys.executable, __file__, "--here", kind, *(["--verify", "."] if run else [])]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit)
        text, err = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        text, err = (error.stdout or b"").decode(), f"no end within {limit:.0f} s"
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [*found, *([{"title": "after these", "code": -1, "seconds": 0.0, "fault": err.strip()[-400:]}] if err else [])]


def main() -> int:
    """The kinds that are named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".", help="kinds whose names match")
    parser.add_argument("--verify", help="kinds of which the plan is run too")
    parser.add_argument("--seconds", type=float, default=240.0, help="that one kind may take")
    parser.add_argument("--log", type=Path, help="kinds that stand in this file of JSON lines are not run again")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        sweep(options.here, options.verify is not None, lambda row: print(json.dumps(row), flush=True))
        return 0
    kinds = [kind for kind in KINDS if re.search(options.only, kind)]
    if options.list:
        print("\n".join(kinds))
        return 0
    lines = options.log.read_text(encoding="utf-8").splitlines() if options.log and options.log.exists() else []
    known = {row["kind"]: row["rows"] for row in map(json.loads, lines)}
    total: Counter[str] = Counter()
    for kind in kinds:
        run = options.verify is not None and re.search(options.verify, kind) is not None
        rows = known[kind] if kind in known else elsewhere(kind, run, options.seconds)
        if options.log and kind not in known:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "rows": rows}) + "\n")
        faults = [row for row in rows if row["fault"]]
        refused = [row for row in rows if row["code"] in (2, 3) and not row["fault"]]
        total.update(kinds=1, planned=int(bool(rows) and rows[0]["code"] == 0))
        total.update(commands=len(rows), faults=len(faults), refused=len(refused))
        print(f"{kind:30s} {len(rows):2d} commands, {len(refused)} refused, {len(faults)} faults, "
              f"{sum(row['seconds'] for row in rows):6.1f} s, plan {rows[0]['seconds'] if rows else 0:.1f} s", flush=True)
        for row in faults:
            print(f"    FAULT {row['title']}: {row['fault']}", flush=True)
        for row in refused[:2]:
            print(f"    {row['title']}: {' '.join(row['said'])[:300]}", flush=True)
    print(", ".join(f"{name} {number}" for name, number in total.items()))
    return int(total["faults"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
