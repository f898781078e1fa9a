# mypy: disable-error-code="no-untyped-def"
"""Device side of the Triton backend: tiles of logits, and the forward kernel.

Logits are taken less a pivot of their row, the largest of them, before anything else is done to them, so that large
ones lose nothing; then they are in units of log 2, so that ``exp2`` and ``log2``, which the hardware has, need no
further multiplication.

A tile of logits is worked on by rows and keys that broadcast against each other, given as columns and rows of
indices: the kernel for the gradients of keys holds its tiles transposed, and shares all functions below.
"""

import triton
import triton.language as tl

from bayesian_attention.engine.reference import MASKED_BELOW as _MASKED_BELOW
from bayesian_attention.engine.triton_noise import LN2, LOG2E, key_words, load_words, noise_factor, unit_noise

MASKED_BELOW = tl.constexpr(_MASKED_BELOW)


@triton.jit
def load_tile(pointers, rows, limit, features, feature_count: tl.constexpr, block: tl.constexpr, even: tl.constexpr):
    """Rows of a matrix, zeros outside of it; no comparisons where none are needed.

    Args:
        pointers: (rows, features) addresses.
        rows: their row numbers.
        limit: number of rows that exist.
        features: their feature numbers.
        feature_count: features that exist.
        block: features of the tile.
        even: whether all rows of every tile exist.
    """
    if even and feature_count == block:
        tile = tl.load(pointers)
    elif even:
        tile = tl.load(pointers, mask=features[None, :] < feature_count, other=0.0)
    elif feature_count == block:
        tile = tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    else:
        tile = tl.load(pointers, mask=(rows[:, None] < limit) & (features[None, :] < feature_count), other=0.0)
    return tile


@triton.jit
def masked_logits(
    products,
    scale,
    mask,
    mask_row_stride,
    mask_key_stride,
    rows,
    keys,
    row_count,
    key_count,
    query_offset,
    mask_kind: tl.constexpr,
    is_causal: tl.constexpr,
    even_keys: tl.constexpr,
):
    """Logits in natural units, −∞ where the key is out.

    Args:
        products: tile of q·k.
        scale: factor of the products.
        mask: address of the mask's first entry for this batch row and head.
        mask_row_stride: from row to row of the mask, 0 where it broadcasts.
        mask_key_stride: from key to key.
        rows: row numbers, shaped to broadcast against the tile.
        keys: key numbers, likewise.
        row_count: rows that exist.
        key_count: keys that exist.
        query_offset: absolute position of row 0.
        mask_kind: "none", "boolean" or "additive".
        is_causal: keys up to the row's position only.
        even_keys: whether all keys of every tile exist.
    """
    x = products * scale
    if mask_kind != "none":
        entries = tl.load(
            mask + rows.to(tl.int64) * mask_row_stride + keys.to(tl.int64) * mask_key_stride,
            mask=(rows < row_count) & (keys < key_count),
            other=0,
        )
        if mask_kind == "additive":
            if entries.dtype != tl.float64:
                entries = entries.to(tl.float32)
            # Compared so that NaN stays in.
            out = entries <= MASKED_BELOW
            x += tl.where(out, 0.0, entries).to(tl.float32)
            x = tl.where(out, float("-inf"), x)
        else:
            x = tl.where(entries != 0, x, float("-inf"))
    if is_causal:
        x = tl.where(keys <= rows + query_offset, x, float("-inf"))
    if not even_keys:
        x = tl.where(keys < key_count, x, float("-inf"))
    return x


@triton.jit
def over_pivot(logits, pivot):
    """Logits less the pivot, in units of log 2. The difference of two near numbers is exact."""
    return (logits - pivot) * LOG2E


@triton.jit
def keys_seen(block_end, key_count, query_offset, is_causal: tl.constexpr):
    """How many keys the rows before ``block_end`` see at most."""
    seen = key_count
    if is_causal:
        seen = tl.maximum(tl.minimum(key_count, block_end + query_offset), 0)
    return seen


@triton.jit
def online_maximum(peak, x):
    """The new running maximum of each row, a finite stand-in for it, and the factor of what was summed before.

    A maximum of −∞ (no key yet) is replaced by 0, so that no −∞ − (−∞) arises.
    """
    new = tl.maximum(peak, tl.max(x, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    return new, finite, tl.exp2(peak - finite)


@triton.jit
def online_pivot(peak, logits):
    """The new running maximum of clean logits, a finite stand-in for it, and the step between in units of log 2."""
    new = tl.maximum(peak, tl.max(logits, 1))
    finite = tl.where(new == float("-inf"), 0.0, new)
    return new, finite, tl.where(peak == float("-inf"), 0.0, peak - finite) * LOG2E


@triton.jit
def log_total(peak, total):
    """Log-sum-exp in units of log 2, from a base and the sum over it; 0 for an empty row."""
    empty = total == 0.0
    return tl.where(empty, 0.0, peak + tl.log2(tl.where(empty, 1.0, total)))


@triton.jit(do_not_specialize=["first_sample"])
def forward_kernel(
    query,
    key,
    value,
    first,
    second,
    spread,
    mask,
    output,
    lse,
    state,
    query_batch_stride,
    query_head_stride,
    query_row_stride,
    query_feature_stride,
    key_batch_stride,
    key_head_stride,
    key_row_stride,
    key_feature_stride,
    value_batch_stride,
    value_head_stride,
    value_row_stride,
    value_feature_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_row_stride,
    mask_key_stride,
    batch_count,
    head_count,
    group_size,
    row_count,
    key_count,
    scale,
    query_offset,
    first_sample,
    family: tl.constexpr,
    fast_noise: tl.constexpr,
    mask_kind: tl.constexpr,
    is_causal: tl.constexpr,
    with_lse: tl.constexpr,
    features: tl.constexpr,
    value_features: tl.constexpr,
    block_features: tl.constexpr,
    block_value_features: tl.constexpr,
    even_keys: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """One block of rows of one head of one draw: output and log-sum-exps, in one pass over the keys.

    ``state`` is what the backward pass needs of each row: the pivot, which is the largest clean logit; the log-sum-exp
    of the clean logits over it, in units of log 2; and for each draw that of the perturbed ones. 0 stands in for rows
    that see no key, whose logits are all −∞.

    Draws are programs of their own. To share the logits among draws, a program would hold an accumulator a draw,
    and registers have room for one; what a draw costs is its noise, and that cannot be shared.

    The clean and the perturbed logits each have a running maximum: the noise of a small Weibull shape reaches
    −166, so the maximum of the one is no safe base for the other. ``with_lse`` is for the first draw alone: pivot and
    clean sum are the same for all, and only the sum takes long.
    """
    block_count = tl.cdiv(row_count, block_rows)
    block = tl.program_id(0) % block_count
    rest = tl.program_id(0) // block_count
    if is_causal:
        # The last rows see most keys: they start first, the short ones fill the gaps at the end.
        block = block_count - 1 - block
    head = rest % head_count
    rest = rest // head_count
    batch = (rest % batch_count).to(tl.int64)
    sample = (rest // batch_count + first_sample).to(tl.int64)

    rows = block * block_rows + tl.arange(0, block_rows)
    wide_rows = rows.to(tl.int64)
    columns = tl.arange(0, block_keys)
    wide_columns = columns.to(tl.int64)
    feature = tl.arange(0, block_features)
    value_feature = tl.arange(0, block_value_features)
    inside = rows < row_count

    head64 = head.to(tl.int64)
    query += batch * query_batch_stride + head64 * query_head_stride
    key += batch * key_batch_stride + (head64 // group_size) * key_head_stride
    value += batch * value_batch_stride + (head64 // group_size) * value_head_stride
    if mask_kind != "none":
        mask += batch * mask_batch_stride + head64 * mask_head_stride
    clean_base = (batch * head_count + head) * row_count
    draw_base = ((sample * batch_count + batch) * head_count + head) * row_count

    q = load_tile(
        query + wide_rows[:, None] * query_row_stride + feature[None, :] * query_feature_stride,
        rows, row_count, feature, features, block_features, False,
    )  # fmt: skip
    row_first = load_words(first + draw_base, rows, row_count, family)[:, None]
    row_second = load_words(second + draw_base, rows, row_count, family)[:, None]
    factor = noise_factor(spread, head, family)

    key_pointers = key + wide_columns[:, None] * key_row_stride + feature[None, :] * key_feature_stride
    value_pointers = value + wide_columns[:, None] * value_row_stride + value_feature[None, :] * value_feature_stride
    wide_step = tl.full((), block_keys, tl.int64)
    accumulator = tl.zeros((block_rows, block_value_features), tl.float32)
    # Over the pivot and in units of log 2, but for the running pivot itself.
    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    clean_peak = tl.full((block_rows,), float("-inf"), tl.float32)
    clean_total = tl.zeros((block_rows,), tl.float32)
    pivot = tl.zeros((block_rows,), tl.float32)

    for start in range(0, keys_seen((block + 1) * block_rows, key_count, query_offset, is_causal), block_keys):
        keys = start + columns
        k = load_tile(key_pointers, keys, key_count, feature, features, block_features, even_keys)
        logits = masked_logits(
            tl.dot(q, tl.trans(k), input_precision="ieee"), scale, mask, mask_row_stride, mask_key_stride,
            rows[:, None], keys[None, :], row_count, key_count, query_offset, mask_kind, is_causal, even_keys,
        )  # fmt: skip
        clean_peak, pivot, shift = online_pivot(clean_peak, logits)
        x = over_pivot(logits, pivot[:, None])
        if with_lse:
            w = tl.exp2(x)
            decay = tl.exp2(shift)
            clean_total = clean_total * decay + tl.sum(w, 1)
        if family != "softmax":
            x += unit_noise(row_first, row_second, key_words(keys)[None, :], family, fast_noise) * factor
            peak, finite, decay = online_maximum(peak + shift, x)
            w = tl.exp2(x - finite[:, None])
            total = total * decay + tl.sum(w, 1)
        v = load_tile(value_pointers, keys, key_count, value_feature, value_features, block_value_features, even_keys)
        accumulator = tl.dot(w.to(v.dtype), v, accumulator * decay[:, None], input_precision="ieee")
        key_pointers += wide_step * key_row_stride
        value_pointers += wide_step * value_row_stride

    if family == "softmax":
        total = clean_total
        peak = tl.zeros_like(total)
    empty = total == 0.0
    accumulator = accumulator / tl.where(empty, 1.0, total)[:, None]
    tl.store(
        output + (draw_base + wide_rows[:, None]) * value_features + value_feature[None, :],
        accumulator.to(output.dtype.element_ty),
        mask=inside[:, None] & (value_feature[None, :] < value_features),
    )
    plane_rows = tl.cast(batch_count, tl.int64) * head_count * row_count
    if with_lse:
        clean = log_total(0.0, clean_total)
        tl.store(state + clean_base + rows, pivot, mask=inside)
        tl.store(state + plane_rows + clean_base + rows, clean, mask=inside)
        tl.store(lse + clean_base + rows, tl.where(empty, float("-inf"), pivot + clean * LN2), mask=inside)
    tl.store(state + 2 * plane_rows + draw_base + rows, log_total(peak, total), mask=inside)
