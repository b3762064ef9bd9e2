"""Models of transformers, tiny, that nothing here was written for, of vision and those of ``tests.architectures``: one training
loop under every kind of plan, and on one process. Equal, or refused by an error of our own; nothing else.

    python -m tests.vision                 every family, two processes and four; a line each
    python -m tests.vision swinv2 hiera    these
    python -m tests.vision --drop beit     with drop paths and dropout, which no other process draws alike: trained to finite
                                           numbers that all ranks agree on, and from then on equal in eval()

In double precision: batch norms over four samples of one pixel each make of a rounding what no tolerance separates from a
fault. ``test_vision`` runs some of them.
"""

from __future__ import annotations

import copy
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from meshwright.api import autoparallel
from meshwright.errors import MeshwrightError
from tests.architectures import ARCHITECTURES, DROP, Case, Make
from tests.equality import captured_once, differences
from tests.trials import parser_of

BATCH, LABELS = 4, 5
PLANS: Mapping[int, Sequence[Mapping[str, Any]]] = {
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3, "microbatches": 2}, {}],
    4: [{"dp": 2, "tp": 2}],
}


class Distance(nn.Module):
    """A model without a loss, taught by numbers."""

    def __init__(self, model: nn.Module, result: str) -> None:
        super().__init__()
        self.model, self.result = model, result

    def forward(self, wanted: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.model(**inputs)[self.result], wanted)}


def _dropping(config: Mapping[str, Any], drop: bool) -> dict[str, Any]:
    """The options, with the rates at which something is dropped."""
    if not drop:
        return dict(config)

    def rate(old: Any) -> Any:
        return [DROP] * len(old) if isinstance(old, list) else 1 if isinstance(old, int) else DROP

    return {key: rate(value) if "drop" in key else value for key, value in config.items()}


def _classify(family: str, size: int = 32, **config: Any) -> Make:
    def make(drop: bool) -> Case:
        import transformers as hf

        options = getattr(hf, f"{family}Config")(num_labels=LABELS, **_dropping(config, drop))
        model = getattr(hf, f"{family}ForImageClassification")(options)
        return model, {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, LABELS, (BATCH,))}

    return make


def _distance(
    family: str, size: int = 32, head: str = "Model", result: str = "last_hidden_state", **config: Any
) -> Make:
    def make(drop: bool) -> Case:
        import transformers as hf

        model = getattr(hf, family + head)(getattr(hf, f"{family}Config")(**_dropping(config, drop)))
        inputs = {"pixel_values": torch.randn(BATCH, 3, size, size)}
        if "Detr" in family:
            inputs["pixel_mask"] = torch.ones(BATCH, size, size, dtype=torch.int64)
        with torch.no_grad():
            shape = model.eval()(**inputs)[result].shape
        return Distance(model.train(), result), {**inputs, "wanted": torch.randn(shape)}

    return make


def _segment(drop: bool) -> Case:
    import transformers as hf

    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=LABELS, **_dropping(_SEGFORMER, drop)))
    return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, LABELS, (BATCH, 32, 32))}


def _masked(drop: bool) -> Case:
    import transformers as hf

    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
    model = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**_dropping(_VIT, drop), **decoder, decoder_intermediate_size=64))
    return model, {"pixel_values": torch.randn(BATCH, 3, 16, 16), "noise": torch.rand(BATCH, 16)}


def _detr(family: str) -> Make:
    def make(drop: bool) -> Case:
        import transformers as hf

        backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                                   out_features=["stage2"])
        return _distance(
            family, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            backbone_config=backbone, backbone=None, use_timm_backbone=False, use_pretrained_backbone=False,
        )(drop)

    return make


_VIT: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}
_SWIN: Mapping[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
}
_PYRAMID: Mapping[str, Any] = {
    "image_size": 32, "depths": [1] * 4, "hidden_sizes": [16, 16, 16, 32], "num_attention_heads": [1, 2, 2, 2],
    "mlp_ratios": [2] * 4, "drop_path_rate": 0.0,
}
_SEGFORMER: Mapping[str, Any] = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
}
_SEGFORMER_HEAD: Mapping[str, Any] = {**_SEGFORMER, "classifier_dropout_prob": 0.0}
_TWO: Mapping[str, Any] = {"depth": [1, 2], "mlp_ratio": [2.0] * 2, "qkv_bias": [True] * 2, "drop_rate": [0.0] * 2}
_CONVNEXT: Mapping[str, Any] = {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "drop_path_rate": 0.0}
_STAGES: Mapping[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}

FAMILIES: Mapping[str, Make] = {
    "cvt": _classify(
        "Cvt", **_TWO, patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], embed_dim=[16, 32], num_heads=[1, 2],
        cls_token=[False, True], drop_path_rate=[0.0] * 2, attention_drop_rate=[0.0] * 2, kernel_qkv=[3] * 2,
        qkv_projection_method=["dw_bn"] * 2, padding_kv=[1] * 2, stride_kv=[2] * 2, padding_q=[1] * 2, stride_q=[1] * 2,
    ),
    "levit": _classify(
        "Levit", image_size=32, patch_size=16, hidden_sizes=[16, 24, 32], num_attention_heads=[1, 2, 2], depths=[1] * 3,
        key_dim=[8] * 3, drop_path_rate=0, mlp_ratio=[2] * 3, attention_ratio=[2] * 3,
    ),
    "swinv2": _classify("Swinv2", **_SWIN),
    "donut": _distance("DonutSwin", **_SWIN),
    "pvt": _classify("Pvt", **_PYRAMID, patch_sizes=[4, 2, 2, 2], sequence_reduction_ratios=[4, 2, 1, 1]),
    "pvtv2": _classify("PvtV2", **_PYRAMID, sr_ratios=[4, 2, 1, 1]),
    "poolformer": _classify("PoolFormer", hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, drop_path_rate=0.0),
    "segformer": _classify("Segformer", **_SEGFORMER_HEAD),
    "segformer-masks": _segment,
    "mobilevit": _classify(
        "MobileViT", image_size=32, hidden_sizes=[16] * 3, neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
        num_attention_heads=2, hidden_dropout_prob=0.0, classifier_dropout_prob=0.0,
    ),
    "mobilevitv2": _classify(
        "MobileViTV2", 64, image_size=64, base_attn_unit_dims=[16] * 3, n_attn_blocks=[1] * 3, width_multiplier=0.25,
        ffn_dropout=0.0, attn_dropout=0.0, classifier_dropout_prob=0.0,
    ),
    "swiftformer": _classify(
        "SwiftFormer", image_size=32, depths=[1] * 4, embed_dims=[8, 8, 16, 16], drop_path_rate=0.0, drop_mlp_rate=0.0,
        drop_conv_encoder_rate=0.0,
    ),
    "focalnet": _classify(
        "FocalNet", image_size=32, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32], focal_levels=[2, 2],
        focal_windows=[3, 3], drop_path_rate=0.0, hidden_dropout_prob=0.0,
    ),
    "hiera": _classify(
        "Hiera", image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], embed_dim=16,
        depths=[1, 1], num_heads=[1, 2], mlp_ratio=2.0, drop_path_rate=0.0, query_stride=[2, 2], num_query_pool=1,
        masked_unit_size=[4, 4], masked_unit_attention=[True, False],
    ),
    "convnextv2": _classify("ConvNextV2", **_CONVNEXT),
    "regnet": _classify("RegNet", **_STAGES, groups_width=4),
    "resnet": _classify("ResNet", **_STAGES, layer_type="bottleneck"),
    "bit": _classify("Bit", **_STAGES, num_groups=2, drop_path_rate=0.0),
    "vitmae": _masked,
    "dpt": _distance(
        "DPT", 16, "ForSemanticSegmentation", "logits", **{**_VIT, "num_hidden_layers": 4}, is_hybrid=False, num_labels=LABELS,
        neck_hidden_sizes=[8] * 4, fusion_hidden_size=16, backbone_out_indices=[0, 1, 2, 3], reassemble_factors=[4, 2, 1, 0.5],
        semantic_classifier_dropout=0.0, use_auxiliary_head=False,
    ),
    "glpn": _distance("GLPN", 32, "ForDepthEstimation", "predicted_depth", **_SEGFORMER),
    "yolos": _distance("Yolos", 16, **{**_VIT, "image_size": [16, 16]}, num_detection_tokens=4),
    "detr": _detr("Detr"),
    "conditional-detr": _detr("ConditionalDetr"),
    "beit": _classify("Beit", 16, **_VIT, drop_path_rate=0.0, use_relative_position_bias=True),
    "dinov2": _classify(
        "Dinov2WithRegisters", 16, **{k: v for k, v in _VIT.items() if k != "intermediate_size"}, drop_path_rate=0.0
    ),
    "mobilenetv2": _classify("MobileNetV2", image_size=32, depth_multiplier=0.25, classifier_dropout_prob=0.0),
    "efficientnet": _classify(
        "EfficientNet", image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, dropout_rate=0.0,
        drop_connect_rate=0.0),
    **ARCHITECTURES,
}


def make(name: str, drop: bool = False) -> Case:
    """The named case, the same on every call and rank."""
    torch.manual_seed(1)
    model, batch = FAMILIES[name](drop)
    for module in model.modules() if drop else ():
        if getattr(module, "drop_rate", None) == 1:  # LeViT's configuration takes whole numbers only, and of 1 it makes 0 / 0
            module.drop_rate = DROP
    return model.double().train(), {
        key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in batch.items()}


def outcomes(rank: int, name: str, world: int, drop: bool = False) -> list[str]:
    """"equal", "refused: ..." or what is wrong, for each of the world's plans."""
    model, batch = make(name, drop)
    found = []
    with captured_once(f"{name}, dropping" if drop else name, double=True):
        for pins in PLANS[world]:

            def build(pins: Mapping[str, Any] = pins) -> nn.Module:
                return autoparallel(model, init_device_mesh("cpu", (world,)), ((), batch), pins=dict(pins), progress=False)

            try:
                problems = _drawn(model, batch, build) if drop else differences(rank, model, batch, {"": build})
                found.append("; ".join(["WRONG", *problems[:3]]) if problems else "equal")
            except (MeshwrightError, RuntimeError) as error:
                cause = error.__cause__ or error
                if not isinstance(cause, MeshwrightError):
                    found.append(f"RAW: {''.join(traceback.format_exception(cause)[-4:])}")
                    break  # the other ranks may wait in a collective
                found.append(f"refused: {cause}")
    return found


def _drawn(model: nn.Module, batch: Mapping[str, Any], build: Callable[[], Any]) -> list[str]:
    """What is wrong with training that drops things, and with eval() after it."""
    parallel = build()
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    losses = []
    for _ in range(2):
        loss = parallel(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    everybody: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybody, losses)
    problems = [] if all(one == losses for one in everybody) else [f"the ranks have other losses: {everybody}"]
    problems += [] if all(math.isfinite(one) for one in losses) else [f"no numbers: {losses}"]
    problems += [] if losses[0] != losses[1] else ["nothing was learned or drawn"]
    alone, state = copy.deepcopy(model).eval(), parallel.full_state_dict()
    with torch.no_grad():
        loss = parallel.eval()(**batch)["loss"].item()
        if not state:  # it is on rank 0
            return problems
        alone.load_state_dict(state)
        wanted = alone(**batch)["loss"].item()
    return problems + ([] if math.isclose(wanted, loss, rel_tol=1e-6) else [f"eval() gives {loss} instead of {wanted}"])


def main(arguments: Sequence[str]) -> int:
    """Print a line for each family and plan; 1 if one of them is neither equal nor refused."""
    from tests.pool import Pool, WorkerError

    parser = parser_of(__doc__, f"families: {', '.join(FAMILIES)}")
    parser.add_argument("--drop", action="store_true", help="with drop paths and dropout")
    asked = parser.parse_args(arguments)
    if unknown := sorted({*asked.words} - {*FAMILIES}):
        parser.error(f"{unknown[0]!r} is none of the families")
    pool, faults = Pool(), 0
    for name in asked.words or FAMILIES:
        for world, plans in PLANS.items():
            try:
                found = pool.run(world, outcomes, name, world, asked.drop, timeout=600)
            except WorkerError as error:
                found = [[f"RAW: {error}"]]
            for pins, *said in zip(plans, *found, strict=False):
                fault = next((text for text in said if text != "equal" and not text.startswith("refused: ")), None)
                faults += fault is not None
                print(f"{name:16} {pins!s:44} {fault or said[0]}", flush=True)
    pool.close()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
