"""Parts of the kernels of ops/delta_net.py: how queries, keys, values and gates are made from the projections."""

from nanovllm.ops.kernel import jit, tl


@jit
def silu(x):
    return x * tl.sigmoid(x)


@jit
def convolve(source, channel, is_real, NUM_CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr):
    """silu(convolution) of neighbouring tokens of a row: float32 [num_tokens, num_channels], 0 where not `is_real`.

    source: (address of the inputs of token 0, stride between tokens, the row's ring, weights, token, position, first),
    where token and position are [num_tokens, 1], and `first` is the position of the row's first new token. The inputs
    before it are in the ring.
    channel: [1, num_channels].
    """
    qkvz, stride, ring, weights, token, position, first = source
    total = tl.zeros(is_real.shape, tl.float32)
    for back in tl.static_range(KERNEL_SIZE):
        at = position - back
        new = tl.load(qkvz + ((token - back) * stride + channel), is_real & (at >= first), 0.0)
        is_old = is_real & (at < first) & (at >= 0)
        old = tl.load(ring + (at % KERNEL_SIZE * NUM_CHANNELS + channel), is_old, 0.0)
        weight = tl.load(weights + channel * KERNEL_SIZE + (KERNEL_SIZE - 1 - back), channel < NUM_CHANNELS, 0.0)
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight.to(tl.float32)
    return silu(total)


@jit
def keep_input(source, channel, is_channel, NUM_CHANNELS: tl.constexpr, KERNEL_SIZE: tl.constexpr):
    """Writes the convolution's inputs at one token to the ring; `source` is that of `convolve`, with scalars."""
    qkvz, stride, ring, _, token, position, _ = source
    new = tl.load(qkvz + token * stride + channel, is_channel)
    tl.store(ring + position % KERNEL_SIZE * NUM_CHANNELS + channel, new, is_channel)


@jit
def l2_norm(x):
    return x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)


@jit
def gates(ba, head, a_log, dt_bias, is_token, NUM_V_HEADS: tl.constexpr):
    """(log of the decay, β) of a head, float32; 0 for masked tokens. ba: addresses of the tokens' rows."""
    b = tl.load(ba + head, is_token, 0.0).to(tl.float32)
    x = tl.load(ba + (NUM_V_HEADS + head), is_token, 0.0).to(tl.float32) + tl.load(dt_bias + head)
    # softplus(x) = max(x, 0) + log1p(y). The quotient corrects the rounding of 1 + y.
    y = tl.exp(-tl.abs(x))
    rounded = 1.0 + y
    log1p = tl.where(rounded == 1.0, y, tl.log(rounded) * (y / (rounded - 1.0)))
    log_decay = -tl.exp(tl.load(a_log + head)) * (tl.maximum(x, 0.0) + log1p)
    return tl.where(is_token, log_decay, 0.0), tl.where(is_token, tl.sigmoid(b), 0.0)


@jit
def gated_norm(x, squares, weight, z, eps, VALUE_DIM: tl.constexpr):
    """x / sqrt(mean(x²) + eps) × weight × silu(z), float32; `squares` is the sum of x² in a head."""
    return x * tl.rsqrt(squares / VALUE_DIM + eps) * weight * silu(z)
