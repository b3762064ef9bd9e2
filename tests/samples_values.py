"""Sample calls of normalizations, attention, indexing, reductions, losses, convolutions, factories and random draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.samples import F64, I64, Maker, Sample, b, c, i, n, r, s

GATED = ("aten.silu.default", (("at", 0),), ()), ("aten.mul.Tensor", (("at", 2), ("at", 1)), ())


def _normalization() -> dict[str, Maker]:
    def along() -> list[Sample]:
        return [s(n(4, 2, 8), -1), s(n(4, 8), 0)]

    def batch_norm() -> list[Sample]:
        state = n(4), n(4), n(4), r(4)
        return [
            s(n(8, 4, 2), *state, True, 0.1, 1e-5, fixed=(3, 4)),
            s(n(8, 4), *state, True, 0.1, 1e-5, fixed=(3, 4)),
            s(n(8, 4, 2, 2), *state, False, 0.1, 1e-5, fixed=(3, 4)),
            s(n(8, 4), None, None, n(4), r(4), True, 0.1, 1e-5, fixed=(1, 2)),
        ]

    return {
        **dict.fromkeys(("softmax.int", "log_softmax.int", "_safe_softmax.default"), along),
        "_softmax.default": lambda: [s(n(4, 2, 8), -1, False)],
        "_log_softmax.default": lambda: [s(n(4, 2, 8), 1, False)],
        "layer_norm.default": lambda: [s(n(4, 2, 8), (8,), n(8), n(8)), s(n(4, 2, 8), (2, 8), n(2, 8)), s(n(4, 8), (8,))],
        "native_layer_norm.default": lambda: [s(n(4, 2, 8), (8,), n(8), n(8), 1e-5), s(n(4, 8), (8,), None, None, 1e-5)],
        "rms_norm.default": lambda: [s(n(4, 2, 8), (8,), n(8), 1e-5)],
        "_fused_rms_norm.default": lambda: [s(n(4, 2, 8), (8,), n(8), 1e-5)],
        "_weight_norm.default": lambda: [s(n(4, 2, 8), r(4, 1, 1)), s(n(4, 2, 8), r(1, 1, 8), 2), s(n(4, 8), r(), -1)],
        "group_norm.default": lambda: [s(n(4, 8, 3), 4, n(8), n(8)), s(n(4, 8), 2)],
        "native_group_norm.default": lambda: [s(n(4, 8, 3), n(8), n(8), 4, 8, 3, 4, 1e-5)],
        "instance_norm.default": lambda: [
            s(n(4, 8, 6), n(8), n(8), None, None, True, 0.1, 1e-5, True),
            s(n(4, 8, 6), None, None, n(8), r(8), True, 0.1, 1e-5, True, fixed=(1, 2)),
        ],
        "batch_norm.default": lambda: [
            s(n(8, 4, 2), n(4), n(4), n(4), r(4), False, 0.1, 1e-5, False, fixed=(3, 4)),
            s(n(8, 4), None, None, n(4), r(4), False, 0.1, 1e-5, False, fixed=(1, 2)),
            s(n(8, 4), n(4), n(4), n(4), r(4), True, 0.1, 1e-5, False, fixed=(3, 4)),
        ],
        "mw.batch_norm": batch_norm,
    }


def _attention() -> dict[str, Maker]:
    def qkv(heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        return n(2, heads, 3, 4), n(2, key_heads, 5, 4), n(2, key_heads, 5, 4)

    return {
        "scaled_dot_product_attention.default": lambda: [
            s(*qkv(4, 4)),
            s(*qkv(8, 4), enable_gqa=True),
            s(*qkv(4, 1), enable_gqa=True),
            s(*qkv(4, 4), n(1, 4, 3, 5)),
            s(*qkv(4, 4), n(2, 1, 3, 5)),
            s(*qkv(4, 4), b(3, 5) | True, fixed=()),
            s(*qkv(8, 4), n(2, 8, 3, 5), enable_gqa=True),
            s(n(4, 3, 4), n(4, 3, 4), n(4, 3, 4), is_causal=True),
        ],
        "mw.window": lambda: [s(n(2, 4, 6, 4), n(2, g, 6, 4), n(2, g, 6, 4), None, 2, 1, 6) for g in (4, 2, 1)],
    }


def _indexing() -> dict[str, Maker]:
    return {
        "embedding.default": lambda: [
            s(n(8, 4), i(8, 4, 6)),
            s(n(8, 4), i(8, 4), 3),
            s(n(8, 4), i(8, 4, 2), -1, True),
            s(n(8, 4), i(8, 6), 7, True),
        ],
        "index.Tensor": lambda: [
            s(n(4, 8, 2), (i(4, 6),)),
            s(n(4, 8, 2), (None, i(8, 4, 2))),
            s(n(4, 8, 2), (i(4, 6), i(8, 6))),
            s(n(4, 8, 2), (i(4, 6), None, i(2, 6))),
            s(n(4, 8), (i(4, 6, 1), i(8, 1, 4))),
            s(n(4), (b(4) | True,)),
        ],
        "index_put.default": lambda: [
            s(n(8, 4), (torch.tensor([1, 5, 2]),), n(3, 4)),
            s(n(8, 4), (i(8, 6),), n(6, 4), True),
            s(n(4, 8), (None, i(8, 2)), n(), True),
            s(n(4, 2), (b(4, 2),), torch.zeros((), dtype=F64)),
        ],
        "index_select.default": lambda: [s(n(4, 8), 1, i(8, 6)), s(n(4, 8), 0, i(4, 4))],
        "gather.default": lambda: [s(n(4, 8), 1, i(8, 4, 6)), s(n(4, 8), 0, i(4, 2, 4)), s(n(4, 2, 8), -1, i(8, 4, 2, 1))],
        "take_along_dim.default": lambda: [s(n(4, 8), i(8, 4, 6), 1)],
        "scatter.src": lambda: [
            s(n(4, 8), 1, torch.tensor([[1, 5]] * 4), n(4, 2)),
            s(n(4, 8), 1, torch.tensor([[1, 5]] * 2), n(2, 2)),
        ],
        "scatter.value": lambda: [s(n(4, 8), 1, i(8, 4, 2), 1.0), s(n(4, 8), 1, i(8, 4, 2), 0)],
        "scatter_add.default": lambda: [s(n(4, 8), 1, i(8, 4, 6), n(4, 6))],
        "scatter_reduce.two": lambda: [s(n(4, 8), 1, i(8, 4, 6), n(4, 6), "sum"), s(n(4, 8), 1, i(8, 4, 6), n(4, 6), "amax")],
        "index_add.default": lambda: [s(n(4, 8), 1, i(8, 6), n(4, 6))],
        "index_copy.default": lambda: [s(n(4, 8), 1, torch.tensor([1, 4, 2]), n(4, 3))],
        "index_fill.int_Scalar": lambda: [s(n(4, 8), 1, i(8, 3), 0), s(n(4, 8), 1, i(8, 3), 2.0)],
        "one_hot.default": lambda: [s(i(8, 4, 6), 8)],
    }


def _reductions() -> dict[str, Maker]:
    def everything() -> list[Sample]:
        return [s(n(4, 8))]

    def dim() -> list[Sample]:
        return [s(n(4, 2, 8), 1), s(n(4, 8), -1, True)]

    def dims() -> list[Sample]:
        return [s(n(4, 2, 8), (0, 2)), s(n(4, 8), (1,), True)]

    def corrected() -> list[Sample]:
        return [s(n(4, 2, 8), (0, 2), correction=1), s(n(4, 8), (1,), keepdim=True)]

    return {
        "sum.default": lambda: [s(n(4, 8)), s(b(4, 8)), s(n())],
        "sum.dim_IntList": lambda: [*dims(), s(n(4, 8), None), s(i(5, 4, 8), (0,))],
        "mean.default": everything,
        "mean.dim": lambda: [*dims(), s(n(4, 8), None), s(n(4, 8).float(), (1,), dtype=F64)],
        "count_nonzero.default": lambda: [s(i(2, 4, 8))],
        "count_nonzero.dim_IntList": lambda: [s(i(2, 4, 8), (0,))],
        "cosine_similarity.default": lambda: [s(n(4, 2, 8), n(4, 1, 8), -1), s(n(4, 8), n(4, 8), 0)],
        "cumsum.default": dim_only,
        **{f"{name}.default": dims for name in ("amax", "amin")},
        **{f"{name}.default": everything for name in ("max", "min", "prod", "median", "nanmedian")},
        **{f"{name}.dim": dim for name in ("max", "min", "median", "nanmedian")},
        **{f"{name}.default": dim for name in ("argmax", "argmin", "mode")},
        **{f"{name}.default": lambda: [s(b(4, 8))] for name in ("all", "any")},
        **{f"{name}.dim": lambda: [s(b(4, 8), 1), s(b(4, 8), 0, True)] for name in ("all", "any")},
        "prod.dim_int": dim,
        "logsumexp.default": dims,
        "norm.Scalar": lambda: [s(n(4, 8), 2)],
        "norm.ScalarOpt_dim": lambda: [s(n(4, 8), 2, (1,)), s(n(4, 8), 3, (0,), True)],
        "linalg_vector_norm.default": lambda: [s(n(4, 8), 2, (1,)), s(n(4, 8)), s(n(4, 8), 1, (0,), True)],
        **{f"{name}.correction": corrected for name in ("var", "std", "var_mean", "std_mean")},
        **{f"{name}.dim": lambda: [s(n(4, 2, 8), (0, 2)), s(n(4, 8), (1,), True, True)] for name in ("var", "std")},
        "aminmax.default": lambda: [s(n(4, 8), dim=1), s(n(4, 8))],
        "kthvalue.default": lambda: [s(n(4, 8), 3, 1), s(n(4, 8), 2, 0, True)],
        "histc.default": lambda: [s(r(8), 4, 0, 1, fixed=(0,)), s(r(4, 6), 3, 0, 1, fixed=(0,)), s(r(4, 6), 3, fixed=(0,))],
        "nansum.default": lambda: [*dims(), s(n(4, 8))],
        "nanmean.default": lambda: [*dims(), s(n(4, 8))],
        **{f"{name}.scalar": lambda: [s(n(4, 2, 8), 0.3, 1), s(n(4, 8), 0.6), s(n(4, 8), 0.6, 0, True)]
           for name in ("quantile", "nanquantile")},
        "bincount.default": lambda: [s(i(4, 8), None, 4)],
        **{f"{name}.default": dim_only for name in ("cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "glu")},
        "sort.stable": lambda: [s(n(4, 8), stable=True, dim=0)],
        "topk.default": lambda: [s(n(4, 8), 3), s(n(4, 8), 4, 0)],
        **{f"fft_{name}.default": lambda: [s(n(4, 2, 8)), s(n(4, 8), 6, 0)] for name in ("fft", "ifft", "rfft")},
        **{f"fft_{name}.default": lambda: [s(n(4, 2, 8))] for name in ("fft2", "ifft2", "rfft2")},
        **{f"fft_{name}.default": lambda: [s(n(4, 2, 8), dim=(1,))] for name in ("fftshift", "ifftshift")},
        **{
            f"fft_{name}.default": lambda: [s(n(4, 2, 8), dim=(1, 2)), s(n(4, 8), (6,)), s(n(4, 8))]
            for name in ("fftn", "ifftn", "rfftn")
        },
        "fft_irfft.default": lambda: [s(c(4, 5), 8)],
        **{f"fft_{name}.default": lambda: [s(c(4, 2, 5), (2, 8))] for name in ("irfft2", "irfftn")},
    }


def dim_only() -> list[Sample]:
    return [s(n(4, 2, 8), 1), s(n(4, 8), -1)]


def _loss() -> dict[str, Maker]:
    def elementwise() -> list[Sample]:
        return [s(r(4, 8), r(4, 8), reduction=how, fixed=(1,)) for how in (0, 1, 2)]

    def with_weight() -> list[Sample]:
        weight = r(8)
        return [s(r(4, 8), r(4, 8), *more, reduction=how, fixed=(2,)) for how in (0, 2) for more in ((), (weight,))]

    labels = torch.tensor([[1, 7, -100, 3, 0, 2], [-100, 6, 6, 5, 4, 3]])
    return {
        "mw.valid_count": lambda: [s(labels, -100)],
        "mw.cross_entropy": lambda: [
            s(n(2, 6, 8), labels, -100, 0.0),
            s(n(2, 6, 8), labels, -100, 0.1),
            s(n(8, 8), i(8, 8), 3, 0.0),
            s(n(2, 6, 7), i(7, 2, 6), -1, 0.2),
        ],
        "mw.linear_cross_entropy": lambda: [
            s(n(2, 6, 5), n(8, 5), None, labels, -100, 0.0, 4),
            s(n(2, 6, 5), n(8, 5), n(8), labels, -100, 0.1, 100),
            s(n(8, 5), n(7, 5), None, i(7, 8), 3, 0.0, 4),  # as many pieces on every rank of the simulation
        ],
        "mw.mlp": lambda: [
            s(n(2, 6, 5), (n(8, 5), n(8, 5)), (None, n(8)), GATED, n(4, 8), 4),
            s(n(8, 5), (n(8, 5),), (n(8),), (("aten.gelu.default", (("at", 0),), (("approximate", "tanh"),)),), n(4, 8), 100),
        ],
        "cross_entropy_loss.default": lambda: [
            s(n(4, 8), i(8, 4)),
            s(n(4, 8, 2), i(8, 4, 2), None, 0, 3, 0.1),
            s(n(4, 8), i(8, 4), r(8), 0, fixed=(2,)),
            s(n(4, 8, 2), r(4, 8, 2), None, 0, fixed=(1,)),
        ],
        **{f"nll_loss{nd}.default": lambda: [s(n(4, 8), i(8, 4), None, 0), s(n(4, 8), i(8, 4))] for nd in ("", "_nd")},
        "nll_loss2d.default": lambda: [s(n(4, 8, 2, 2), i(8, 4, 2, 2), None, 0), s(n(4, 8, 2, 2), i(8, 4, 2, 2))],
        "nll_loss_forward.default": lambda: [s(n(4, 8), i(8, 4), None, 1, -100)],
        "nll_loss2d_forward.default": lambda: [s(n(4, 8, 2, 2), i(8, 4, 2, 2), None, 1, -100)],
        **{
            f"{name}.default": elementwise
            for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
        },
        "binary_cross_entropy.default": with_weight,
        "binary_cross_entropy_with_logits.default": with_weight,
    }


def _convolution() -> dict[str, Maker]:
    def conv(space: int, transposed: bool = False) -> Maker:
        size = (5,) * space
        kernel = (3,) * space
        weight = (4, 2) if transposed else (2, 4)
        x = (2, 4, *size)

        def make() -> list[Sample]:
            padding = () if transposed else ((1,) * space, (1,) * space, (1,) * space, 2)
            grouped = s(
                n(*x), n(4, 2, *kernel), None, *(((1,) * space, (0,) * space, (0,) * space, 2) if transposed else padding)
            )
            return [
                s(n(*x), n(*weight, *kernel)),
                s(n(*x), n(*weight, *kernel), n(2)),
                s(n(*x[1:]), n(*weight, *kernel)),
                grouped,
            ]

        return make

    def pool(space: int, *extra: Any) -> Maker:
        return lambda: [s(n(2, 4, *(4,) * space), *extra)]

    table: dict[str, Maker] = {
        "convolution.default": lambda: [
            s(n(2, 4, 5, 5), n(2, 4, 3, 3), n(2), (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
            s(n(2, 4, 5, 5), n(4, 2, 3, 3), None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1),
        ],
    }
    for space in (1, 2, 3):
        two = (2,) * space
        table[f"conv{space}d.default"] = conv(space)
        table[f"conv{space}d.padding"] = lambda space=space: [
            s(n(2, 4, *(5,) * space), n(2, 4, *(3,) * space), n(2), (1,) * space, "same")
        ]
        table[f"conv_transpose{space}d.{'default' if space == 1 else 'input'}"] = conv(space, True)
        for name in ("avg_pool", "max_pool"):
            table[f"{name}{space}d.default"] = pool(space, two)
        table[f"max_pool{space}d_with_indices.default"] = pool(space, two)
        for name in ("adaptive_avg_pool", "adaptive_max_pool"):
            table[f"{name}{space}d.default"] = pool(space, two)
        table[f"upsample_nearest{space}d.vec"] = pool(space, (6,) * space, None)
    for name, space in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3)):
        table[f"upsample_{name}{space}d.vec"] = pool(space, (6,) * space, False, None)
    return table | {
        "_adaptive_avg_pool2d.default": pool(2, (2, 2)),
        "channel_shuffle.default": lambda: [s(n(2, 4, 2, 2), 2), s(n(4, 6, 8), 3)],
        "affine_grid_generator.default": lambda: [s(n(4, 2, 3), (4, 3, 6, 2), True)],
        "pixel_shuffle.default": lambda: [s(n(2, 4, 2, 2), 2)],
        "pixel_unshuffle.default": lambda: [s(n(2, 1, 4, 4), 2)],
        "col2im.default": lambda: [s(n(4, 8, 4), (4, 4), (2, 2), (1, 1), (0, 0), (2, 2))],
        "grid_sampler.default": lambda: [
            s(n(4, 2, 4, 4), r(4, 3, 5, 2), 0, 0, False), s(n(2, 4, 3, 3, 3), r(2, 2, 2, 2, 3), 0, 0, True),
        ],
        "im2col.default": lambda: [s(n(2, 2, 4, 4), (2, 2), (1, 1), (0, 0), (1, 1))],
    }


def _factories() -> dict[str, Maker]:
    table: dict[str, Maker] = {}
    for name in ("zeros", "ones", "full", "empty"):
        value = (2.5,) if name == "full" else ()
        known = name != "empty"
        overload = "default" if known else "memory_format"
        table[f"{name}.{overload}"] = lambda v=value, k=known: [s((4, 8), *v, values=k, dtype=F64), s((), *v, values=k)]
        table[f"new_{name}.default"] = lambda v=value, k=known: [
            s(n(4, 8), (4, 8), *v, fixed=(0,), values=k),
            s(n(6), (4, 8), *v, fixed=(0,), values=k),
        ]
        table[f"{name}_like.default"] = lambda v=value, k=known: [s(n(4, 8), *v, fixed=(0,), values=k)]
    return table | {
        "arange.default": lambda: [s(8), s(4.0)],
        "arange.start": lambda: [s(2, 10), s(0, 4, dtype=I64)],
        "arange.start_step": lambda: [s(1, 13, 3), s(8, 0, -1), s(0, 1, 0.25)],
        "scalar_tensor.default": lambda: [s(2.0)],
        "linspace.default": lambda: [s(0, 1, 8)],
        "eye.default": lambda: [s(4)],
        "tril_indices.default": lambda: [s(4, 4)],
        "triu_indices.default": lambda: [s(4, 4)],
        "eye.m": lambda: [s(4, 8)],
    }


def _random() -> dict[str, Maker]:
    def one(*args: Any, floats: int = 1) -> Maker:
        return lambda: [s(*(r(4, 8) for _ in range(floats)), *args, fixed=range(floats), values=False)]

    overwriting = ("uniform", "exponential", "normal_functional", "cauchy", "log_normal", "random")
    return {
        "dropout.default": lambda: [s(n(4, 8), 0.5, False), s(n(4, 8), 0.0, True), *one(0.5, True)()],
        **{f"{name}.default": lambda: [s((4, 8), values=False)] for name in ("rand", "randn")},
        **{f"{name}.default": one() for name in (*overwriting, "rand_like", "randn_like", "bernoulli", "poisson")},
        "randint.default": lambda: [s(1 << 20, (4, 8), values=False)],
        "randint.low": lambda: [s(2, 1 << 20, (4, 8), values=False)],
        "normal.float_float": lambda: [s(0.0, 1.0, (4, 8), values=False)],
        "randint_like.default": one(1 << 20),
        "randint_like.low_dtype": one(2, 1 << 20),
        "random.to": one(1 << 20),
        "random.from": one(2, 1 << 20),
        "randperm.default": lambda: [s(8, values=False)],
        "bernoulli.p": one(0.5),
        "bernoulli.Tensor": one(floats=2),
        "binomial.default": lambda: [s(torch.full((4, 8), 20.0), r(4, 8).float(), fixed=(0, 1), values=False)],
        "geometric.default": one(0.1),
        "_standard_gamma.default": one(),
        "_sample_dirichlet.default": one(),
        "normal.Tensor_float": one(1.0),
        "normal.float_Tensor": lambda: [s(1.0, r(4, 8), fixed=(0,), values=False)],
        "normal.Tensor_Tensor": one(floats=2),
        "multinomial.default": lambda: [s(r(4, 800), 200, fixed=(0,), values=False)],
        "native_dropout.default": lambda: [
            s(n(4, 8), 0.0, True),
            s(n(4, 8), 0.5, False),
            s(n(4, 8), 0.5, True, fixed=(0,), values=False),
        ],
        "rrelu.default": lambda: [s(n(4, 8)), s(-r(4, 8), 0.1, 0.3, True, fixed=(0,), values=False)],
        "rrelu_with_noise_functional.default": lambda: [s(-r(4, 8), r(4, 8), 0.1, 0.3, True, fixed=(0, 1), values=False)],
        "alpha_dropout.default": one(0.5, True),
        **{
            f"{name}.default": lambda: [s(r(4, 8), 0.5, True, fixed=(0,), values=False),
                                        s(r(4, 8, 6), 0.5, True, fixed=(0,), values=False)]
            for name in ("feature_dropout", "feature_alpha_dropout")
        },
    }


def _recurrent() -> dict[str, Maker]:
    def weights(gates: int) -> list[Tensor]:
        return [n(2 * gates, 3), n(2 * gates, 2), n(2 * gates), n(2 * gates)]

    def layers(gates: int) -> Maker:
        def states(samples: int) -> Any:
            return [n(1, samples, 2), n(1, samples, 2)] if gates == 4 else n(1, samples, 2)

        numbers = (True, 1, 0.0, True, False)
        return lambda: [
            s(n(4, 2, 3), states(4), weights(gates), *numbers, True),
            s(n(2, 6, 3), states(6), weights(gates), *numbers, False),
        ]

    def cell(gates: int) -> Maker:
        return lambda: [s(n(4, 3), [n(4, 2), n(4, 2)] if gates == 4 else n(4, 2), *weights(gates))]

    gates = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
    return {
        **{f"{name}.input": layers(count) for name, count in gates.items()},
        **{f"{name}_cell.default": cell(count) for name, count in gates.items()},
    }


TABLES = _normalization, _attention, _indexing, _reductions, _loss, _convolution, _factories, _random, _recurrent
