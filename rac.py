"""Residual Activation Compensation (RAC): a second FP4 pass where the first one lost most.

The rollout rounds activations X to NVFP4, and what is lost is the residual R = X - Q(X). RAC
quantizes R too, on the blocks S of the reduction axis where it is largest, and adds its product:

    Y  =  Q(X) Wq^T  +  Q(R)[:, S] Wq[:, S]^T                 (QUADS, arXiv 2607.15810)

Both terms are W4A4 products, so FP4 units can do all the work. A ratio of 50% costs half of the
FLOPs again, and half of 4.5 bits more for each activation value. Ratio 0 is plain NVFP4; at ratio 1
activations have about 8 bits and their error (`python rac.py` prints it) falls below 1%. S is made
of whole 16-blocks, so the weights' codes and scales serve as they are, and fixed between two weight
syncs, so that a token's activations never depend on the other tokens of its batch.
"""
from __future__ import annotations

import torch

from nvfp4 import (BLOCK, NVFP4, dequantize, grouped_matmul, jit, kernel_path, matmul, quantize,
                   tl, triton)

# --- 1. Measure the residual ---------------------------------------------------------------------

def residual_of(x, q):
    """What quantization lost: x - dequantize(q), (M, K) fp32, with 0 where q is exact."""
    return x.float() - dequantize(q)


def block_energy(residual):
    """Squared residual of each 16-block, summed over rows: (M, K) -> (K/16,) fp32."""
    return residual.square().reshape(-1, residual.shape[-1] // BLOCK, BLOCK).sum((0, 2))


def residual_energy(x):
    """Squared residual of each 16-block of x (row-scaled), summed over rows: (..., K) -> (K/16,)
    fp32. Raises ValueError if K is not a multiple of 16 or x is not finite."""
    return block_energy(residual_of(x, quantize(x, row_scaled=True)))


# --- 2. Choose the blocks ------------------------------------------------------------------------

def select_blocks(energy, ratio, coverage=0):
    """The blocks with the largest residual: (K/16,) -> LongTensor of round(ratio * K/16) ids.

    Ascending; among equals the lower id wins, on every device. ValueError outside 0..1. coverage
    (beyond the paper), if not 0: as few blocks as hold this share of the energy, in a list of K/16
    places. K/16, no block, fills it up: its length never changes, so a sync can overwrite it."""
    if not (0 <= ratio <= 1 and 0 <= coverage <= 1):
        raise ValueError(f"--rac-ratio, --rac-coverage must be 0 to 1; got {ratio}, {coverage}.")
    if not torch.isfinite(energy).all():
        raise ValueError("the residual energy is not finite: activations are NaN or too large.")
    largest, order = energy.sort(descending=True, stable=True)            # (K/16,) each
    if coverage:
        held = largest.double().cumsum(0)       # (K/16,), by a block and all before it
        return order.masked_fill(held - largest >= coverage * held[-1], len(energy)).sort().values
    return order[:round(ratio * len(energy))].sort().values               # (S,)


# --- 3. Apply the second pass --------------------------------------------------------------------

def take(x, blocks, width):
    """The chosen blocks, each of `width` columns, in order: (M, K/16 * width) -> (M, S * width)."""
    return x.unflatten(-1, (-1, width))[:, blocks].flatten(-2)


def compensate_ref(x, blocks):
    """`compensate`, which explains it, in plain PyTorch."""
    q = quantize(x, row_scaled=True)
    residual = residual_of(x, q)                                          # (M, K) fp32
    if len(blocks) == 0:                                                  # ratio 0: plain NVFP4
        return q, NVFP4(q.codes[:, :0], q.scales[:, :0], q.global_scale), block_energy(residual)
    r = quantize(take(residual, blocks, BLOCK), global_scale=q.global_scale)
    return q, r, block_energy(residual)


# The same in one kernel that reads x once: a program keeps a row, (C, 16) with C the power of two
# from K/16 on, in registers. Bit for bit the reference: so div_rn, no fused multiply-adds, and
# rounding by arithmetic (Triton's interpreter casts to E4M3 wrongly).

@jit
def round_to_grid(v, NORMAL: tl.constexpr, MANTISSA: tl.constexpr):
    """fp32 v to the nearest number, ties to even, of a format with so many mantissa bits and NORMAL
    its smallest normal number. The large number's last bit is worth one step at v."""
    bits = tl.maximum(tl.abs(v), NORMAL).to(tl.int32, bitcast=True)
    large = (bits & 0x7F800000).to(tl.float32, bitcast=True) * (1.5 * 2**(23 - MANTISSA))
    return v + large - large


@jit
def encode(v, NORMAL: tl.constexpr, MANTISSA: tl.constexpr):
    """The format's bits of a number on its grid: NORMAL moves to fp32's own smallest normal."""
    return (v * (2.0**-126 / NORMAL)).to(tl.int32, bitcast=True) >> (23 - MANTISSA)


@jit
def quantize_blocks(v, s_global):
    """Blocks v (C, 16) fp32 -> scale bytes (C,), scales, steps (C, 1), words (C, 2) int32 of eight
    codes each, and values e2m1 (C, 16)."""
    amax = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.div_rn(tl.div_rn(amax, 6.0), s_global), 448.0)
    scale = round_to_grid(scale, 2.0**-6, 3)                              # (C,), E4M3
    step = (scale * s_global)[:, None]
    q = tl.div_rn(v, tl.where(step > 0, step, float("inf")))              # 0 where the step is 0
    value = round_to_grid(tl.clamp(q, -6.0, 6.0), 1.0, 1)                 # (C, 16), E2M1
    code = encode(value, 1.0, 1)                                          # its sign is bit 9
    words = tl.reshape(code & 7 | code >> 6 & 8, (v.shape[0], 2, 8)) << 4 * tl.arange(0, 8)
    return encode(scale, 2.0**-6, 3).to(tl.uint8), scale[:, None], step, tl.sum(words, 2), value


@jit
def compensate_kernel(x, x_stride, codes, scales, s_x, r_codes, r_scales, blocks, energy, operand,
                      KB, S, operand_stride, C: tl.constexpr, C_S: tl.constexpr,
                      MEASURE: tl.constexpr, FOLD: tl.constexpr):
    """x (M, 16 KB) -> codes (M, 2 KB) int32, scales (M, KB) uint8, s_x (M,) fp32; of the S blocks,
    ascending, r_codes (M, 2 S) and r_scales (M, S); MEASURE: energy (M, KB) fp32; FOLD: operand
    (M, operand_stride) fp16 as nvfp4.fold makes it. NaN's bits exceed all others, so s_x is NaN."""
    row = tl.program_id(0).to(tl.int64)
    kb, i, half = tl.arange(0, C), tl.arange(0, 16)[None, :], tl.arange(0, 2)[None, :]
    ok = kb < KB
    v = tl.load(x + row * x_stride + 16 * kb[:, None] + i, ok[:, None], 0.0).to(tl.float32)
    bits = tl.max(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    s_global = tl.div_rn(bits.to(tl.float32, bitcast=True), 2688.0)
    s_global = tl.where(bits == 0, 1.0, tl.where(s_global < 2.0**-126, 2.0**-126, s_global))
    tl.store(s_x + row, s_global)
    byte, scale, step, words, value = quantize_blocks(v, s_global)
    tl.store(scales + row * KB + kb, byte, ok)
    tl.store(codes + row * 2 * KB + 2 * kb[:, None] + half, words, ok[:, None])
    folded = value * scale                                                # (C, 16), exact
    residual = v - value * step                                           # (C, 16)
    if MEASURE:
        tl.store(energy + row * KB + kb, tl.sum(residual * residual, 1), ok)
    if C_S > 0:
        s = tl.arange(0, C_S)
        ids = tl.load(blocks + s, s < S, KB).to(tl.int32)                 # KB: no block
        chosen = tl.histogram(ids, C, ids < KB) > 0                       # (C,) is the block in S?
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1                     # and where in S
        byte, scale, step, words, value = quantize_blocks(residual, s_global)
        tl.store(r_scales + row * S + place, byte, chosen)
        tl.store(r_scales + row * S + s, 0, (s < S) & (ids == KB))        # left over: adds nothing
        tl.store(r_codes + row * 2 * S + 2 * place[:, None] + half, words, chosen[:, None])
        folded += tl.where(chosen[:, None], value * scale, 0.0)
    if FOLD:
        column = 128 * (kb // 8)[:, None] + 8 * i + (kb % 8)[:, None]
        tl.store(operand + row * operand_stride + column, folded.to(tl.float16),
                 column < operand_stride)


def compensate_kernels(x, blocks, measure, fold):
    """`compensate` through the kernel, and with fold the operand of the emulated GEMM. x is not
    checked for NaN and infinity (the GPU would have to be waited for): such a row is not finite."""
    (M, K), S, (e4m3, byte) = x.shape, len(blocks), (torch.float8_e4m3fn, torch.uint8)
    if K == 0 or K % BLOCK:
        quantize(x)                                                       # raises
    x, KB, blocks = x if x.stride(1) == 1 else x.contiguous(), K // BLOCK, blocks.contiguous()
    codes, scales, s_x, r_codes, r_scales, energy, operand = (
        torch.empty((M, width), dtype=dtype, device=x.device) for width, dtype in (
            (2 * KB, torch.int32), (KB, byte), (1, torch.float32), (2 * S, torch.int32), (S, byte),
            (KB * measure, torch.float32), ((K + -K % 256) * fold, torch.float16)))
    C, C_S = max(16, triton.next_power_of_2(KB)), triton.next_power_of_2(S) if S else 0
    if M:
        compensate_kernel[(M,)](x, x.stride(0), codes, scales, s_x, r_codes, r_scales, blocks,
                                energy, operand, KB, S, operand.shape[1], C, C_S, measure, fold,
                                num_warps=4 if C <= 256 else 8, enable_fp_fusion=False)
    return (NVFP4(codes.view(byte), scales.view(e4m3), s_x),
            NVFP4(r_codes.view(byte), r_scales.view(e4m3), s_x),
            energy.sum(0) if measure else None, operand if fold else None)


def compensate(x, blocks, measure=True):
    """Quantize x, and quantize its residual on the chosen blocks.

    x: (M, K); blocks: (S,) ids, ascending (not checked; to the kernel K/16 is no block). Returns
    (q, r, energy): q NVFP4 (M, K), row-scaled; r NVFP4 (M, 16 S); energy (K/16,) fp32 of the whole
    residual, for the next choice. The residual reuses s_global, so that one final scale does."""
    if kernel_path(x.device.type)[0] == "torch":
        return compensate_ref(x, blocks)
    return compensate_kernels(x, blocks, measure, False)[:3]


def reconstruct(x, blocks):
    """The activations that the compensated product uses, Q(x) + Q(residual): (M, K) fp32."""
    full, second = (dequantize(q).unflatten(-1, (-1, BLOCK)) for q in compensate(x, blocks)[:2])
    return full.index_add(1, blocks, second).flatten(-2)        # (M, K/16, 16) and (M, S, 16)


def compensated_matmul_ref(x, w, blocks):
    """The equation at the top, term by term: (M, K), NVFP4 (N, K), (S,) -> (M, N) fp32."""
    q, r, _ = compensate_ref(x, blocks)
    w_S = NVFP4(take(w.codes, blocks, 8), take(w.scales, blocks, 1), w.global_scale)
    return matmul(q, w) + matmul(r, w_S)


def compensated_matmul(x, w, blocks, out_dtype=torch.float32):
    """The same as one product, because both terms multiply the same weights: (M, N)."""
    q, r, _ = compensate(x, blocks, measure=False)
    return matmul(q, w, out_dtype, r, blocks)


def compensated_grouped_matmul(x, w, counts, blocks, out_dtype=torch.float32, measure=True):
    """For a Mixture of Experts: x (M, K) sorted by expert, w NVFP4 (E, N, K), counts (E,), and one
    selection for all experts. Returns (Y, energy): (M, N), (K/16,) if measured."""
    path, KB, operand = kernel_path(x.device.type)[0], x.shape[1] // BLOCK, None
    if path == "emulated":
        q, r, energy, operand = compensate_kernels(x, blocks, measure, True)
    else:           # FP4 units multiply the places that `coverage` left over, too, but by scale 0
        real = blocks[blocks < KB] if path == "torch" else blocks
        q, r, energy = compensate(x, real, measure)
        blocks = real.clamp(max=KB - 1)
    return grouped_matmul(q, w, counts, out_dtype, r, blocks, operand), energy


if __name__ == "__main__":
    torch.manual_seed(0)
    gaussian, w = torch.randn(256, 1024), torch.randn(512, 1024)          # (M, K), (N, K)
    outliers = gaussian * torch.where(torch.arange(1024) % 128 == 5, 64.0, 1.0)
    print("Relative error of Y = X W^T, X (256, 1024) through NVFP4, W (512, 1024) exact:\n\n"
          "| RAC    | 8 outlier channels | gaussian |\n|---|---|---|")
    for ratio in (0, 0.125, 0.25, 0.5, 0.75, 1):
        lost = [((reconstruct(x, select_blocks(residual_energy(x), ratio)) - x) @ w.T).norm()
                / (x @ w.T).norm() for x in (outliers, gaussian)]
        print(f"| {ratio:6.1%} | {lost[0]:.4f}             | {lost[1]:.4f}   |")
