"""NVFP4: a number in 4.5 bits, and the matrix product of two such tensors.

    16 consecutive values along the last axis K form a block:

        | 16 codes of 4 bits (E2M1) | 1 block scale of 8 bits (E4M3) |   4 + 8/16 = 4.5 bits each
        global scale: one fp32 for a weight matrix, one for each row of activations

        x  =  e2m1 * s_block * s_global         e2m1 in {0, .5, 1, 1.5, 2, 3, 4, 6} and a sign

Three scales because each alone is too coarse: E2M1 spans a factor of 12, E4M3 block scales follow
the data block by block, and s_global moves the block scales into E4M3's range, so that the largest
block gets the scale 448 and the largest value the code 6:  s_global = amax / (6 * 448).

Rounding is to nearest, ties to even, everywhere. Both operands of a product in this format make a
W4A4 product (4-bit weights, 4-bit activations), which the FP4 units of Blackwell GPUs compute
natively. This file *emulates* it in plain PyTorch on any device: the decoded operands are exact in
fp32 (and in bf16), so only the order of summation differs from the hardware.

Run `python nvfp4.py` for a self-check and a table of errors.
"""
from typing import NamedTuple

import torch

BLOCK = 16                # values that share one block scale
E2M1_MAX = 6.0            # the largest magnitude of a 4-bit code
E4M3_MAX = 448.0          # the largest finite block scale
MIN_GLOBAL = 2.0**-126    # smallest normal fp32: an almost-zero tensor must not divide by zero
# Code c in 0..7 means MAGNITUDES[c]; bit 3 is the sign, so that c + 8 means -MAGNITUDES[c].
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES))                          # (16,)
# What one stored byte means: element 2j sits in the LOW nibble, element 2j + 1 in the high one.
BYTE_TO_PAIR = torch.stack([E2M1[torch.arange(256) & 15], E2M1[torch.arange(256) >> 4]], dim=1)


class NVFP4(NamedTuple):
    """A tensor of logical shape (..., K), stored in 4.5 bits a value."""
    codes: torch.Tensor         # (..., K/2) uint8, two E2M1 codes a byte
    scales: torch.Tensor        # (..., K/16) float8_e4m3fn, one for each block
    global_scale: torch.Tensor  # fp32: (..., 1) row-scaled; (E, 1, 1) for (E, N, K); else ()


# --- Quantize ------------------------------------------------------------------------------------

def e2m1_encode(v):
    """Round to the nearest E2M1 value, ties to the even code; v is clipped to [-6, 6].

    v: (...) fp32, already divided by its scales. Returns (...) uint8 codes 0..15.
    The grid's step is .5 below 2, 1 below 4 and 2 above. `torch.round` rounds halves to even, and
    the offsets 2 and 4 are even, so ties go to the even code in all three ranges: 2.5 lies between
    2.0 (code 4) and 3.0 (code 5), rounds to 2, and 2 + 2 is code 4.
    """
    m = v.abs().clamp(max=E2M1_MAX)
    code = torch.where(m < 2, (2 * m).round(),
                       torch.where(m < 4, m.round() + 2, (m / 2).round() + 4))
    return code.to(torch.uint8) + 8 * (v < 0).to(torch.uint8)


def quantize(x, row_scaled=False, global_scale=None):
    """Quantize x to NVFP4.

    x: (..., K) of any float dtype, strided as it likes; arithmetic is fp32, without gradient.
    row_scaled: one global scale a row (activations: a token's code then never depends on the
        other tokens of its batch) instead of one a matrix (weights).
    global_scale: use this one instead of amax / 2688 (the residual pass of rac.py does).
    Raises ValueError if K is not a positive multiple of 16, or if x holds NaN or infinity.
    """
    K = x.shape[-1]
    if K == 0 or K % BLOCK:
        raise ValueError(f"NVFP4 needs K, the last axis, to be a positive multiple of {BLOCK}, got "
                         f"K = {K} (shape {tuple(x.shape)}): pad the tensor with zeros.")
    blocks = x.detach().float().unflatten(-1, (K // BLOCK, BLOCK))        # (..., K/16, 16) fp32
    block_amax = blocks.abs().amax(dim=-1)                                # (..., K/16); keeps NaN
    if not torch.isfinite(block_amax).all():
        raise ValueError(f"NVFP4 cannot hold NaN or infinity, and a tensor of shape "
                         f"{tuple(x.shape)} has some: find the step that made them.")

    # Divisors are tensors: a GPU divides by a Python number by multiplying with its reciprocal,
    # which moves some roundings, and both sides must round alike.
    six, largest = block_amax.new_tensor(E2M1_MAX), block_amax.new_tensor(E2M1_MAX * E4M3_MAX)

    # Level 1: the global scale puts the largest block scale at 448.
    if global_scale is None:
        if row_scaled:
            amax = block_amax.amax(dim=-1, keepdim=True)                  # (..., 1)
        elif x.numel() == 0:                                              # (E, 1, 1) or ()
            amax = block_amax.new_zeros((*x.shape[:-2], 1, 1) if x.ndim > 2 else ())
        else:
            amax = block_amax.amax((-2, -1), keepdim=True) if x.ndim > 2 else block_amax.amax()
        global_scale = (amax / largest).clamp(min=MIN_GLOBAL)
        global_scale = torch.where(amax == 0, 1.0, global_scale)          # all zero: any scale does

    # Level 2: the block scale puts the block's largest value near the code 6. It has no lower
    # floor: a block whose values lie below amax / 458752 gets the scale 0 and is 0. (Clamped before
    # the cast, which turned everything above 464 into NaN before PyTorch 2.13.)
    scales = (block_amax / six / global_scale).clamp(max=E4M3_MAX)
    scales = scales.to(torch.float8_e4m3fn)                               # (..., K/16)

    # Level 3: the codes. A true division: multiplying by a reciprocal would move some ties.
    step = (scales.float() * global_scale)[..., None]                     # (..., K/16, 1) fp32
    codes = e2m1_encode(torch.where(step > 0, blocks / step, 0.0)).flatten(-2)   # (..., K) uint8
    return NVFP4(codes[..., 0::2] | codes[..., 1::2] << 4, scales, global_scale)


# --- Dequantize ----------------------------------------------------------------------------------

def decode_e2m1(codes):
    """Packed codes (..., K/2) uint8 to their E2M1 values in blocks, (..., K/16, 16) fp32."""
    table = BYTE_TO_PAIR.to(codes.device)
    pairs = table.index_select(0, codes.flatten().int())                  # (..., 2): low, high
    return pairs.view(*codes.shape[:-1], 2 * codes.shape[-1] // BLOCK, BLOCK)


def block_values(q, dtype=torch.float32):
    """e2m1 * s_block, the GEMM operand: (..., K). Exact in fp32, fp16 and bf16.

    (2 significant bits times 4 make 6, and bf16 has 8.) The product with s_global is *not* exact in
    bf16, which is why s_global multiplies the result of a GEMM and never its operands.
    """
    return (decode_e2m1(q.codes) * q.scales.float()[..., None]).flatten(-2).to(dtype)


def dequantize(q, dtype=torch.float32):
    """The values a quantized tensor stands for: (..., K), computed in fp32 and then cast."""
    step = q.scales.float() * q.global_scale                              # (..., K/16) fp32
    return (decode_e2m1(q.codes) * step[..., None]).flatten(-2).to(dtype)


# ---------------------------------------------------------------------------------------------
# Products. Both operands are NVFP4, sums are fp32, the global scales come last:
#
#     Y[m, n] = s_x[m] * s_w * sum_k x[m, k] * w[n, k]          x, w = e2m1 * s_block
#
# rac.py adds a second pass over some blocks of K. It multiplies the same weights and shares the
# row's s_x, so the two passes share one sum: (x + r) * w. In fp32 that addition is exact: both are
# multiples of 2^-10 below 2^13. (True fp32 is meant: no autocast, no TF32.)
# ---------------------------------------------------------------------------------------------

def grouped_matmul(x, w, counts, out_dtype=torch.float32, residual=None, blocks=None):
    """The W4A4 product of a Mixture-of-Experts layer: each row meets its own expert's matrix.

    x: NVFP4 (M, K), row-scaled, rows sorted by expert; w: NVFP4 (E, N, K); counts: (E,) integers,
    rows of each expert (zeros allowed). residual: NVFP4 (M, 16 * len(blocks)) of rac.py, in x's
    global scale, which is added to x on the 16-blocks `blocks` (distinct ids). Returns (M, N).
    Raises ValueError if the shapes or the counts do not fit.
    """
    M, K = x.codes.shape[0], 2 * x.codes.shape[1]
    E, N, K_w = w.codes.shape[0], w.codes.shape[1], 2 * w.codes.shape[2]
    counts = counts.tolist()
    if K != K_w or len(counts) != E or sum(counts) != M or min(counts, default=0) < 0:
        raise ValueError(f"grouped_matmul: x is ({M}, {K}) and w is ({E}, {N}, {K_w}), so K must "
                         f"be equal and counts must be {E} numbers >= 0 that add up to {M}; got "
                         f"{len(counts)} that add up to {sum(counts)}.")
    if w.global_scale.shape != (E, 1, 1):
        raise ValueError(f"grouped_matmul: w needs one global scale an expert, ({E}, 1, 1); got "
                         f"{tuple(w.global_scale.shape)}: quantize it without row_scaled.")
    a = block_values(x).unflatten(-1, (-1, BLOCK))                        # (M, K/16, 16) fp32
    if residual is not None:
        a = a.index_add(1, blocks, block_values(residual).unflatten(-1, (-1, BLOCK)))
    rows = a.flatten(-2).split(counts)                                    # E x (counts[e], K)
    b = block_values(w)                                                   # (E, N, K) fp32
    y = torch.cat([rows[e] @ b[e].T * w.global_scale[e] for e in range(E)])   # (M, N) fp32
    return (y * x.global_scale).to(out_dtype)


def matmul(x, w, out_dtype=torch.float32, residual=None, blocks=None):
    """The W4A4 product (M, K) x (N, K) -> (M, N): `grouped_matmul` with a single expert."""
    one = NVFP4(w.codes[None], w.scales[None], w.global_scale.reshape(1, 1, 1))
    counts = torch.tensor([x.codes.shape[0]])
    return grouped_matmul(x, one, counts, out_dtype, residual, blocks)


# --- Self-check and a table ----------------------------------------------------------------------

if __name__ == "__main__":
    torch.manual_seed(0)

    # Every code and every rounding tie, at scale 1 (a block with a 6 and s_global 1/448 has it).
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for sign in (1, -1):
        q = quantize(sign * ties, global_scale=torch.tensor(1.0))
        assert torch.equal(dequantize(q), sign * expected), "a tie was rounded the wrong way"
    zero = quantize(torch.zeros(2, 32))
    assert zero.global_scale == 1 and torch.equal(dequantize(zero), torch.zeros(2, 32))
    x, w = torch.randn(33, 144), torch.randn(4, 24, 144)
    xq, wq, counts = quantize(x, row_scaled=True), quantize(w), torch.tensor([5, 0, 20, 8])
    exact = torch.cat([rows.double() @ dequantize(wq)[e].double().T
                       for e, rows in enumerate(dequantize(xq).split(counts.tolist()))])
    error = (grouped_matmul(xq, wq, counts) - exact).norm() / exact.norm()
    assert error < 1e-6, f"the product is off by {error:.1e}"
    print(f"self-check passed: ties, zeros, grouped product to {error:.0e} of float64\n")

    print("Relative error of Q(X), norm(Q(X) - X) / norm(X), for X of shape (256, 1024):\n")
    print("| values                        | bf16   | fp8 e4m3, row scale | nvfp4, one scale | "
          "nvfp4, row scale |\n|---|---|---|---|---|")
    gaussian = torch.randn(256, 1024)
    outliers = gaussian * torch.where(torch.arange(1024) % 256 == 7, 30.0, 1.0)
    ranges = gaussian * torch.logspace(-4, 4, 256)[:, None]
    for name, x in (("gaussian", gaussian), ("4 of 1024 channels 30 times", outliers),
                    ("rows from 1e-4 to 1e4", ranges)):
        row = x.abs().amax(-1, keepdim=True) / E4M3_MAX
        versions = (x.bfloat16().float(), (x / row).to(torch.float8_e4m3fn).float() * row,
                    dequantize(quantize(x)), dequantize(quantize(x, row_scaled=True)))
        # Row by row, so that the largest rows do not hide what happened to the small ones.
        errors = [((v - x).norm(dim=1) / x.norm(dim=1)).mean().item() for v in versions]
        print(f"| {name:29} | {errors[0]:.4f} | {errors[1]:.4f}              | {errors[2]:.4f}"
              f"           | {errors[3]:.4f}           |")
