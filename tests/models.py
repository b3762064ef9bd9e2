"""The models that equality is tested on: real architectures, tiny, random. Each function returns (model, kwargs at batch B)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, VOCAB = 4, 8, 64
Case = tuple[nn.Module, dict[str, torch.Tensor]]


def _tokens(batch: int = BATCH, length: int = LENGTH, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(1, vocab, (batch, length))


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=32, use_cache=False,
    )
    ids = _tokens()
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=16, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )
    ids = _tokens()
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=VOCAB,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    ids = _tokens()
    labels = torch.where(torch.rand(ids.shape) < 0.4, ids, -100)
    labels[0] = ids[0]
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, relative_attention_num_buckets=8,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(length=6)}


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
    )
    images, labels = torch.randn(BATCH, 3, 16, 16), torch.randint(0, 5, (BATCH,))
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(images)
        x = x + self.body(x)
        logits = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def convnet() -> Case:
    return _ConvNet(), {"images": torch.randn(BATCH, 3, 8, 8), "labels": torch.randint(0, 5, (BATCH,))}


class _MaskedMean(nn.Module):
    """A regression whose loss is the mean over the unmasked positions only; a residual reads one tensor twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.spare = nn.Linear(width, width)  # never called: its parameters take no gradient

    def forward(self, x: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        h = F.gelu(self.inside(x))
        y = self.out(h * h) + x
        error = ((y - target) ** 2).mean(-1) * mask
        return {"loss": error.sum() / mask.sum(), "prediction": y}


def masked_mean() -> Case:
    mask = (torch.rand(BATCH, LENGTH) < 0.5).float()
    mask[0] = 1.0
    return _MaskedMean(), {"x": torch.randn(BATCH, LENGTH, 16), "target": torch.randn(BATCH, LENGTH, 16), "mask": mask}


def odd() -> Case:
    """Nothing divides: 3 heads of 5, ffn 21, vocabulary 37, length 7."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=30, head_dim=10, intermediate_size=21, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=37, max_position_embeddings=32, use_cache=False,
    )
    ids = _tokens(length=7, vocab=37)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


class _Encoder(nn.Module):
    """Torch's own encoder under a causal mask, whose contents torch asks for; it reads what a complex attribute turned."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = torch.polar(torch.ones(LENGTH, 16), torch.outer(torch.arange(LENGTH), 0.1 ** torch.arange(16.0)))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 7)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        turned = torch.view_as_complex(x.float().unflatten(-1, (16, 2))) * self.turns
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        logits = self.head(self.encoder(torch.view_as_real(turned).flatten(2).to(x.dtype), mask))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def encoder() -> Case:
    return _Encoder(), {"x": torch.randn(BATCH, LENGTH, 32), "labels": torch.randint(0, 7, (BATCH, LENGTH))}


class _Heads(nn.Module):
    """Attention that returns its weights (its products are ``bmm`` over batch and heads in one), a fused gate, two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.attention = nn.Linear(16, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.gate, self.out = nn.Linear(32, 64), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, target: torch.Tensor, padding: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.inside(x)
        attended, weights = self.attention(h, h, h, key_padding_mask=padding)
        y = self.out(F.glu(self.gate(h + attended)))
        return {"loss": F.mse_loss(y, target) + F.smooth_l1_loss(weights[:, :, 0], target[:, :, 0]), "weights": weights}


def heads() -> Case:
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 5:] = True
    return _Heads(), {"x": torch.randn(BATCH, LENGTH, 16), "target": torch.randn(BATCH, LENGTH, 16), "padding": padding}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(F.gelu(self.inside(x)))


class _Bare(nn.Module):
    """Layers between operators that train nothing: a pipeline may put those on a rank of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(x) + 1.0
        for layer in self.layers:
            y = layer(y)
        return {"loss": F.mse_loss(F.softmax(y, -1), target), "prediction": y}


def bare() -> Case:
    return _Bare(), {"x": torch.randn(BATCH, LENGTH, 16), "target": torch.randn(BATCH, LENGTH, 16)}


MODELS: dict[str, Callable[[], Case]] = {
    f.__name__: f for f in (llama, gpt2, bert, t5, vit, convnet, masked_mean, odd, encoder, heads, bare)
}


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB, "use_cache": False}
_GROUPED = {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2}
_OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2": _GROUPED,  # biases on q, k, v
    "Mistral": {**_GROUPED, "sliding_window": 4},
    "Gemma2": {**_GROUPED, "head_dim": 8, "sliding_window": 4},  # tied, soft caps, two norms a half
    "OPT": {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "dropout": 0.0},
    "Falcon": {**_SMALL, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "Bloom": {**_SMALL, "hidden_dropout": 0.0, "attention_dropout": 0.0},  # ALiBi, fused qkv by head
}


def resnet() -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 5, (BATCH,))
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": labels}


def deberta() -> Case:
    """Attention whose positions are a parameter, projected and copied for every sample; batch and heads in one dim."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=VOCAB,
        max_position_embeddings=16, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    ids = _tokens()
    return DebertaV2ForMaskedLM(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _tokens()}


class _Towers(nn.Module):
    """Every sample against every other and against a queue of earlier ones, which the forward updates; one place of each, and
    bags of words (an operator without a rule, with results that nobody reads)."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.bag = nn.EmbeddingBag(12, 16)
        self.register_buffer("queue", torch.randn(6, 8))

    def forward(self, x: torch.Tensor, words: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = torch.arange(x.shape[0])
        a, b = F.normalize(self.left(x[samples, at]), dim=-1), F.normalize(self.right(self.bag(words)), dim=-1)
        scores = torch.cat([a @ b.t(), a @ self.queue.clone().t()], 1) / 0.5
        with torch.no_grad():
            self.queue.copy_(torch.cat([b, self.queue[: -len(b)].clone()]))
        return {"loss": F.cross_entropy(scores, samples), "scores": scores}


def towers() -> Case:
    return _Towers(), {
        "x": torch.randn(BATCH, LENGTH, 16), "words": torch.randint(0, 12, (BATCH, 3)),
        "at": torch.randint(0, LENGTH, (BATCH,)),
    }


class _Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.base(x) + self.up(self.down(x)))


class _Student(nn.Module):
    """A frozen model with trained adapters beside its last projections, taught by a frozen one without a graph."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, input_ids: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.student(input_ids).logits
        with torch.no_grad():
            wanted = self.teacher(input_ids).logits
        lost = F.kl_div(F.log_softmax(logits, -1), F.softmax(wanted, -1), reduction="none").sum(-1)
        return {"loss": (lost * weights).sum() / weights.sum()}


def adapted() -> Case:
    (student, batch), (teacher, _) = llama(), llama()
    for parameter in (*student.parameters(), *teacher.parameters()):
        parameter.requires_grad_(False)
    for name, module in list(student.named_modules()):
        for child, linear in list(module.named_children()):
            if child in ("q_proj", "down_proj"):
                assert isinstance(linear, nn.Linear), name
                setattr(module, child, _Adapter(linear))
    weights = (torch.rand(batch["input_ids"].shape) > 0.3).float()
    return _Student(student, teacher), {"input_ids": batch["input_ids"], "weights": weights}


class _Skips(nn.Module):
    """No two layers alike: down and up again past a skip, then one block called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.join = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.Conv2d(16, 8, 1)
        self.again, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        skipped = F.silu(self.into(x))
        y = self.join(torch.cat([self.up(F.silu(self.down(skipped))), skipped], 1))
        for _ in range(3):
            y = y + F.silu(self.again(y))
        return {"loss": F.mse_loss(self.out(y), wanted)}


def skips() -> Case:
    return _Skips(), {"x": torch.randn(BATCH, 3, 8, 8), "wanted": torch.randn(BATCH, 4, 8, 8)}


class _OddHead(nn.Module):
    """Convolutions whose channels no number of ranks divides, with a bias; a parameter with a row for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.each = nn.Parameter(torch.randn(BATCH, 8, 1, 1))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(torch.relu(self.stem(x)) * self.each)
        return {"loss": F.cross_entropy(y, wanted), "y": y}


def odd_head() -> Case:
    return _OddHead(), {"x": torch.randn(BATCH, 3, 8, 8), "wanted": torch.randint(0, 5, (BATCH, 8, 8))}


def tied_odd() -> Case:
    """A tied weight of odd length: the head reads uneven pieces of what lies otherwise at rest."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=257, use_cache=False, bos_token_id=0,
                        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.randint(0, 257, (16, 16))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def umt5() -> Case:
    """A T5 whose every layer has a table of relative positions of its own."""
    from transformers import UMT5Config, UMT5ForConditionalGeneration

    config = UMT5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0, relative_attention_num_buckets=8,
    )
    return UMT5ForConditionalGeneration(config), {"input_ids": _tokens(), "labels": _tokens(length=6)}


_OTHER_MODELS: dict[str, Callable[[], Case]] = {
    f.__name__: f for f in (resnet, deberta, towers, adapted, skips, odd_head, tied_odd, umt5)
}
OTHERS = (*_OTHER_CONFIGS, *_OTHER_MODELS)


def _other(name: str) -> Case:
    import transformers

    if name in _OTHER_MODELS:
        return _OTHER_MODELS[name]()
    ids = _tokens()
    config = getattr(transformers, f"{name}Config")(**_OTHER_CONFIGS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config), {"input_ids": ids, "labels": ids.clone()}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The named case, the same on every call and rank."""
    torch.manual_seed(1)
    return MODELS[name]() if name in MODELS else _other(name)
