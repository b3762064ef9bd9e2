"""More models of ``tests.strangers``: torch's own modules, functions and losses that no other model here uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Parts = Callable[[], Mapping[str, Any]]
Body = Callable[[Any, Tensor], Tensor]
Case = tuple[Parts, Body, Callable[..., Tensor] | None]
D, T, B = 8, 4, 8
IMAGE, CUBE, ROW = (2, 4, 4), (2, 4, 2, 2), (T, D)
"""The shapes of a sample that one module or another wants."""


def fitted(r: Tensor, x: Tensor) -> Tensor:
    """As many numbers a sample as ``x`` has: of more the sum."""
    flat = r.reshape(B, -1)
    return x + F.pad(flat, (0, -flat.shape[1] % (T * D))).view(B, -1, T, D).sum(1)


def module(shape: Sequence[int], make: Callable[[], list[nn.Module]]) -> Case:
    """Modules one after the other, of samples of that shape."""
    def body(m: Any, x: Tensor) -> Tensor:
        r = x.reshape(B, *shape)
        for one in m.more:
            r = one(r)
        return fitted(r, x)

    return lambda: {"more": nn.ModuleList(make())}, body, None


def function(shape: Sequence[int], of: Callable[[Tensor], Any]) -> Case:
    """A function of samples of that shape; of several results the first."""
    def body(m: Any, x: Tensor) -> Tensor:
        r = of(x.reshape(B, *shape))
        return fitted(r if isinstance(r, Tensor) else r[0], x)

    return dict, body, None


def loss(of: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """A loss of what the model gives and of the targets, both [B * T, 3]."""
    return dict, lambda m, x: x, lambda m, y, t, h: of(y.flatten(0, 1), t.flatten(0, 1)) + 0.1 * h.square().mean()


def unpooled(m: Any, x: Tensor) -> Tensor:
    pooled, where = F.max_pool2d(x.reshape(B, *IMAGE), 2, return_indices=True)
    return fitted(F.max_unpool2d(pooled * 2, where, 2), x)


def masked(m: Any, x: Tensor) -> Tensor:
    """Positions of one kind get the rows of a table, in their order."""
    mask = (torch.arange(B * T) % 3 == 0).view(B, T, 1).expand_as(x)
    return x.masked_scatter(mask, m.table)


def masked_by_data(m: Any, x: Tensor) -> Tensor:
    return x.masked_scatter(x > 0.1, m.table)


def mapped_both(m: Any, x: Tensor) -> Tensor:
    """Every head by its own weight, by another dim of each."""
    return x + torch.vmap(torch.mm, in_dims=(1, 0), out_dims=1)(x, m.heads).tanh()


def mapped_in_pairs(m: Any, x: Tensor) -> Tensor:
    rows = x.mean(1)
    near = torch.vmap(torch.vmap(lambda a, b: (a * b).sum().tanh(), (None, 0)), (0, None))(rows, rows)
    return x + (near @ rows).unsqueeze(1)


def per_module(m: Any, x: Tensor) -> Tensor:
    """An ensemble whose weights are stacked in the forward."""
    weights, biases = torch.stack([one.weight for one in m.members]), torch.stack([one.bias for one in m.members])
    return x + torch.vmap(F.linear, in_dims=(None, 0, 0))(x, weights, biases).mean(0)


def ranges(m: Any, x: Tensor) -> Tensor:
    to = torch.tensor([0, 2, 1, 0, 2, 1, 0, 2])
    return x + torch.zeros(3, T, D, dtype=x.dtype).index_reduce(0, to, x, "mean", include_self=False)[to]


@torch.library.custom_op("meshwright_tests::flat", mutates_args=())
def flat(x: Tensor) -> Tensor:
    """Twice the elements in the order of memory, as kernels read them that take their operands for contiguous."""
    return x.as_strided((x.numel(),), (1,)).view(x.shape) * 2


flat.register_fake(torch.empty_like)
flat.register_autograd(lambda ctx, grad: flat(grad))


class Flat(torch.autograd.Function):
    """The same in a function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return flat(x.transpose(1, 2).contiguous())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return flat(grad.transpose(1, 2).contiguous())  # type: ignore[no-any-return]


def complex_pairs(m: Any, x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.transpose(1, 2).contiguous().view(B, D, 2, 2)) * 1j
    return fitted(torch.view_as_real(turned), x)


def triangular(m: Any, x: Tensor) -> Tensor:
    square = m.square.tril() + 3 * torch.eye(D, dtype=x.dtype)
    return x + torch.linalg.solve_triangular(square, x.flatten(0, 1).t(), upper=False).t().view_as(x)


MODULES: Mapping[str, Case] = {
    "local response": module(IMAGE, lambda: [nn.LocalResponseNorm(2)]),
    "map norm": module(IMAGE, lambda: [nn.CrossMapLRN2d(3)]),
    "masked scatter": (lambda: {"table": nn.Parameter(torch.randn(B * T, D))}, masked, None),
    "masked scatter by data": (lambda: {"table": nn.Parameter(torch.randn(B * T, D))}, masked_by_data, None),
    "vmap of heads": (lambda: {"heads": nn.Parameter(torch.randn(T, D, D) * 0.3)}, mapped_both, None),
    "vmap in pairs": (dict, mapped_in_pairs, None),
    "vmap of members": (lambda: {"members": nn.ModuleList(nn.Linear(D, D) for _ in range(3))}, per_module, None),
    "index reduce": (dict, ranges, None), "triangular": (lambda: {"square": nn.Parameter(torch.randn(D, D))}, triangular, None),
    "unpooled": (dict, unpooled, None),
    "adaptive 1d": module(ROW, lambda: [nn.AdaptiveAvgPool1d(3)]),
    "adaptive max 1d": module(ROW, lambda: [nn.AdaptiveMaxPool1d(3)]),
    "adaptive max 2d": module(IMAGE, lambda: [nn.AdaptiveMaxPool2d(3)]),
    "adaptive 3d": module(CUBE, lambda: [nn.AdaptiveAvgPool3d((3, 1, 2))]),
    "adaptive max 3d": module(CUBE, lambda: [nn.AdaptiveMaxPool3d((3, 1, 2))]),
    "average 2d": module(IMAGE, lambda: [nn.AvgPool2d(3, 1, 1, count_include_pad=False)]),
    "average 3d": module(CUBE, lambda: [nn.AvgPool3d(2)]),
    "largest 1d": module(ROW, lambda: [nn.MaxPool1d(3, 2, 1)]), "largest 3d": module(CUBE, lambda: [nn.MaxPool3d(2, 1)]),
    "powers 1d": module(ROW, lambda: [nn.Softplus(), nn.LPPool1d(2, 2)]),
    "powers 2d": module(IMAGE, lambda: [nn.Softplus(), nn.LPPool2d(3, 2)]),
    "fractional": module(IMAGE, lambda: [nn.FractionalMaxPool2d(2, output_size=3, _random_samples=torch.full((B, 2, 2),
        0.4).double())]),
    "volumes": module(CUBE, lambda: [nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.ConvTranspose3d(4, 2, 2)]),
    "turned images": module(IMAGE, lambda: [nn.ConvTranspose2d(2, 3, 3, 2, 1, output_padding=1), nn.InstanceNorm2d(3,
        affine=True)]),
    "instances 3d": module(CUBE, lambda: [nn.InstanceNorm3d(2, affine=True, track_running_stats=True)]),
    "circular": module(IMAGE, lambda: [nn.CircularPad2d(1), nn.ConstantPad2d((0, 1, 0, 1), 0.5), nn.Conv2d(2, 2, 3)]),
    "reflected": module(CUBE, lambda: [nn.ReflectionPad3d(1), nn.ReplicationPad3d(1), nn.AvgPool3d(3)]),
    "repeated": module(ROW, lambda: [nn.ReplicationPad1d(2), nn.ReflectionPad1d(1), nn.ZeroPad1d(1)]),
    "shuffled": module((8, 2, 2), lambda: [nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Softmax2d()]),
    "folds": module(IMAGE, lambda: [nn.Unfold(2, padding=1, stride=2), nn.Tanh(), nn.Fold((4, 4), 2, padding=1, stride=2)]),
    "larger": module(IMAGE, lambda: [nn.Upsample(scale_factor=1.5, mode="bicubic"), nn.UpsamplingBilinear2d(4)]),
    "larger 1d": module(ROW, lambda: [nn.Upsample(12, mode="linear", align_corners=True), nn.Upsample(scale_factor=2)]),
    "flattened": module(ROW, lambda: [nn.Flatten(), nn.Linear(T * D, T * D), nn.Unflatten(1, (D, T)), nn.Softmin(1)]),
    "shrunk": module(ROW, lambda: [nn.Softshrink(0.1), nn.Hardshrink(0.05), nn.Tanhshrink(), nn.Softsign(), nn.LogSigmoid()]),
    "hard": module(ROW, lambda: [nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(), nn.ReLU6(), nn.Threshold(0.1, 0.2)]),
    "smooth": module(ROW, lambda: [nn.Mish(), nn.CELU(), nn.SELU(), nn.ELU(), nn.GLU(-1)]),
    "certain slopes": module(ROW, lambda: [nn.RReLU(0.2, 0.2), nn.AlphaDropout(0.0), nn.FeatureAlphaDropout(0.0),
        nn.Dropout1d(0.0)]),
    "lazy images": module(IMAGE, lambda: [nn.LazyConv2d(3, 3, padding=1), nn.LazyBatchNorm2d(), nn.LazyConvTranspose2d(2, 1)]),
    "recurrent cells": (lambda: {"cell": nn.RNNCell(D, D)}, lambda m, x: x + m.cell(x[:, 0], m.cell(x[:, 1])).unsqueeze(1),
        None),
    "angles": function(ROW, lambda x: torch.atan2(x, x.flip(-1) + 2) + torch.asinh(x) + torch.atan(x) + torch.sinh(x)),
    "special": function(ROW, lambda x: torch.erf(x) + torch.erfc(x) + torch.digamma(x.exp() + 1) + torch.expm1(x)
                        + torch.special.i0e(x) + torch.special.entr(x.exp()) + torch.mvlgamma(x.exp() + 3, 2)),
    "logarithms": function(ROW, lambda x: torch.logaddexp2(x, x.flip(0)) + torch.log2(x.exp()) + torch.xlogy(x, x.exp())
                           + torch.logit(x.sigmoid(), 1e-3) + x.exp().log10().exp2()),
    "rounded numbers": function(ROW, lambda x: x.frac() + x.trunc() + x.ceil() * x + torch.fmod(x, 0.3) + x.sgn() * x.fix()),
    "extreme numbers": function(ROW, lambda x: torch.fmax(x, x.flip(0)) + torch.fmin(x, x.flip(1)) + x.clamp(-0.5).msort()),
    "mantissas": function(ROW, lambda x: torch.frexp(x)[0] + torch.ldexp(x, torch.tensor(2))),
    "powers of a matrix": function((4, 8), lambda x: torch.linalg.matrix_power(x @ x.transpose(1, 2) / 8, 3)),
    "products": function(ROW, lambda x: torch.addbmm(x[0], x.transpose(1, 2)[:, :4, :4], x) + torch.outer(x[0, :, 0], x[0, 0])),
    "diagonals": function(ROW, lambda x: x.diagonal_scatter(x[:, :, 0], 0, 1, 2) + torch.block_diag(*x)[:B, None, :D] * 0.1),
    "stacked up": function(ROW, lambda x: torch.column_stack([torch.vstack([x[:4], x[4:]]), torch.dstack([x, x])[..., :8]])),
    "split up": function(ROW, lambda x: torch.cat([a * (i + 1) for i, a in enumerate(x.tensor_split(3, 2))], 2)),
    "split samples": function(ROW, lambda x: torch.cat([a * (i + 1) for i, a in enumerate(x.tensor_split((3, 4)))])),
    "integrals": function(ROW, lambda x: torch.cumulative_trapezoid(x, dim=1).sum(1) + torch.trapezoid(x, dim=1)),
    "pairs apart": function(ROW, lambda x: F.pdist(x.flatten(1)).sum() * x),
    "pairs of rows": function(ROW, lambda x: F.pdist(x[:, 0]).sum() * x),
    "in memory": function(ROW, lambda x: flat(x.transpose(1, 2).contiguous())),
    "a part in memory": function(ROW, lambda x: flat(x[:, 0].contiguous())),
    "short numbers": (dict, lambda m, x: x * (x * 4).to(torch.int16).roll(1, 1) * 0.1, None),
    "repeats": (dict, lambda m, x: x + x[:, 1:].repeat_interleave(torch.tensor([1, 1, 2]), 1), None),
    "in memory by itself": function(ROW, Flat.apply), "turned pairs": (dict, complex_pairs, None),
    "low rank": function(ROW, lambda x: torch.linalg.pinv(x @ x.transpose(1, 2) + torch.eye(T, dtype=x.dtype))),
    "selected": function(ROW, lambda x: x.masked_select((torch.arange(D) < 3).expand_as(x)).view(B, T, 3)),
    "selected by data": function(ROW, lambda x: x.masked_select(x > 0).sum() * x),
    "distinct": function(ROW, lambda x: x * torch.unique_consecutive((x > 0).long()).shape[0]),
    "bits": function(ROW, lambda x: x * (((x * 8).long() & 3) ^ 1).bitwise_left_shift(1).to(x.dtype)),
    "broken up": function(ROW, lambda x: x.unsafe_chunk(2, 1)[0] * x.unsafe_split(2, 1)[1]),
    "summed to size": function(ROW, lambda x: x.sum_to_size(1, T, D) * x),
    "reinforced": function(ROW, lambda x: x.narrow_copy(1, 1, 2)),
    "binary": loss(lambda y, t: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double())(y, t.sigmoid())),
    "probabilities": loss(lambda y, t: nn.BCELoss(weight=t[:, :1].sigmoid())(y.sigmoid(), t.sigmoid())),
    "cosines": loss(lambda y, t: nn.CosineEmbeddingLoss(0.1)(y, t, t[:, 0].sign())),
    "gaussian": loss(lambda y, t: nn.GaussianNLLLoss(full=True)(y, t, y.square() + 0.1)),
    "hinges": loss(lambda y, t: nn.HingeEmbeddingLoss()(y, t.sign())),
    "huber": loss(lambda y, t: nn.HuberLoss(delta=0.3)(y, t)),
    "divergences": loss(lambda y, t: nn.KLDivLoss(reduction="batchmean")(y.log_softmax(-1), t.softmax(-1))),
    "margins": loss(lambda y, t: nn.MarginRankingLoss(0.2)(y[:, 0], y[:, 1], t[:, 0].sign())),
    "many labels": loss(lambda y, t: nn.MultiLabelMarginLoss()(y, torch.tensor([1, -1, 0]).expand(B * T, 3).contiguous())),
    "soft labels": loss(lambda y, t: nn.MultiLabelSoftMarginLoss()(y, (t > 0).to(y.dtype))),
    "many margins": loss(lambda y, t: nn.MultiMarginLoss(p=2, margin=0.7)(y, t.argmax(-1))),
    "negative": loss(lambda y, t: nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())(y.log_softmax(-1), t.argmax(-1))),
    "counts": loss(lambda y, t: nn.PoissonNLLLoss(full=True)(y, t.exp())),
    "smooth ones": loss(lambda y, t: nn.SmoothL1Loss(beta=0.5)(y, t) + nn.L1Loss(reduction="sum")(y, t) / 100),
    "soft margins": loss(lambda y, t: nn.SoftMarginLoss()(y, t.sign())),
    "triplets alone": loss(lambda y, t: nn.TripletMarginLoss(swap=True)(y, t, y.flip(0))),
    "triplets by cosine": loss(lambda y, t: nn.TripletMarginWithDistanceLoss(
        distance_function=lambda a, b: 1 - F.cosine_similarity(a, b))(y, t, t.roll(1, 0))),
    "smoothed classes": loss(lambda y, t: nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1)(y, t.argmax(-1))),
    "apart": loss(lambda y, t: nn.PairwiseDistance(3)(y, t).mean() + nn.CosineSimilarity()(y, t).mean()),
}
"""As ``tests.strangers.MODELS``."""
