# mypy: disable-error-code="no-untyped-def"
"""Device side of the Triton backend: the gradient of the logits, and the kernel for keys and values.

With w the sampled and p the clean weights, recomputed tile by tile from the log-sum-exps and the same counter:
dφ = Σ_draws w (dO·v − D) + dlse p with D = dO·O. Every gradient has one program that owns it and sums in a fixed
order, so nothing is atomic and two runs give the same bits.
"""

import triton
import triton.language as tl

from bayesian_attention.engine.triton_forward import load_tile, masked_logits, over_pivot
from bayesian_attention.engine.triton_noise import key_words, load_words, noise_factor, unit_noise


@triton.jit
def row_dots_kernel(
    grad_output,
    output,
    delta,
    sample_stride,
    batch_stride,
    head_stride,
    row_stride,
    feature_stride,
    batch_count,
    head_count,
    row_count,
    value_features: tl.constexpr,
    block_value_features: tl.constexpr,
    block_rows: tl.constexpr,
):
    """D: the dot product of each row of the output with its gradient, in float32."""
    block_count = tl.cdiv(row_count, block_rows)
    block = tl.program_id(0) % block_count
    plane = (tl.program_id(0) // block_count).to(tl.int64)
    head = plane % head_count
    batch = (plane // head_count) % batch_count
    sample = plane // (head_count * batch_count)
    rows = block * block_rows + tl.arange(0, block_rows)
    wide_rows = rows.to(tl.int64)
    feature = tl.arange(0, block_value_features)
    grad_output += sample * sample_stride + batch * batch_stride + head * head_stride
    g = load_tile(
        grad_output + wide_rows[:, None] * row_stride + feature[None, :] * feature_stride,
        rows, row_count, feature, value_features, block_value_features, False,
    )  # fmt: skip
    o = load_tile(
        output + (plane * row_count + wide_rows[:, None]) * value_features + feature[None, :],
        rows, row_count, feature, value_features, block_value_features, False,
    )  # fmt: skip
    dots = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + plane * row_count + rows, dots, mask=rows < row_count)


@triton.jit
def load_draw_total(pointers, rows, row_count):
    """The log-sum-exp of a draw over the pivot; +∞ for rows that do not exist, so that their weights are 0."""
    return tl.load(pointers + rows, mask=rows < row_count, other=float("inf"))


@triton.jit
def logit_gradient(
    x,
    grad_weights,
    row_first,
    row_second,
    key_word,
    factor,
    draw_total,
    clean_total,
    delta,
    grad_lse,
    family: tl.constexpr,
    fast_noise: tl.constexpr,
    with_lse: tl.constexpr,
):
    """Sampled weights, gradient of the logits, its part that came through the draw, and the unit noise.

    Args:
        x: clean logits over the pivot in units of log 2, −∞ where the key is out.
        grad_weights: dO·v.
        row_first: noise words of the rows, shaped to broadcast against the tile, as all that follows.
        row_second: likewise.
        key_word: noise words of the keys.
        factor: of the unit noise.
        draw_total: log-sum-exp of the perturbed logits over the pivot.
        clean_total: of the clean ones.
        delta: D.
        grad_lse: gradient of the log-sum-exp of the clean logits.
        family: of the posterior.
        fast_noise: whether the noise is made with the hardware's logarithm.
        with_lse: whether ``grad_lse`` counts.
    """
    if family == "softmax":
        noise = 0.0
        w = tl.exp2(x - draw_total)
    else:
        noise = unit_noise(row_first, row_second, key_word, family, fast_noise)
        w = tl.exp2(x + noise * factor - draw_total)
    drawn = w * (grad_weights - delta)
    total = drawn
    if with_lse:
        # Rows that do not exist have a gradient of 0.
        if family == "softmax":
            total += w * grad_lse
        else:
            total += tl.exp2(x - clean_total) * grad_lse
    return w, total, drawn, noise


@triton.jit
def key_value_kernel(
    query,
    key,
    value,
    first,
    second,
    spread,
    mask,
    grad_output,
    grad_lse,
    delta,
    state,
    grad_key,
    grad_value,
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
    grad_sample_stride,
    grad_batch_stride,
    grad_head_stride,
    grad_row_stride,
    grad_feature_stride,
    sample_count,
    batch_count,
    head_count,
    group_size,
    row_count,
    key_count,
    scale,
    query_offset,
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
    even_rows: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Gradients of one block of keys and values of one key head, summed over its query heads, draws and rows.

    Tiles are transposed, (keys, rows), so that the weights enter the products with dO and q as they are.
    """
    block_count = tl.cdiv(key_count, block_keys)
    block = tl.program_id(0) % block_count
    rest = tl.program_id(0) // block_count
    key_heads = head_count // group_size
    key_head = (rest % key_heads).to(tl.int64)
    batch = (rest // key_heads).to(tl.int64)

    keys = block * block_keys + tl.arange(0, block_keys)
    wide_keys = keys.to(tl.int64)
    columns = tl.arange(0, block_rows)
    feature = tl.arange(0, block_features)
    value_feature = tl.arange(0, block_value_features)
    wide_step = tl.full((), block_rows, tl.int64)

    k = load_tile(
        key + batch * key_batch_stride + key_head * key_head_stride
        + wide_keys[:, None] * key_row_stride + feature[None, :] * key_feature_stride,
        keys, key_count, feature, features, block_features, even_keys,
    )  # fmt: skip
    v = load_tile(
        value + batch * value_batch_stride + key_head * value_head_stride
        + wide_keys[:, None] * value_row_stride + value_feature[None, :] * value_feature_stride,
        keys, key_count, value_feature, value_features, block_value_features, even_keys,
    )  # fmt: skip
    key_word = key_words(keys)[:, None]
    dk = tl.zeros((block_keys, block_features), tl.float32)
    dv = tl.zeros((block_keys, block_value_features), tl.float32)

    plane_rows = tl.cast(batch_count, tl.int64) * head_count * row_count
    first_row = 0
    if is_causal:
        # Rows before the block's first key do not see it.
        first_row = tl.maximum(block * block_keys - query_offset, 0) // block_rows * block_rows

    for turn in range(0, group_size * sample_count):
        sample = tl.cast(turn // group_size, tl.int64)
        head = key_head * group_size + turn % group_size
        factor = noise_factor(spread, head, family)
        mask_base = mask
        if mask_kind != "none":
            mask_base = mask + batch * mask_batch_stride + head * mask_head_stride
        clean_base = (batch * head_count + head) * row_count
        draw_base = ((sample * batch_count + batch) * head_count + head) * row_count
        wide_rows = first_row + columns.to(tl.int64)
        query_pointers = (
            query + batch * query_batch_stride + head * query_head_stride
            + wide_rows[:, None] * query_row_stride + feature[None, :] * query_feature_stride
        )  # fmt: skip
        grad_pointers = (
            grad_output + sample * grad_sample_stride + batch * grad_batch_stride + head * grad_head_stride
            + wide_rows[:, None] * grad_row_stride + value_feature[None, :] * grad_feature_stride
        )  # fmt: skip
        for start in range(first_row, row_count, block_rows):
            rows = start + columns
            q = load_tile(query_pointers, rows, row_count, feature, features, block_features, even_rows)
            g = load_tile(
                grad_pointers, rows, row_count, value_feature, value_features, block_value_features, even_rows
            )
            pivot = tl.load(state + clean_base + rows, mask=rows < row_count, other=0.0)[None, :]
            logits = masked_logits(
                tl.dot(k, tl.trans(q), input_precision="ieee"), scale,
                mask_base, mask_row_stride, mask_key_stride,
                rows[None, :], keys[:, None], row_count, key_count, query_offset, mask_kind, is_causal, even_keys,
            )  # fmt: skip
            clean_total = 0.0
            slope = 0.0
            if with_lse:
                clean_total = tl.load(state + plane_rows + clean_base + rows, mask=rows < row_count, other=0.0)[None, :]
                slope = tl.load(grad_lse + clean_base + rows, mask=rows < row_count, other=0.0)
                slope = tl.where(sample == 0, slope, 0.0)[None, :]
            w, total, _, _ = logit_gradient(
                over_pivot(logits, pivot),
                tl.dot(v, tl.trans(g), input_precision="ieee"),
                load_words(first + draw_base, rows, row_count, family)[None, :],
                load_words(second + draw_base, rows, row_count, family)[None, :],
                key_word,
                factor,
                load_draw_total(state + 2 * plane_rows + draw_base, rows, row_count)[None, :],
                clean_total,
                tl.load(delta + draw_base + rows, mask=rows < row_count, other=0.0)[None, :],
                slope,
                family,
                fast_noise,
                with_lse,
            )
            dv = tl.dot(w.to(g.dtype), g, dv, input_precision="ieee")
            dk = tl.dot(total.to(q.dtype), q, dk, input_precision="ieee")
            query_pointers += wide_step * query_row_stride
            grad_pointers += wide_step * grad_row_stride

    row_base = (batch * key_heads + key_head) * key_count + wide_keys
    inside = keys[:, None] < key_count
    tl.store(
        grad_key + row_base[:, None] * features + feature[None, :],
        (dk * scale).to(grad_key.dtype.element_ty),
        mask=inside & (feature[None, :] < features),
    )
    tl.store(
        grad_value + row_base[:, None] * value_features + value_feature[None, :],
        dv.to(grad_value.dtype.element_ty),
        mask=inside & (value_feature[None, :] < value_features),
    )
