# mypy: disable-error-code="no-untyped-def"
"""Device side of the Triton backend: the kernels for the gradients of queries, spread and additive mask."""

import triton
import triton.language as tl

from bayesian_attention.engine.triton_backward import load_draw_total, logit_gradient
from bayesian_attention.engine.triton_forward import keys_seen, load_tile, masked_logits, over_pivot
from bayesian_attention.engine.triton_noise import LN2, key_words, load_words, noise_factor


@triton.jit
def query_kernel(
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
    grad_query,
    noise_dots,
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
    with_spread: tl.constexpr,
    features: tl.constexpr,
    value_features: tl.constexpr,
    block_features: tl.constexpr,
    block_value_features: tl.constexpr,
    even_keys: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Gradient of one block of queries of one head, summed over draws and keys.

    With ``with_spread`` also, a row, the sum of dφ times the natural unit noise, from which the host makes the
    gradient of the spread.
    """
    block_count = tl.cdiv(row_count, block_rows)
    block = tl.program_id(0) % block_count
    rest = tl.program_id(0) // block_count
    if is_causal:
        block = block_count - 1 - block
    head = (rest % head_count).to(tl.int64)
    batch = (rest // head_count).to(tl.int64)

    rows = block * block_rows + tl.arange(0, block_rows)
    wide_rows = rows.to(tl.int64)
    columns = tl.arange(0, block_keys)
    wide_columns = columns.to(tl.int64)
    feature = tl.arange(0, block_features)
    value_feature = tl.arange(0, block_value_features)
    inside = rows < row_count
    wide_step = tl.full((), block_keys, tl.int64)

    query += batch * query_batch_stride + head * query_head_stride
    key += batch * key_batch_stride + (head // group_size) * key_head_stride
    value += batch * value_batch_stride + (head // group_size) * value_head_stride
    grad_output += batch * grad_batch_stride + head * grad_head_stride
    if mask_kind != "none":
        mask += batch * mask_batch_stride + head * mask_head_stride
    clean_base = (batch * head_count + head) * row_count
    factor = noise_factor(spread, head, family)

    q = load_tile(
        query + wide_rows[:, None] * query_row_stride + feature[None, :] * query_feature_stride,
        rows, row_count, feature, features, block_features, False,
    )  # fmt: skip
    pivot = tl.load(state + clean_base + rows, mask=inside, other=0.0)[:, None]
    plane_rows = tl.cast(batch_count, tl.int64) * head_count * row_count
    clean_total = 0.0
    clean_slope = 0.0
    if with_lse:
        clean_total = tl.load(state + plane_rows + clean_base + rows, mask=inside, other=0.0)[:, None]
        clean_slope = tl.load(grad_lse + clean_base + rows, mask=inside, other=0.0)[:, None]
    dq = tl.zeros((block_rows, block_features), tl.float32)
    dots = tl.zeros((block_rows,), tl.float32)
    seen = keys_seen((block + 1) * block_rows, key_count, query_offset, is_causal)

    for turn in range(0, sample_count):
        sample = tl.cast(turn, tl.int64)
        draw_base = ((sample * batch_count + batch) * head_count + head) * row_count
        g = load_tile(
            grad_output + sample * grad_sample_stride
            + wide_rows[:, None] * grad_row_stride + value_feature[None, :] * grad_feature_stride,
            rows, row_count, value_feature, value_features, block_value_features, False,
        )  # fmt: skip
        row_first = load_words(first + draw_base, rows, row_count, family)[:, None]
        row_second = load_words(second + draw_base, rows, row_count, family)[:, None]
        draw_total = load_draw_total(state + 2 * plane_rows + draw_base, rows, row_count)[:, None]
        row_delta = tl.load(delta + draw_base + rows, mask=inside, other=0.0)[:, None]
        slope = clean_slope
        if with_lse:
            slope = tl.where(turn == 0, clean_slope, 0.0)
        key_pointers = key + wide_columns[:, None] * key_row_stride + feature[None, :] * key_feature_stride
        value_pointers = (
            value + wide_columns[:, None] * value_row_stride + value_feature[None, :] * value_feature_stride
        )
        dot = tl.zeros((block_rows,), tl.float32)
        drift = tl.zeros((block_rows,), tl.float32)
        mean_noise = tl.zeros((block_rows,), tl.float32)
        for start in range(0, seen, block_keys):
            keys = start + columns
            k = load_tile(key_pointers, keys, key_count, feature, features, block_features, even_keys)
            v = load_tile(
                value_pointers, keys, key_count, value_feature, value_features, block_value_features, even_keys
            )
            logits = masked_logits(
                tl.dot(q, tl.trans(k), input_precision="ieee"), scale, mask, mask_row_stride, mask_key_stride,
                rows[:, None], keys[None, :], row_count, key_count, query_offset, mask_kind, is_causal, even_keys,
            )  # fmt: skip
            w, total, drawn, noise = logit_gradient(
                over_pivot(logits, pivot), tl.dot(g, tl.trans(v), input_precision="ieee"), row_first, row_second,
                key_words(keys)[None, :], factor, draw_total, clean_total, row_delta, slope,
                family, fast_noise, with_lse,
            )  # fmt: skip
            if with_spread:
                dot += tl.sum(drawn * noise, 1)
                drift += tl.sum(drawn, 1)
                mean_noise += tl.sum(w * noise, 1)
            dq = tl.dot(total.to(k.dtype), k, dq, input_precision="ieee")
            key_pointers += wide_step * key_row_stride
            value_pointers += wide_step * value_row_stride
        # The gradients of a draw's logits sum to 0 but for the rounding of D, which comes from the rounded output and
        # is the same for all keys: about the mean noise it has no effect.
        dots += dot - drift * mean_noise

    tl.store(
        grad_query + (clean_base + wide_rows[:, None]) * features + feature[None, :],
        (dq * scale).to(grad_query.dtype.element_ty),
        mask=inside[:, None] & (feature[None, :] < features),
    )
    if with_spread:
        tl.store(noise_dots + clean_base + rows, dots * LN2, mask=inside)


@triton.jit
def mask_kernel(
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
    grad_mask,
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
    mask_batches,
    mask_heads,
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
    is_causal: tl.constexpr,
    with_lse: tl.constexpr,
    sum_rows: tl.constexpr,
    sum_keys: tl.constexpr,
    features: tl.constexpr,
    value_features: tl.constexpr,
    block_features: tl.constexpr,
    block_value_features: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Gradient of one tile of an additive mask, summed over everything the mask broadcasts along.

    A pass of its own, because each program must own its tile: the mask of one example may have one tile for all
    heads (a loop over heads here), or one row for all queries (a loop over rows).
    """
    row_blocks = 1 if sum_rows else tl.cdiv(row_count, block_rows)
    key_blocks = 1 if sum_keys else tl.cdiv(key_count, block_keys)
    first_keys = tl.program_id(0) % key_blocks * block_keys
    rest = tl.program_id(0) // key_blocks
    first_rows = rest % row_blocks * block_rows
    rest = rest // row_blocks
    mask_head = (rest % mask_heads).to(tl.int64)
    mask_batch = (rest // mask_heads).to(tl.int64)
    heads_each = head_count // mask_heads
    batches_each = batch_count // mask_batches
    rows_end = row_count if sum_rows else first_rows + 1
    keys_end = key_count if sum_keys else first_keys + 1

    feature = tl.arange(0, block_features)
    value_feature = tl.arange(0, block_value_features)
    tile = tl.zeros((block_rows, block_keys), tl.float32)

    plane_rows = tl.cast(batch_count, tl.int64) * head_count * row_count
    for turn in range(0, batches_each * heads_each * sample_count):
        sample = tl.cast(turn % sample_count, tl.int64)
        head = mask_head * heads_each + turn // sample_count % heads_each
        batch = mask_batch * batches_each + turn // (sample_count * heads_each)
        factor = noise_factor(spread, head, family)
        clean_base = (batch * head_count + head) * row_count
        draw_base = ((sample * batch_count + batch) * head_count + head) * row_count
        mask_base = mask + batch * mask_batch_stride + head * mask_head_stride
        for row_start in range(first_rows, rows_end, block_rows):
            rows = row_start + tl.arange(0, block_rows)
            wide_rows = rows.to(tl.int64)
            inside = rows < row_count
            q = load_tile(
                query + batch * query_batch_stride + head * query_head_stride
                + wide_rows[:, None] * query_row_stride + feature[None, :] * query_feature_stride,
                rows, row_count, feature, features, block_features, False,
            )  # fmt: skip
            g = load_tile(
                grad_output + sample * grad_sample_stride + batch * grad_batch_stride + head * grad_head_stride
                + wide_rows[:, None] * grad_row_stride + value_feature[None, :] * grad_feature_stride,
                rows, row_count, value_feature, value_features, block_value_features, False,
            )  # fmt: skip
            row_first = load_words(first + draw_base, rows, row_count, family)[:, None]
            row_second = load_words(second + draw_base, rows, row_count, family)[:, None]
            draw_total = load_draw_total(state + 2 * plane_rows + draw_base, rows, row_count)[:, None]
            pivot = tl.load(state + clean_base + rows, mask=inside, other=0.0)[:, None]
            row_delta = tl.load(delta + draw_base + rows, mask=inside, other=0.0)[:, None]
            clean_total = 0.0
            slope = 0.0
            if with_lse:
                clean_total = tl.load(state + plane_rows + clean_base + rows, mask=inside, other=0.0)[:, None]
                slope = tl.load(grad_lse + clean_base + rows, mask=inside, other=0.0)
                slope = tl.where(sample == 0, slope, 0.0)[:, None]
            seen = keys_seen(row_start + block_rows, key_count, query_offset, is_causal)
            for key_start in range(first_keys, tl.minimum(keys_end, seen), block_keys):
                keys = key_start + tl.arange(0, block_keys)
                wide_keys = keys.to(tl.int64)
                k = load_tile(
                    key + batch * key_batch_stride + (head // group_size) * key_head_stride
                    + wide_keys[:, None] * key_row_stride + feature[None, :] * key_feature_stride,
                    keys, key_count, feature, features, block_features, False,
                )  # fmt: skip
                v = load_tile(
                    value + batch * value_batch_stride + (head // group_size) * value_head_stride
                    + wide_keys[:, None] * value_row_stride + value_feature[None, :] * value_feature_stride,
                    keys, key_count, value_feature, value_features, block_value_features, False,
                )  # fmt: skip
                logits = masked_logits(
                    tl.dot(q, tl.trans(k), input_precision="ieee"), scale, mask_base, mask_row_stride,
                    mask_key_stride, rows[:, None], keys[None, :], row_count, key_count, query_offset,
                    "additive", is_causal, False,
                )  # fmt: skip
                _, total, _, _ = logit_gradient(
                    over_pivot(logits, pivot), tl.dot(g, tl.trans(v), input_precision="ieee"), row_first, row_second,
                    key_words(keys)[None, :], factor, draw_total, clean_total, row_delta, slope,
                    family, fast_noise, with_lse,
                )  # fmt: skip
                tile += total

    base = mask_batch * mask_heads + mask_head
    rows = first_rows + tl.arange(0, block_rows)
    keys = first_keys + tl.arange(0, block_keys)
    if sum_rows and sum_keys:
        tl.store(grad_mask + base, tl.sum(tl.sum(tile, 1), 0).to(grad_mask.dtype.element_ty))
    elif sum_rows:
        tl.store(
            grad_mask + base * key_count + keys,
            tl.sum(tile, 0).to(grad_mask.dtype.element_ty),
            mask=keys < key_count,
        )
    elif sum_keys:
        tl.store(
            grad_mask + base * row_count + rows,
            tl.sum(tile, 1).to(grad_mask.dtype.element_ty),
            mask=rows < row_count,
        )
    else:
        tl.store(
            grad_mask + (base * row_count + rows.to(tl.int64)[:, None]) * key_count + keys[None, :],
            tile.to(grad_mask.dtype.element_ty),
            mask=(rows[:, None] < row_count) & (keys[None, :] < key_count),
        )
