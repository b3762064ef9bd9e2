"""Attention of a block of queries on a block of keys, with the log-sum-exp by which such blocks are merged.

    forward    out = softmax(q k^T scale + mask) v,   lse = log sum_keys exp(q k^T scale + mask)
    backward   p = exp(q k^T scale + mask - lse),     ds = p (dy v^T - rowsum(dy out)),   dq = ds k, dk = ds^T q, dv = p^T dy

The backward takes the ``lse`` and ``out`` of the WHOLE row, so gradients of blocks simply add up. ``lse`` is fp32, [b, h, s],
the natural logarithm, -inf where a row sees no key of the block.

Beside the least number that there is, which masks add where a row is to see nothing, scores vanish, and so does the logarithm
of how many keys there are: such a row is the mean of its keys' values. There ``lse`` is that of the scores less the most that
the mask adds anywhere in the row (``sunk``): of how many keys have it.

Three kernels, chosen by device and arguments: torch's flash kernels, and on CUDA its memory-efficient one where these take no
mask or not the dtype, which never form the scores; and one written out, which forms them for a few rows at a time: where the
mask takes a gradient or probabilities are dropped, or no other kernel takes the dtype.

``attention`` is that of whole rows, by torch's own choice among its kernels.

    q [b, h, s, d]   k [b, g, t, d]   v [b, g, t, e]   mask [1|b, 1|h, 1|s, 1|t] boolean (True: may look) or added, or None
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ir.declared.operator import SCORE_ROWS

_ATEN: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FLASH_WIDTH, _FLASH_SINCE = 256, (8, 0)
"""Of torch's flash kernel on CUDA: the widest head, and the oldest device (its compute capability)."""
_ALIGNED = 16
"""Elements of a mask's row that the memory-efficient kernel reads at a time."""
_SUNK = -1e8
"""A row to all of whose scores a mask adds less than this is the same as one without scores."""
_LSE_ROWS = 32
"""To a multiple of how many rows it pads the log-sum-exp."""


@dataclass(frozen=True)
class Setting:
    """What all blocks of a call share. ``mask_gradient``: whether the mask takes one; ``dropout``: the probability of a zero;
    ``generator``: (number of a part -> what its zeros are drawn from)."""

    scale: float
    mask_gradient: bool = False
    dropout: float = 0.0
    generator: Callable[[int], torch.Generator] | None = None


Out = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """torch's ``scaled_dot_product_attention``, key heads repeated where its kernels on CUDA take none that are shared: beside
    a mask, in single precision, wide heads and old devices. There it would form the scores of all rows."""
    if enable_gqa and query.is_cuda and not _shares_heads(query, value, attn_mask):
        groups = query.shape[-3] // key.shape[-3]
        key, value, enable_gqa = _repeated(key, groups), _repeated(value, groups), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _shares_heads(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's flash kernel takes this, the one on CUDA for which query heads may share a key head."""
    width = query.shape[-1]
    plain = mask is None and query.dtype in _HALF and width == value.shape[-1] and width <= _FLASH_WIDTH
    return plain and torch.cuda.get_device_capability(query.device) >= _FLASH_SINCE


def sunk(mask: Tensor | None) -> Tensor | None:
    """The most that a mask adds in each of its whole rows, [1|b, 1|h, 1|s], where scores vanish beside it, else 0; None if it
    adds nothing."""
    if mask is None or mask.dtype == torch.bool:
        return None
    most = mask.detach().amax(-1)
    return most.masked_fill((most > _SUNK) | (most == float("-inf")), 0.0)


def counted(lse: Tensor, mask: Tensor | None, most: Tensor | None, keys: int) -> Tensor:
    """The ``lse`` of a block on so many keys; where its rows are ``sunk``, of how many keys of the block have the most."""
    if mask is None or most is None:
        return lse
    count = (mask == most.unsqueeze(-1)).sum(-1) * (keys if mask.shape[-1] == 1 else 1)
    return torch.where(most < 0, count.to(lse.dtype).log(), lse)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, number: int, how: Setting) -> Out:
    """(out in v's dtype, lse) of one block; ``causal``: it is square and row i sees keys 0..i. ``number``: of the block, from
    which dropout draws."""
    if not _fused(q, how):
        return _written(q, k, v, mask, causal, number, how)
    if q.device.type == "cpu":
        width = max(q.shape[-1], v.shape[-1])
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            _wide(q, width), _wide(k, width), _wide(v, width), 0.0, causal, attn_mask=_added(mask, q), scale=how.scale
        )
        return _seen(out[..., : v.shape[-1]], lse, mask)
    if _flash(q, v, mask):
        return _cuda_forward(q, k, v, causal, how)
    return _seen(*_efficient_forward(q, k, v, mask, causal, how), mask)


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, number: int,
    how: Setting, most: Tensor | None = None,
) -> Gradients:
    """Gradients of one block's q, k, v and mask; ``out`` and ``lse`` of the whole rows, ``most`` of those that are ``sunk``."""
    lse = lse.masked_fill(lse == float("-inf"), 0.0)  # such a row looks at nothing: exp(-inf - 0) is 0
    if not _fused(q, how):
        return _written_backward(dy, q, k, v, out, lse, mask, causal, number, how, most)
    if most is not None:  # as torch's kernels save it of a whole row
        lse = torch.where(most < 0, most.to(lse.dtype), lse)
    if q.device.type == "cpu":
        width, inner, outer = max(q.shape[-1], v.shape[-1]), q.shape[-1], v.shape[-1]
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            _wide(dy, width), _wide(q, width), _wide(k, width), _wide(v, width), _wide(out, width), lse, 0.0, causal,
            attn_mask=_added(mask, q), scale=how.scale,
        )
        return dq[..., :inner], dk[..., :inner], dv[..., :outer], None
    if _flash(q, v, mask):
        return _cuda_backward(dy, q, k, v, out, lse, causal, how)
    return _efficient_backward(dy, q, k, v, out, lse, mask, causal, how)


def _fused(q: Tensor, how: Setting) -> bool:
    """Whether torch has a kernel for this that forms no scores."""
    if how.mask_gradient or how.dropout:
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.float64, *_HALF)
    return q.device.type == "cuda" and q.dtype in (torch.float32, *_HALF)


def _flash(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether it is the flash kernel, on CUDA."""
    wide = max(q.shape[-1], v.shape[-1])
    return mask is None and q.dtype in _HALF and wide <= _FLASH_WIDTH and (
        torch.cuda.get_device_capability(q.device) >= _FLASH_SINCE)


def _wide(x: Tensor, width: int) -> Tensor:
    """Last dim contiguous and of one width for all: zeros change no score, and no other output. A stride of its last dim other
    than 1 would be read wrong without a word."""
    return (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x).contiguous()


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as what is added to the scores: the CPU's flash kernel takes no boolean one."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(q.dtype)
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))


def _seen(out: Tensor, lse: Tensor, mask: Tensor | None) -> Out:
    """Rows that see no key: nothing, of weight nothing (the kernel says lse 0)."""
    if mask is None:
        return out, lse
    blind = ~(mask if mask.dtype == torch.bool else mask != float("-inf")).any(-1)
    blind = blind.expand(lse.shape)
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


# ------------------------------------------------------------------------------------------------------------------ CUDA


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, how: Setting) -> Out:
    width, groups = _cuda_width(q, v), q.shape[1] // k.shape[1]
    q, k, v, outer = _wide(q, width), _repeated(_wide(k, width), groups), _repeated(_wide(v, width), groups), v.shape[-1]
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=how.scale)
    return out[..., :outer], lse[..., : q.shape[-2]]


def _cuda_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, how: Setting
) -> Gradients:
    width, groups, inner, outer = _cuda_width(q, v), q.shape[1] // k.shape[1], q.shape[-1], v.shape[-1]
    seeds = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
        _wide(dy, width), _wide(q, width), _repeated(_wide(k, width), groups), _repeated(_wide(v, width), groups),
        _wide(out, width), lse.contiguous(), None, None, q.shape[-2], k.shape[-2], 0.0, causal, seeds, seeds, scale=how.scale,
    )
    return dq[..., :inner], _folded(dk, groups)[..., :inner], _folded(dv, groups)[..., :outer], None


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, how: Setting) -> Out:
    width, groups, outer = _cuda_width(q, v), q.shape[1] // k.shape[1], v.shape[-1]
    k, v = _repeated(_wide(k, width), groups), _repeated(_wide(v, width), groups)
    out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
        _wide(q, width), k, v, _aligned(mask, q, k), True, 0.0, causal, scale=how.scale
    )
    return out[..., :outer], lse[..., : q.shape[-2]]


def _efficient_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, how: Setting
) -> Gradients:
    width, groups, inner, outer = _cuda_width(q, v), q.shape[1] // k.shape[1], q.shape[-1], v.shape[-1]
    k, v = _repeated(_wide(k, width), groups), _repeated(_wide(v, width), groups)
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
    rows = -(-lse.shape[-1] // _LSE_ROWS) * _LSE_ROWS
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        _rows_first(dy, width), _wide(q, width), k, v, _aligned(mask, q, k), _rows_first(out, width),
        F.pad(lse, (0, rows - lse.shape[-1]), value=float("inf")), seed, seed, 0.0, [True, True, True, False], causal,
        scale=how.scale,
    )
    return dq[..., :inner], _folded(dk, groups)[..., :inner], _folded(dv, groups)[..., :outer], None


def _rows_first(x: Tensor, width: int) -> Tensor:
    """``_wide``, laid out as [b, s, h, d]: the kernel takes the result for laid out so, whatever its strides say."""
    return _wide(x.transpose(1, 2), width).transpose(1, 2)


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as what is added to the scores, [b, h, s, t], its rows beginning where the kernel can read them."""
    added = _added(mask, q)
    if added is None:
        return None
    rows, keys = q.shape[-2], k.shape[-2]
    added = added.to(q.dtype).expand(*added.shape[:-1], keys)
    padded = F.pad(added, (0, -keys % _ALIGNED)).contiguous()
    return padded[..., :keys].expand(*q.shape[:2], rows, keys)


def _cuda_width(q: Tensor, v: Tensor) -> int:
    """A head dim that the flash kernel takes: a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Key or value heads once for every query head."""
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _folded(x: Tensor, groups: int) -> Tensor:
    """The gradient of ``_repeated``."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


# --------------------------------------------------------------------------------------------------------------- written


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, rows: slice, how: Setting) -> Tensor:
    """q k^T scale + mask of some rows, fp32 at least, -inf where a row may not look."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q[..., rows, :].to(wide) @ k.to(wide).transpose(-1, -2)) * how.scale
    if causal:
        at = torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(at[None, :] > at[rows][:, None], float("-inf"))
    if mask is not None:
        part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
        scores = scores.masked_fill(~part, float("-inf")) if mask.dtype == torch.bool else scores + part.to(wide)
    return scores


def _kept(shape: torch.Size, rows: slice, number: int, like: Tensor, how: Setting) -> Tensor | None:
    """What dropout multiplies the probabilities of some rows of a block by: the same whenever it is asked."""
    if not how.dropout or how.generator is None:
        return None
    generator = how.generator(number * 7919 + rows.start)
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - how.dropout, generator=generator).div_(
        1 - how.dropout
    )


def _rows(count: int) -> list[slice]:
    return [slice(start, min(count, start + SCORE_ROWS)) for start in range(0, count, SCORE_ROWS)]


def _written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, number: int, how: Setting) -> Out:
    groups = q.shape[1] // k.shape[1]
    k, v = _repeated(k, groups), _repeated(v, groups)
    outs, sums = [], []
    for rows in _rows(q.shape[-2]):
        scores = _scores(q, k, mask, causal, rows, how)
        top = scores.amax(-1, keepdim=True)
        p = (scores - top.masked_fill(top == float("-inf"), 0.0)).exp_()
        total = p.sum(-1, keepdim=True)
        lse = (top + total.log()).squeeze(-1)
        p = p.div_(total.masked_fill_(total == 0, 1.0))
        keep = _kept(p.shape, rows, number, p, how)
        outs.append(((p if keep is None else p * keep) @ v.to(p.dtype)).to(v.dtype))
        sums.append(lse)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def _written_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool, number: int,
    how: Setting, most: Tensor | None,
) -> Gradients:
    groups = q.shape[1] // k.shape[1]
    k, v = _repeated(k, groups), _repeated(v, groups)
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = (dy.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    dqs, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    dmask = torch.zeros_like(mask, dtype=wide) if how.mask_gradient and mask is not None else None
    for rows in _rows(q.shape[-2]):
        scores = _scores(q, k, mask, causal, rows, how)
        if most is not None:
            scores = scores.sub_((most[..., rows] if most.shape[-1] > 1 else most).unsqueeze(-1))
        p = scores.sub_(lse[..., rows].unsqueeze(-1)).exp_()
        keep, upstream = _kept(p.shape, rows, number, p, how), dy[..., rows, :].to(wide)
        dv += (p if keep is None else p * keep).transpose(-1, -2) @ upstream
        dp = upstream @ v.to(wide).transpose(-1, -2)
        ds = p * ((dp if keep is None else dp * keep) - delta[..., rows, :])
        dqs.append((ds @ k.to(wide)) * how.scale)
        dk += (ds.transpose(-1, -2) @ q[..., rows, :].to(wide)) * how.scale
        if dmask is not None:
            target = dmask[..., rows, :] if dmask.shape[-2] > 1 else dmask
            target += ds.sum_to_size(target.shape)
    return torch.cat(dqs, -2), _folded(dk, groups), _folded(dv, groups), dmask
