"""The Triton kernels; the operations in `triton_ops.py` launch them.

Rules: values are converted to fp32 right after their load; kernels are elementwise or reductions (no `tl.dot`, which
becomes scalar code on a V100); tensors are contiguous, which a kernel cannot check; offsets fit 32 bits. Dropout
masks are not kept: they are drawn from Philox(seed, position) in the forward pass and again in the backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

IDENTITY: tl.constexpr = tl.constexpr(0)
RELU: tl.constexpr = tl.constexpr(1)
GELU: tl.constexpr = tl.constexpr(2)


@triton.jit(do_not_specialize=["rows", "alpha", "p", "seed"])
def pointwise_forward(
    x, bias, residual, y, rows, width, alpha, p, seed,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute y = alpha residual + dropout(f(x + bias)).

    Philox draws four numbers at a time, one for each of four rows.
    """
    group = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        u0, u1, u2, u3 = tl.rand4x(seed, group * width + column)
    for lane in tl.static_range(4):
        row = group * 4 + lane
        there = inside & (row < rows)
        at = row * width + column
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += shift
        if ACTIVATION == RELU:
            value = tl.where(value <= 0.0, 0.0, value)  # a NaN stays a NaN
        if ACTIVATION == GELU:
            value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
        if DROPOUT:
            u = u0 if lane == 0 else u1 if lane == 1 else u2 if lane == 2 else u3
            value = tl.where(u >= p, value / (1.0 - p), 0.0)
        if HAS_RESIDUAL:
            value += alpha * tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        tl.store(y + at, value, mask=there)


@triton.jit(do_not_specialize=["rows", "groups", "alpha", "p", "seed"])
def pointwise_backward(
    d_y, kept, bias, d_x, d_residual, d_bias, rows, width, groups, alpha, p, seed,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `pointwise_forward`; that of the bias as one row of partial sums for each program.

    `kept` is the output of a ReLU, which is 0 where no gradient passes, or the input of a GELU.
    """
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    shift_sum = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS and ACTIVATION == GELU:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    for step in range(groups):
        group = program * groups + step
        if DROPOUT and ACTIVATION != RELU:
            u0, u1, u2, u3 = tl.rand4x(seed, group * width + column)
        for lane in tl.static_range(4):
            row = group * 4 + lane
            there = inside & (row < rows)
            at = row * width + column
            gradient = tl.load(d_y + at, mask=there, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                tl.store(d_residual + at, alpha * gradient, mask=there)
            if DROPOUT:
                gradient = gradient / (1.0 - p)
                if ACTIVATION != RELU:
                    u = u0 if lane == 0 else u1 if lane == 1 else u2 if lane == 2 else u3
                    gradient = tl.where(u >= p, gradient, 0.0)
            if ACTIVATION != IDENTITY:
                value = tl.load(kept + at, mask=there, other=0.0).to(tl.float32)
                if ACTIVATION == RELU:
                    gradient = tl.where(value <= 0.0, 0.0, gradient)
                else:
                    if HAS_BIAS:
                        value += shift
                    density = 0.3989422804014327 * tl.exp(-0.5 * value * value)
                    gradient *= 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * density
            tl.store(d_x + at, gradient, mask=there)
            if HAS_BIAS:
                shift_sum += tl.where(there, gradient, 0.0)
    if HAS_BIAS:
        tl.store(d_bias + program * width + column, shift_sum, mask=inside)


@triton.jit
def row_of_uniforms(seed, row, BLOCK: tl.constexpr):
    """Draw a number in [0, 1) for each column of a row, four at a time."""
    quarter = tl.arange(0, BLOCK // 4)
    u0, u1, u2, u3 = tl.rand4x(seed, row * (BLOCK // 4) + quarter)
    return tl.interleave(tl.interleave(u0, u2), tl.interleave(u1, u3))


@triton.jit(do_not_specialize=["rows", "count", "alpha", "p", "seed", "eps"])
def norm_forward(
    x, bias, residual, weight, norm_bias, total, normed, means, inverse_deviations,
    rows, width, count, alpha, p, seed, eps,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute total = alpha residual + dropout(x + bias), or x, and normed = LayerNorm(total)."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(norm_bias + column, mask=inside, other=0.0).to(tl.float32)
    for step in range(count):
        row = tl.program_id(0) * count + step
        there = inside & (row < rows)
        at = row * width + column
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if HAS_BIAS:
            value += shift
        if DROPOUT:
            value = tl.where(row_of_uniforms(seed, row, BLOCK) >= p, value / (1.0 - p), 0.0)
        if HAS_RESIDUAL:
            value += alpha * tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
            # Rounded to the dtype in which it is kept, so that the backward pass reads the same value.
            value = value.to(total.dtype.element_ty).to(tl.float32)
            tl.store(total + at, value, mask=there)
        mean = tl.sum(tl.where(inside, value, 0.0), axis=0) / width
        centred = tl.where(inside, value - mean, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
        tl.store(normed + at, centred * inverse * w + b, mask=there)
        tl.store(means + row, mean, mask=row < rows)
        tl.store(inverse_deviations + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "count", "alpha", "p", "seed"])
def norm_backward(
    d_normed, d_total, total, weight, means, inverse_deviations, d_x, d_residual, d_weight, d_norm_bias, d_bias,
    rows, width, count, alpha, p, seed,
    HAS_D_TOTAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `norm_forward`; those of parameters as one row of partial sums for each program."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    shift_sum = tl.zeros((BLOCK,), tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    norm_bias_sum = tl.zeros((BLOCK,), tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for step in range(count):
        row = tl.program_id(0) * count + step
        there = inside & (row < rows)
        at = row * width + column
        upstream = tl.load(d_normed + at, mask=there, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        inverse = tl.load(inverse_deviations + row, mask=row < rows, other=0.0)
        value = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
        standard = tl.where(there, (value - mean) * inverse, 0.0)
        weight_sum += upstream * standard
        norm_bias_sum += upstream
        pulled = upstream * w
        along = tl.sum(pulled * standard, axis=0) / width
        level = tl.sum(pulled, axis=0) / width
        gradient = (pulled - standard * along - level) * inverse
        if HAS_D_TOTAL:
            gradient += tl.load(d_total + at, mask=there, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            tl.store(d_residual + at, alpha * gradient, mask=there)
        if DROPOUT:
            gradient = tl.where(row_of_uniforms(seed, row, BLOCK) >= p, gradient / (1.0 - p), 0.0)
        tl.store(d_x + at, gradient, mask=there)
        if HAS_BIAS:
            shift_sum += tl.where(there, gradient, 0.0)
    partial = tl.program_id(0) * width + column
    if HAS_BIAS:
        tl.store(d_bias + partial, shift_sum, mask=inside)
    tl.store(d_weight + partial, weight_sum, mask=inside)
    tl.store(d_norm_bias + partial, norm_bias_sum, mask=inside)


@triton.jit(do_not_specialize=["programs"])
def column_sums(partial, sums, programs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the rows that programs have written for the gradient of each parameter."""
    parameter = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        at = (parameter * programs + row)[:, None] * width + column[None, :]
        total += tl.load(partial + at, mask=(row < programs)[:, None] & inside[None, :], other=0.0)
    tl.store(sums + parameter * width + column, tl.sum(total, axis=0), mask=inside)


@triton.jit(do_not_specialize=["rows", "queries", "stride_b", "stride_h", "stride_t", "scale"])
def softmax_forward(
    scores, mask, weights, rows, keys, queries, heads, stride_b, stride_h, stride_t, scale,
    HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the softmax over the keys that each query sees; rows in the order (sentence, head, query)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (key < keys)
    query = row % queries
    visible = there
    if CAUSAL:
        visible = visible & (key <= query + keys - queries)
    if HAS_MASK:
        place = row // (heads * queries) * stride_b + row // queries % heads * stride_h + query * stride_t + key
        visible = visible & (tl.load(mask + place, mask=there, other=0) != 0)
    at = row * keys + key
    value = tl.load(scores + at, mask=visible, other=0.0).to(tl.float32) * scale
    value = tl.where(visible, value, float("-inf"))
    greatest = tl.max(value, axis=1)[:, None]
    # A query that sees nothing gets zeros.
    power = tl.exp(value - tl.where(greatest == float("-inf"), 0.0, greatest))
    total = tl.sum(power, axis=1)[:, None]
    tl.store(weights + at, power / tl.where(total == 0.0, 1.0, total), mask=there)


@triton.jit(do_not_specialize=["rows", "scale"])
def softmax_backward(
    d_weights, weights, d_scores, rows, keys, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute d_scores = scale w (d_w - sum_keys d_w w)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (key < keys)
    at = row * keys + key
    weight = tl.load(weights + at, mask=there, other=0.0).to(tl.float32)
    upstream = tl.load(d_weights + at, mask=there, other=0.0).to(tl.float32)
    along = tl.sum(weight * upstream, axis=1)[:, None]
    tl.store(d_scores + at, scale * weight * (upstream - along), mask=there)


@triton.jit(do_not_specialize=["rows", "width"])
def row_sums(logits, places, sums, rows, width, stride, BLOCK: tl.constexpr):
    """Compute for each row the greatest logit, sum exp(z - greatest), the target's logit or 0, and the sum of all.

    Rows have ``stride`` numbers, of which the first ``width`` are logits. All are loaded, so that loads are wide.
    """
    row = tl.program_id(0)
    greatest = tl.full((BLOCK,), float("-inf"), tl.float32)
    power = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, stride, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, loaded = column < width, column < stride
        value = tl.load(logits + row * stride + column, mask=loaded, other=0.0).to(tl.float32)
        total += tl.where(inside, value, 0.0)
        value = tl.where(inside, value, float("-inf"))
        higher = tl.maximum(greatest, value)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        power = power * tl.exp(greatest - level) + tl.exp(value - level)
        greatest = higher
    top = tl.max(greatest, axis=0)
    level = tl.where(top == float("-inf"), 0.0, top)
    place = tl.load(places + row)
    target = tl.load(logits + row * stride + tl.maximum(place, 0), mask=place >= 0, other=0.0).to(tl.float32)
    tl.store(sums + row, top)
    tl.store(sums + rows + row, tl.sum(power * tl.exp(greatest - level), axis=0))
    tl.store(sums + 2 * rows + row, target)
    tl.store(sums + 3 * rows + row, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["rows", "width"])
def row_divergences(
    logits_p, logits_q, log_totals_p, log_totals_q, divergences, rows, width, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute KL(p || q) and KL(q || p) of each row."""
    row = tl.program_id(0)
    log_total_p = tl.load(log_totals_p + row)
    log_total_q = tl.load(log_totals_q + row)
    there = tl.zeros((BLOCK,), tl.float32)
    back = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, stride, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, loaded = column < width, column < stride
        log_p = tl.load(logits_p + row * stride + column, mask=loaded, other=0.0).to(tl.float32) - log_total_p
        log_q = tl.load(logits_q + row * stride + column, mask=loaded, other=0.0).to(tl.float32) - log_total_q
        there += tl.where(inside, tl.exp(log_p) * (log_p - log_q), 0.0)
        back += tl.where(inside, tl.exp(log_q) * (log_q - log_p), 0.0)
    tl.store(divergences + row, tl.sum(there, axis=0))
    tl.store(divergences + rows + row, tl.sum(back, axis=0))


@triton.jit(do_not_specialize=["rows", "width", "on_target", "on_all", "pull"])
def row_gradients(
    logits_p, logits_q, log_totals_p, log_totals_q, divergences, places, row_weights,
    rows, width, stride, on_target, on_all, pull,
    PAIR: tl.constexpr, TAUGHT: tl.constexpr, ONE_WAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn logits into the gradients of the loss with respect to them, in place; zeros after the first ``width``.

    If q only teaches, its logits stay, and with ``ONE_WAY`` the divergence is KL(q || p).
    """
    row = tl.program_id(0)
    place = tl.load(places + row)
    row_weight = tl.load(row_weights + row)
    log_total_p = tl.load(log_totals_p + row)
    share = 1.0
    if PAIR:
        log_total_q = tl.load(log_totals_q + row)
        there = tl.load(divergences + row)
        back = tl.load(divergences + rows + row)
        share = 1.0 if TAUGHT else 0.5
    for start in range(0, stride, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, loaded = column < width, column < stride
        at = row * stride + column
        constant = on_all + tl.where(column == place, on_target, 0.0)
        log_p = tl.load(logits_p + at, mask=loaded, other=0.0).to(tl.float32) - log_total_p
        p = tl.exp(log_p)
        d_p = share * (p - constant)
        if PAIR:
            log_q = tl.load(logits_q + at, mask=loaded, other=0.0).to(tl.float32) - log_total_q
            q = tl.exp(log_q)
            if not TAUGHT:
                d_q = share * (q - constant) + pull * 0.5 * (q * (log_q - log_p - back) + q - p)
            if ONE_WAY:
                d_p += pull * (p - q)
            else:
                d_p += pull * 0.5 * (p * (log_p - log_q - there) + p - q)
            if not TAUGHT:
                tl.store(logits_q + at, tl.where(inside, d_q * row_weight, 0.0), mask=loaded)
        tl.store(logits_p + at, tl.where(inside, d_p * row_weight, 0.0), mask=loaded)
