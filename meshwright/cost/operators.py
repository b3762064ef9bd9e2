"""What operators do to memory, as declarations: what kind of work each is, and which tensors autograd saves for it.

``kind`` decides the price (``compute.py``):

    view        no work, the result shares storage
    pointwise   element by element: memory-bound, fuses with its neighbours
    linear      pointwise whose gradient needs nothing (add, neg, casts, cat, masks that do not change)
    reduce      memory-bound, fuses with the pointwise operators around it
    norm        layer_norm and its kin: one pass over the data
    gather      rows picked by an index: embedding, index
    copy        moves data and fuses with nothing: clone, sort, pad
    matmul      matrix products and convolutions
    attention   fused (flash) attention
    loss        cross entropy
    factory     made from literals

``saves`` names what is kept from the forward for the backward, operands by position, results by "r" and position:
"0:1 1:0" keeps operand 0 if operand 1 needs a gradient and operand 1 if operand 0 does (a product); "0" keeps operand 0
whenever the result is differentiated. Positions count tensor operands as ``Op.inputs`` does. Source: derivatives.yaml of torch
2.13, checked operator by operator in ``tests/test_memory.py`` against ``saved_tensors_hooks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.ir.gradients.custom import CUSTOM
from meshwright.ir.graph import Op

KINDS = (
    "view", "pointwise", "linear", "reduce", "norm", "gather", "copy", "matmul", "attention", "loss", "factory",
)


@dataclass(frozen=True, slots=True)
class Operator:
    """Kind of work, and what is saved: (position, positions of the operands whose gradients need it or () for any);
    ``results``: positions of saved results."""

    kind: str
    operands: tuple[tuple[int, tuple[int, ...]], ...] = ()
    results: tuple[int, ...] = ()

    @property
    def fuses(self) -> bool:
        """Whether torch.compile would put it into one kernel with its pointwise neighbours."""
        return self.kind in ("pointwise", "linear", "reduce", "norm", "factory", "view")


_TABLE: Mapping[str, Mapping[str, str]] = {
    "view": {
        "": "view _unsafe_view reshape transpose t permute unsqueeze squeeze expand slice select split split_with_sizes "
        "chunk unbind flatten unflatten movedim swapaxes narrow as_strided alias detach contiguous numpy_T mT lift_fresh "
        "expand_as view_as diagonal broadcast_to unfold unsafe_split",
    },
    "linear": {
        "": "add sub neg _to_copy to rsub clone_dtype bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or "
        "logical_not logical_xor eq ne lt le gt ge isnan isinf ceil floor round sign add_ floor_divide remainder "
        "roll flip type_as all any cat stack",
        "1": "masked_fill",
    },
    "pointwise": {
        "0:1 1:0": "mul",
        "0:1 1:0,1": "div",
        "0": "silu gelu pow cos sin log abs clamp clamp_min clamp_max hardtanh leaky_relu softplus mish erf log1p "
        "log2 hardswish hardsigmoid square logit where",
        "r0": "relu tanh sigmoid exp rsqrt sqrt reciprocal elu tanh_ expm1",
        "0 1": "maximum minimum mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits",
        "0 1:0 2:0": "addcmul",
    },
    "reduce": {
        "": "sum mean cumsum argmax argmin count_nonzero histc bincount",
        "0": "var var_mean prod",
        "0 r0": "std norm linalg_vector_norm amax amin logsumexp",
        "r1": "max min topk",
        "r0": "_softmax softmax _log_softmax log_softmax",
    },
    "norm": {
        "0 1": "layer_norm rms_norm group_norm native_layer_norm native_group_norm",
        "0 1:0": "batch_norm _native_batch_norm_legit native_batch_norm instance_norm",
    },
    "gather": {
        "1": "embedding index gather index_select take_along_dim index_put scatter scatter_add index_add",
    },
    "copy": {
        "": "clone sort repeat repeat_interleave constant_pad_nd pad _pad_circular tril triu nonzero argsort "
        "slice_scatter select_scatter copy copy_ upsample_nearest2d adaptive_avg_pool2d adaptive_avg_pool1d",
        "0 r1": "max_pool2d max_pool2d_with_indices max_pool1d adaptive_max_pool2d",
        "0": "avg_pool2d avg_pool1d _adaptive_avg_pool2d",
    },
    "matmul": {
        "0:1 1:0": "linear mm bmm matmul dot mv conv1d conv2d conv3d convolution _grouped_mm einsum",
        "1:2 2:1": "addmm baddbmm",
    },
    "attention": {
        "0 1 2 r0": "scaled_dot_product_attention",
    },
    "loss": {
        "1": "cross_entropy_loss nll_loss nll_loss_forward",
    },
    "factory": {
        "": "arange zeros ones full empty zeros_like ones_like full_like empty_like eye linspace scalar_tensor new_zeros "
        "new_ones new_full randn rand bernoulli rand_like randn_like tril_indices one_hot randint randint_like randperm "
        "uniform exponential normal normal_functional cauchy log_normal geometric random poisson binomial multinomial",
    },
}
_OWN: Mapping[str, tuple[str, str]] = {
    "mw.slice": ("view", ""),
    "mw.vary": ("view", ""),
    "mw.unvary": ("view", ""),
    "mw.identity": ("view", ""),
    "mw.valid_count": ("reduce", ""),
    "mw.all_gather": ("copy", ""),
    "mw.gather_vary": ("copy", ""),
    "mw.reduce_scatter": ("copy", ""),
    "mw.all_reduce": ("copy", ""),
    "mw.all_to_all": ("copy", ""),
    "mw.embedding": ("gather", "1"),
    "mw.cross_entropy": ("loss", "0 1"),
    "mw.mean": ("reduce", ""),
    "mw.batch_norm": ("norm", "0 1:0"),
    "mw.dropout": ("pointwise", ""),
    "mw.sdpa": ("attention", "0 1 2 r0"),
    "mw.gather_linear": ("matmul", "0"),
    "mw.linear": ("matmul", "0:1 1:0"),
    "mw.fused_linear": ("matmul", "0:1 1:0"),
    "aten.dropout": ("pointwise", ""),
    "aten.native_dropout": ("pointwise", "r1"),
}


def packet(target: str) -> str:
    """The operator without its overload.

    >>> packet("aten.linear.default"), packet("mw.mean")
    ('aten.linear', 'mw.mean')
    """
    return target.rsplit(".", 1)[0] if target.count(".") > 1 else target


@lru_cache(maxsize=1)
def _operators() -> dict[str, Operator]:
    table = {
        f"aten.{name}": _operator(kind, saves)
        for kind, rows in _TABLE.items()
        for saves, names in rows.items()
        for name in names.split()
    }
    return {**table, **{name: _operator(kind, saves) for name, (kind, saves) in _OWN.items()}}


def _operator(kind: str, saves: str) -> Operator:
    operands, results = [], []
    for word in saves.split():
        if word.startswith("r"):
            results.append(int(word[1:]))
        else:
            position, _, needed = word.partition(":")
            operands.append((int(position), tuple(int(other) for other in needed.split(",") if other)))
    return Operator(kind, tuple(operands), tuple(results))


def operator(target: str) -> Operator:
    """The declaration of a target; an unknown one moves its data and saves its first operand."""
    return _operators().get(packet(target), Operator("copy", ((0, ()),)))


def of_call(op: Op) -> Operator:
    """The declaration of a call: a function with a backward of its own says itself what it saves."""
    if op.target != CUSTOM:
        return operator(op.target)
    operands, results, _ = op.args[0].kept
    return Operator("copy", tuple((at, ()) for at in operands), results)


def known(target: str) -> bool:
    """Whether the target is declared here."""
    return packet(target) in _operators()
