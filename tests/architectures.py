"""Models of transformers of text, sound, video, series and several of these, tiny: encoders, encoders with decoders,
recurrences, retrieval, contrasts. ``python -m tests.vision NAMES`` tries them as it does vision models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

B, T, V = 4, 8, 40
DROP = 0.3
"""The rate of dropout where it is asked for."""
Case = tuple[nn.Module, dict[str, Any]]
Make = Callable[[bool], Case]
"""Whether things are dropped -> the model and its batch."""
Options = Mapping[str, Any]
_TOKENS: Options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS: Options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_ENCODER: Options = {**_LAYERS, **_TOKENS, "vocab_size": V, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
                     "attention_probs_dropout_prob": 0.0}
_BOTH: Options = {
    **_TOKENS, "vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "decoder_start_token_id": 2, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "forced_eos_token_id": None, "use_cache": False,
}
_T5: Options = {"vocab_size": V, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
                "decoder_start_token_id": 0, "use_cache": False}
_SOUND: Options = {
    **_LAYERS, "vocab_size": V, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
    "apply_spec_augment": False, "classifier_proj_size": 8, "pad_token_id": 0, "num_labels": 2,
}
_VIDEO: Options = {**_LAYERS, "image_size": 8, "patch_size": 4, "num_frames": 4, "tubelet_size": 2, "hidden_dropout_prob": 0.0,
                   "attention_probs_dropout_prob": 0.0, "num_labels": 3}
_WORDS: Options = {**_LAYERS, "vocab_size": V, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": V - 1,
                   "pad_token_id": 0}
_IMAGE: Options = {**_LAYERS, "image_size": 8, "patch_size": 4}
_GPT: Options = {"vocab_size": V, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
                 "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}


class Judged(nn.Module):
    """A model without a loss: the mean squares of what it gives under ``results``, of each another multiple."""

    def __init__(self, model: nn.Module, results: Sequence[str]) -> None:
        super().__init__()
        self.model, self.results = model, results

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of one batch."""
        out = self.model(**inputs)
        found = [getattr(out, name) for name in self.results]
        return {"loss": torch.stack([x.square().mean() * i for i, x in enumerate(found, 1)]).sum() + found[0].mean()}


class Retrieval(nn.Module):
    """Two encoders, contrasted over the whole batch."""

    def __init__(self, options: Options, drop: bool) -> None:
        super().__init__()
        self.asks, self.tells = (_model("DPR", head, options, drop) for head in ("QuestionEncoder", "ContextEncoder"))

    def forward(self, questions: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Ids."""
        scores = self.asks(questions).pooler_output @ self.tells(texts).pooler_output.t()
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores), device=scores.device)), "scores": scores}


def _model(family: str, head: str, options: Options, drop: bool = False) -> nn.Module:
    import transformers as hf

    rates = {key: DROP for key, x in options.items() if drop and x == 0.0 and "drop" in key and "layer" not in key}
    model: nn.Module = getattr(hf, family + head)(getattr(hf, f"{family}Config")(**{**options, **rates}))
    return model


def _of(family: str, head: str, options: Options, batch: Callable[[], dict[str, Any]], judged: Sequence[str] = ()) -> Make:
    def make(drop: bool) -> Case:
        model = _model(family, head, options, drop)
        return Judged(model, judged) if judged else model, batch()

    return make


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, V - 3, shape or (B, T))


def _plain() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids()}


def _text(**more: torch.Tensor) -> dict[str, Any]:
    mask, labels = torch.ones(B, T, dtype=torch.long), _ids()
    mask[1, 5:] = 0
    return {"input_ids": _ids(), "attention_mask": mask, "labels": labels.masked_fill(torch.rand(B, T) < 0.3, -100), **more}


def _unjudged(**more: torch.Tensor) -> dict[str, Any]:
    return {key: x for key, x in _text(**more).items() if key != "labels"}


def _pair(**more: Any) -> dict[str, Any]:
    ids = torch.cat([_ids(B, T - 1), torch.full((B, 1), V - 1)], 1)
    images = torch.randn(B, 3, 8, 8)
    return {"input_ids": ids, "attention_mask": torch.ones(B, T, dtype=torch.long), "pixel_values": images, **more}


def _sound(
    shape: tuple[int, ...], labels: Callable[[], torch.Tensor], name: str = "input_values"
) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(B, *shape), "labels": labels()}


def _filled(family: str, **more: Any) -> Make:
    return _of(family, "ForMaskedLM", {**_ENCODER, **more}, _text)


def _translated(family: str, **more: Any) -> Make:
    return _of(family, "ForConditionalGeneration", {**_BOTH, **more}, _text)


def _heard(family: str, **more: Any) -> Make:
    return _of(family, "ForSequenceClassification", {**_SOUND, **more}, _sound((400,), lambda: _ids(B) % 2))


def _seen(family: str, **more: Any) -> Make:
    return _of(family, "ForVideoClassification", {**_VIDEO, **more}, lambda: {
        "pixel_values": torch.randn(B, 4, 3, 8, 8), "labels": _ids(B) % 3})


def _decided() -> dict[str, Any]:
    return {"states": torch.randn(B, T, 5), "actions": torch.randn(B, T, 3), "rewards": torch.randn(B, T, 1),
            "returns_to_go": torch.randn(B, T, 1), "timesteps": torch.arange(T).repeat(B, 1),
            "attention_mask": torch.ones(B, T)}


ARCHITECTURES: Mapping[str, Make] = {
    "albert": _filled("Albert", embedding_size=8), "electra": _filled("Electra", embedding_size=8),
    "fnet": _of("FNet", "ForMaskedLM", _ENCODER, _plain), "big-bird": _filled("BigBird", attention_type="original_full"),
    "rembert": _filled("RemBert", input_embedding_size=8, output_embedding_size=12),
    "mobilebert": _filled("MobileBert", embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8),
    "squeezebert": _filled("SqueezeBert", embedding_size=16, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1,
                           intermediate_groups=1, output_groups=1),
    "roformer": _filled("RoFormer", embedding_size=8),
    "funnel": _of("Funnel", "ForSequenceClassification", {
        "vocab_size": V, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}, lambda: {
        "input_ids": _ids(), "labels": _ids(B) % 2}),
    "convbert": _filled("ConvBert", embedding_size=8, head_ratio=1, conv_kernel_size=3),
    "deberta": _filled("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False),
    "xlnet": _of("XLNet", "LMHeadModel", {"vocab_size": V, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32,
                                          "dropout": 0.0, "summary_last_dropout": 0.0}, _plain),
    "ctrl": _of("CTRL", "LMHeadModel", {key: x for key, x in _GPT.items() if key != "attn_pdrop"} | {"dff": 32}, _plain),
    "codegen": _of("CodeGen", "ForCausalLM", {**_GPT, "rotary_dim": 4}, _text),
    "biogpt": _of("BioGpt", "ForCausalLM", {**_ENCODER, "use_cache": False, "activation_dropout": 0.0, "layerdrop": 0.0},
                  _text),
    "esm": _filled("Esm", position_embedding_type="rotary", mask_token_id=5, token_dropout=True),
    "luke": _of("Luke", "ForMaskedLM", {**_ENCODER, "entity_vocab_size": V, "entity_emb_size": 8}, lambda: _text(
        entity_ids=_ids(B, 2), entity_attention_mask=torch.ones(B, 2, dtype=torch.long),
        entity_position_ids=torch.arange(6).view(1, 2, 3).repeat(B, 1, 1))),
    "layoutlm": _of("LayoutLM", "ForMaskedLM", {**_ENCODER, "max_2d_position_embeddings": 64}, lambda: _text(
        bbox=torch.tensor([1, 2, 10, 20]).repeat(B, T, 1))),
    "pegasus": _translated("Pegasus"), "m2m": _translated("M2M100"), "blenderbot": _translated("Blenderbot"),
    "longt5": _of("LongT5", "ForConditionalGeneration", {**_T5, "d_model": 16, "local_radius": 2, "global_block_size": 2,
                                                         "encoder_attention_type": "local"}, _text),
    "longformer": _filled("Longformer", attention_window=[4, 4]),
    "led": _of("LED", "ForConditionalGeneration", {
        **{key: x for key, x in _BOTH.items() if key != "max_position_embeddings"}, "attention_window": [4, 4],
        "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}, _text),
    "falcon-mamba": _of("FalconMamba", "ForCausalLM", {"vocab_size": V, "hidden_size": 16, "state_size": 4, "use_cache": False,
                                                       "num_hidden_layers": 2, "intermediate_size": 32, "time_step_rank": 4},
                        _plain),
    "rwkv": _of("Rwkv", "ForCausalLM", {"vocab_size": V, "context_length": 32, "hidden_size": 16, "num_hidden_layers": 2,
                                        "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}, _plain),
    "recurrent-gemma": _of("RecurrentGemma", "ForCausalLM", {
        **_LAYERS, "vocab_size": V, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4,
        "num_key_value_heads": 1, "use_cache": False}, _plain),
    "xlstm": _of("xLSTM", "ForCausalLM", {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2,
                                          "chunk_size": 4, "use_cache": False}, _plain),
    "hubert": _heard("Hubert"), "wavlm": _heard("WavLM"), "sew": _heard("SEW", squeeze_factor=2),
    "ast": _of("AST", "ForAudioClassification", {
        **_LAYERS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "patch_size": 4, "frequency_stride": 4,
        "time_stride": 4, "max_length": 16, "num_mel_bins": 8, "num_labels": 3}, _sound((16, 8), lambda: _ids(B) % 3)),
    "speech-to-text": _of("Speech2Text", "ForConditionalGeneration", {
        **_BOTH, "conv_channels": 8, "input_feat_per_channel": 8, "num_conv_layers": 2, "conv_kernel_sizes": [3, 3],
        "max_source_positions": 64, "max_target_positions": 32}, _sound((16, 8), _ids, "input_features")),
    "moonshine": _of("Moonshine", "ForConditionalGeneration", {
        "vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32, "attention_dropout": 0.0,
        "use_cache": False, "pad_token_id": 0, **{f"{part}_num_{what}": 2 for part in ("encoder", "decoder") for what in (
            "hidden_layers", "attention_heads", "key_value_heads")}}, _sound((2000,), _ids)),
    "videomae": _seen("VideoMAE"), "vivit": _seen("Vivit", tubelet_size=[2, 4, 4]), "timesformer": _seen("Timesformer"),
    "swin2sr": _of("Swin2SR", "ForImageSuperResolution", {
        "image_size": 8, "patch_size": 1, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "upscale": 2,
        "mlp_ratio": 2.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
    }, lambda: {"pixel_values": torch.randn(B, 3, 8, 8)}, ["reconstruction"]),
    "sam": _of("Sam", "Model", {
        "vision_config": {**_IMAGE, "image_size": 16, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1],
                          "mlp_dim": 32, "num_pos_feats": 4},
        "prompt_encoder_config": {"hidden_size": 8, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
        "mask_decoder_config": {"hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                "iou_head_hidden_dim": 8},
    }, lambda: {"pixel_values": torch.randn(B, 3, 16, 16), "input_points": torch.rand(B, 1, 2, 2) * 16,
                "input_labels": torch.ones(B, 1, 2, dtype=torch.long)}, ["pred_masks", "iou_scores"]),
    "clip": _of("CLIP", "Model", {"text_config": {**_WORDS}, "vision_config": {**_IMAGE}, "projection_dim": 8},
                lambda: _pair(return_loss=True)),
    "siglip": _of("Siglip", "Model", {"text_config": {**_WORDS, "projection_size": 16}, "vision_config": {**_IMAGE}},
                  lambda: _pair(return_loss=True)),
    "blip": _of("Blip", "ForConditionalGeneration", {
        "text_config": {**_ENCODER, "encoder_hidden_size": 16, "is_decoder": True, "use_cache": False, "label_smoothing": 0.1},
        "vision_config": {**_IMAGE}, "image_text_hidden_size": 8}, lambda: _pair(labels=_ids())),
    "git": _of("Git", "ForCausalLM", {**_ENCODER, "use_cache": False, "vision_config": {**_IMAGE}},
               lambda: _pair(labels=_ids())),
    "flava": _of("Flava", "Model", {
        "text_config": {**_ENCODER}, "image_config": {**_IMAGE}, "multimodal_config": {**_LAYERS, "num_hidden_layers": 1},
        "hidden_size": 16, "projection_dim": 8}, lambda: _unjudged(pixel_values=torch.randn(B, 3, 8, 8)),
        ["text_embeddings", "image_embeddings", "multimodal_embeddings"]),
    "pix2struct": _of("Pix2Struct", "ForConditionalGeneration", {
        "text_config": {**_T5, "hidden_size": 16}, "vision_config": {
            "hidden_size": 16, "patch_embed_hidden_size": 12, "d_ff": 32, "d_kv": 8, "num_hidden_layers": 2, "seq_len": 8,
            "num_attention_heads": 2, "dropout_rate": 0.0, "attention_dropout": 0.0}}, lambda: {
        "flattened_patches": torch.cat([torch.ones(B, 6, 2), torch.randn(B, 6, 12)], -1), "attention_mask": torch.ones(B, 6),
        "labels": _ids()}),
    "dpr": lambda drop: (Retrieval({**_ENCODER, "projection_dim": 8}, drop), {"questions": _ids(), "texts": _ids()}),
    "visual-bert": _of("VisualBert", "ForPreTraining", {**_ENCODER, "visual_embedding_dim": 6}, lambda: _text(
        visual_embeds=torch.randn(B, 3, 6), visual_attention_mask=torch.ones(B, 3), labels=_ids(B, T + 3),
        visual_token_type_ids=torch.ones(B, 3, dtype=torch.long))),
    "lxmert": _of("Lxmert", "Model", {
        **_ENCODER, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 6, "visual_pos_dim": 4},
        lambda: _unjudged(visual_feats=torch.randn(B, 3, 6), visual_pos=torch.rand(B, 3, 4)),
        ["language_output", "vision_output", "pooled_output"]),
    "patchtst": _of("PatchTST", "ForPrediction", {
        "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2,
        "d_model": 16, "num_attention_heads": 2, "ffn_dim": 32, "attention_dropout": 0.0, "ff_dropout": 0.0,
        "head_dropout": 0.0, "prediction_length": 4, "loss": "mse", "scaling": "std"}, lambda: {
        "past_values": torch.randn(B, 16, 2), "future_values": torch.randn(B, 4, 2)}),
    "patchtsmixer": _of("PatchTSMixer", "ForPrediction", {
        "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2, "d_model": 8, "num_layers": 2,
        "dropout": 0.0, "head_dropout": 0.0, "prediction_length": 4, "loss": "mse", "mode": "mix_channel", "gated_attn": True},
        lambda: {"past_values": torch.randn(B, 16, 2), "future_values": torch.randn(B, 4, 2)}),
    "decision": _of("DecisionTransformer", "Model", {
        "state_dim": 5, "act_dim": 3, "hidden_size": 16, "max_ep_len": 32, "n_layer": 2, "n_head": 2, "n_inner": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, _decided, ["action_preds"]),
}
"""{name: how to make it, with its batch}."""
