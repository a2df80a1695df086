"""NVFP4: a number in 4.5 bits, and the matrix product of two such tensors.

    16 consecutive values along the last axis K form a block:

        | 16 codes of 4 bits (E2M1) | 1 block scale of 8 bits (E4M3) |   4 + 8/16 = 4.5 bits each
        global scale: one fp32 for a weight matrix, one for each row of activations

        x  =  e2m1 * s_block * s_global         e2m1 in {0, .5, 1, 1.5, 2, 3, 4, 6} and a sign

E2M1 spans a factor of 12 only; E4M3 block scales follow the data; s_global moves them into E4M3's
range: s_global = amax / (6 * 448) gives the largest block the scale 448 and the largest value the
code 6. Rounding is to nearest, ties to even, everywhere.

Two such operands make a W4A4 product (4-bit weights and activations). Blackwell GPUs compute it in
their FP4 units; elsewhere it is emulated: decoded operands are exact in fp32, fp16 and bf16. Then
only the order of sums differs (and with RAC one fp16 rounding). First comes the definition, in
plain PyTorch, then the product's Triton kernel (the quantizer's is in rac.py).
"""
from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:            # no Triton (macOS, say): plain PyTorch does everything
    triton, tl, jit = None, None, lambda kernel: kernel

BLOCK = 16                # values that share one block scale
E2M1_MAX = 6.0            # the largest magnitude of a 4-bit code
E4M3_MAX = 448.0          # the largest finite block scale
MIN_GLOBAL = 2.0**-126    # smallest normal fp32: an almost-zero tensor must not divide by zero
# What a code means: bit 3 is the sign, the other three are one of eight magnitudes.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])   # (16,)
# What one stored byte means: element 2j sits in the LOW nibble, element 2j + 1 in the high one.
BYTE_TO_PAIR = torch.stack([E2M1[torch.arange(256) & 15], E2M1[torch.arange(256) >> 4]], dim=1)


class NVFP4(NamedTuple):
    """A tensor of logical shape (..., K), stored in 4.5 bits a value."""
    codes: torch.Tensor         # (..., K/2) uint8, two E2M1 codes a byte
    scales: torch.Tensor        # (..., K/16) float8_e4m3fn, one for each block
    global_scale: torch.Tensor  # fp32: (..., 1) row-scaled; (E, 1, 1) for (E, N, K); else ()


def e2m1_encode(v):
    """Round v (...) fp32, clipped to [-6, 6], to codes 0..15 (...) uint8, ties to the even code.
    The step is .5 below 2, 1 below 4, 2 above; torch.round sends halves to even, and the offsets 2
    and 4 are even. (2.5, between codes 4 and 5, rounds to 2, and 2 + 2 is code 4.)"""
    m = v.abs().clamp(max=E2M1_MAX)
    code = torch.where(m < 2, (2 * m).round(),
                       torch.where(m < 4, m.round() + 2, (m / 2).round() + 4))
    return code.to(torch.uint8) + 8 * ((v < 0) & (code > 0)).to(torch.uint8)   # never minus zero


def quantize(x, row_scaled=False, global_scale=None):
    """Quantize x to NVFP4.

    x: (..., K) of any float dtype, strided as it likes; arithmetic is fp32, without gradient.
    row_scaled: one global scale a row (activations: a token's codes never depend on its batch)
    instead of one a matrix (weights). global_scale: use this one instead of amax / 2688.
    Raises ValueError if K is not a positive multiple of 16, or if x holds NaN or infinity."""
    K = x.shape[-1]
    if K == 0 or K % BLOCK:
        raise ValueError(f"NVFP4 needs K, the last axis, to be a positive multiple of {BLOCK}, got "
                         f"K = {K} (shape {tuple(x.shape)}): pad the tensor with zeros.")
    blocks = x.detach().float().unflatten(-1, (K // BLOCK, BLOCK))        # (..., K/16, 16) fp32
    block_amax = blocks.abs().amax(dim=-1)                                # (..., K/16); keeps NaN
    if not torch.isfinite(block_amax).all():
        raise ValueError(f"NVFP4 cannot hold NaN or infinity, and a tensor of shape "
                         f"{tuple(x.shape)} has some: find the step that made them.")

    # Divisors are tensors: a GPU divides by a Python number by multiplying with its reciprocal.
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


def decode_e2m1(codes):
    """Packed codes (..., K/2) uint8 to their E2M1 values in blocks, (..., K/16, 16) fp32."""
    table = BYTE_TO_PAIR.to(codes.device)
    pairs = table.index_select(0, codes.flatten().int())                  # (..., 2): low, high
    return pairs.view(*codes.shape[:-1], 2 * codes.shape[-1] // BLOCK, BLOCK)


def block_values(q, dtype=torch.float32):
    """e2m1 * s_block, the GEMM operand: (..., K). Exact in fp32, fp16 and bf16: 6 significant bits.
    Times s_global it is not, in bf16: so s_global multiplies a GEMM's result, not its operand."""
    return (decode_e2m1(q.codes) * q.scales.float()[..., None]).flatten(-2).to(dtype)


def dequantize(q, dtype=torch.float32):
    """The values a quantized tensor stands for: (..., K), computed in fp32 and then cast."""
    step = q.scales.float() * q.global_scale                              # (..., K/16) fp32
    return (decode_e2m1(q.codes) * step[..., None]).flatten(-2).to(dtype)


# --- Products, in plain PyTorch ------------------------------------------------------------------
#
#     Y[m, n] = s_x[m] * s_w * sum_k x[m, k] * w[n, k]          x, w = e2m1 * s_block
#
# Sums are fp32, global scales come last. rac.py adds a second pass over some blocks of K, with the
# same weights and the row's s_x, so the two passes share one sum: (x + r) * w. In fp32 x + r is
# exact: both are multiples of 2^-10 below 2^13. (Call it without autocast and TF32.)

def compensated_values(x, residual=None, blocks=None):
    """What multiplies the weights: e2m1 * s_block of x, plus that of the residual. (M, K) fp32."""
    a = block_values(x)                                                   # (M, K)
    if residual is not None:
        second = block_values(residual).unflatten(-1, (-1, BLOCK))        # (M, S, 16)
        a = a.unflatten(-1, (-1, BLOCK)).index_add(1, blocks, second).flatten(-2)
    return a


def grouped_matmul_ref(x, w, counts, out_dtype, residual=None, blocks=None):
    """`grouped_matmul`, expert by expert: (M, N)."""
    rows = compensated_values(x, residual, blocks).split(counts.tolist())  # E x (counts[e], K)
    b = block_values(w)                                                    # (E, N, K) fp32
    y = torch.cat([rows[e] @ b[e].T * w.global_scale[e] for e in range(len(b))])   # (M, N) fp32
    return (y * x.global_scale).to(out_dtype)


# --- The GEMM kernel -----------------------------------------------------------------------------
#
# It serves decoding (a few rows an expert) and prefill (hundreds). A program owns ROWS rows of an
# expert's W, the left operand (FP4 units take 128 of them), and TOKENS rows of X.
#
# Native: packed codes and block scales go into tl.dot_scaled as they are; RAC's pass is some more K
# blocks into the same sums, whose weights are read again by index.
# Emulated: without FP4 units, codes become fp16 (exact) on their way into an fp16 product. Memory
# traffic is that of 4-bit weights, which is what decoding waits for; arithmetic is no faster than
# fp16. W is unpacked in registers. X is small and read often: `fold` or the quantizer unpack it
# before, and add RAC's residual: one operand for both passes, rounded once, by 2^-11 at most.
#
# Two tricks make unpacking cheap. The 16 codes of a block are one 64-bit word, element i at bit 4i,
# so that words and block scales have the same shape, (N, K/16). And the order of summation is free:
# K is walked 8 blocks at a time, in them by element i, in it by block, so that neighbours along K
# are the same element of neighbouring blocks, which two words give up by the same shifts.

def fold(x, residual=None, blocks=None):
    """The emulated kernel's right operand: (M, K padded to 256 = 16 largest DEPTHs) fp16."""
    a = compensated_values(x, residual, blocks).half()                    # (M, K)
    a = torch.nn.functional.pad(a, (0, -a.shape[1] % 256))
    return a.view(len(a), -1, 8, BLOCK).transpose(2, 3).reshape(a.shape)


@jit
def schedule_kernel(counts, tiles, E, slots, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """counts (E,) -> tiles (slots, 3) int32: expert (-1: none), first row, end of expert's rows."""
    e = tl.arange(0, EXPERTS)
    count = tl.load(counts + e, mask=e < E, other=0).to(tl.int32)         # (EXPERTS,)
    needed = (count + TOKENS - 1) // TOKENS
    end, slot = tl.cumsum(count, 0), tl.cumsum(needed, 0) - needed
    for i in range(tl.max(needed, 0)):
        tile, ok = tiles + 3 * (slot + i), (i < needed) & (slot + i < slots)
        tl.store(tile, e, mask=ok)
        tl.store(tile + 1, end - count + i * TOKENS, mask=ok)
        tl.store(tile + 2, end, mask=ok)
    for first in range(tl.sum(needed, 0), slots, EXPERTS):
        tl.store(tiles + 3 * (first + e), -1, mask=first + e < slots)


def schedule(counts, M, tokens):
    """Cut M rows into tiles of at most `tokens` rows of one expert, without asking the GPU."""
    E, slots = len(counts), min(M, len(counts)) + M // tokens
    tiles = torch.empty((slots, 3), dtype=torch.int32, device=counts.device)
    schedule_kernel[(1,)](counts.contiguous(), tiles, E, slots, tokens, 1 << (E - 1).bit_length())
    return tiles


@functools.cache
def unpack_ptx():
    """PTX: two blocks, $16 and $17, times scales, $18 (two fp16); $i gets element i of both.
    A byte with a code's sign at bit 7 and its other bits at 3 to 1 is the upper byte of the fp16
    number e2m1 * 2^-14 (subnormals included); four codes are moved there at a time."""
    ptx = "{.reg .b32 a<2>,b<2>,c,p,s,t; mov.b64 {a0,a1},$16; mov.b64 {b0,b1},$17; mov.b32 c,$18;"
    for i in range(0, 16, 4):              # elements i .. i + 3 of both blocks: p, 2 x 16 bits
        ptx += f"prmt.b32 p, a{i // 8}, b{i // 8}, {'0x7632' if i % 8 else '0x5410'};"
        for odd, moves in enumerate(("shl.b32 s, p, 4; shl.b32 t, p, 1;",
                                     "mov.b32 s, p; shr.b32 t, p, 3;")):
            ptx += moves + "and.b32 s, s, 0x80808080; and.b32 t, t, 0x0E0E0E0E; or.b32 s, s, t;"
            for j, spread in ((i, "0x2404"), (i + 2, "0x3414")):          # bytes to upper bytes
                ptx += f"prmt.b32 t, s, 0, {spread}; mul.rn.f16x2 ${j + odd}, t, c;"
    return ptx + "}"


@jit
def unpack(words, scales, PTX: tl.constexpr):
    """Words (R, C) int64 and scale bytes 0..0x7E -> e2m1 * s_block / 128, (R, C, 16) fp16, exact.
    Without PTX in plain arithmetic, for Triton's interpreter; with it, two neighbours at a time."""
    # An E4M3 byte moved up by 7 bits is the fp16 number s_block / 256; the scale is s_block * 128.
    scale = (scales.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 32768.0     # (R, C)
    if PTX == "":
        code = words[:, :, None] >> (4 * tl.arange(0, 16))[None, None, :]         # (R, C, 16)
        e2m1 = ((code & 8) << 12 | (code & 7) << 9).to(tl.int16).to(tl.float16, bitcast=True)
        return e2m1 * scale[:, :, None]                                           # e2m1 * 2^-14
    v = tl.inline_asm_elementwise(PTX, "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,l,l,r",
                                  [words, scale], (tl.float16,) * 16, is_pure=True, pack=2)
    even = tl.join(tl.join(tl.join(v[0], v[8]), tl.join(v[4], v[12])),
                   tl.join(tl.join(v[2], v[10]), tl.join(v[6], v[14])))
    odd = tl.join(tl.join(tl.join(v[1], v[9]), tl.join(v[5], v[13])),
                  tl.join(tl.join(v[3], v[11]), tl.join(v[7], v[15])))
    return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1], 16))


@jit
def grouped_matmul_kernel(x, x_scales, r, r_scales, blocks, s_x, w, w_scales, s_w, tiles, y,
                          N, KB, x_stride, S, ROWS: tl.constexpr, TOKENS: tl.constexpr,
                          DEPTH: tl.constexpr, TAIL: tl.constexpr, NATIVE: tl.constexpr,
                          PTX: tl.constexpr):
    """w (E, N, KB = K/16) int64, w_scales uint8 likewise, s_w (E,), s_x (M,) fp32, tiles, y (M, N).
    Native: x (M, 8 KB), x_scales (M, KB), r (M, 8 S), r_scales (M, S) uint8, blocks (S,).
    Emulated: x (M, x_stride) fp16, what `fold` returns, with r in it. All contiguous."""
    tile = tiles + 3 * tl.program_id(1)
    expert, m = tl.load(tile), tl.load(tile + 1) + tl.arange(0, TOKENS)           # (TOKENS,)
    if expert < 0:
        return
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)                              # (ROWS,)
    n_ok, m_ok = n < N, m < tl.load(tile + 2)
    w_row = (expert.to(tl.int64) * N + n) * KB          # E * N * K overflows 32 bits
    x_row = m.to(tl.int64)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if NATIVE:
        w8 = w.to(tl.pointer_type(tl.uint8)) + 8 * w_row
        for k in range(0, KB, DEPTH):
            acc = fp4_step(acc, w8, w_scales + w_row, n_ok, x + 8 * KB * x_row,
                           x_scales + KB * x_row, m_ok, k, KB, blocks, False, DEPTH)
        for k in range(0, S, DEPTH):                    # RAC: residual in order, weights by index
            acc = fp4_step(acc, w8, w_scales + w_row, n_ok, r + 8 * S * x_row,
                           r_scales + S * x_row, m_ok, k, S, blocks, True, DEPTH)
    else:
        for k in range(0, KB, DEPTH):
            kb, column = k + tl.arange(0, DEPTH), 16 * k + tl.arange(0, 16 * DEPTH)
            k_ok = kb < KB if TAIL else tl.full((DEPTH,), True, tl.int1)
            # (Scales are loaded as their transpose, so that Triton lays out these bytes and the
            # words independently: in a common layout threads read words by half sectors, 16 bytes.)
            words = tl.load(w + w_row[:, None] + kb[None, :],
                            mask=n_ok[:, None] & k_ok[None, :], other=0)          # (ROWS, DEPTH)
            scales = tl.load(w_scales + w_row[None, :] + kb[:, None],
                             mask=n_ok[None, :] & k_ok[:, None], other=0).T
            a = tl.reshape(unpack(words, scales, PTX), (ROWS, DEPTH // 8, 8, 16))
            a = tl.reshape(tl.permute(a, (0, 1, 3, 2)), (ROWS, 16 * DEPTH))       # fold's order
            b = tl.load(x + x_stride * x_row[None, :] + column[:, None],
                        mask=m_ok[None, :], other=0.0)                    # (16 DEPTH, TOKENS)
            acc = tl.dot(a, b, acc)
        acc *= 128.0                                                              # see unpack
    acc *= tl.load(s_w + expert) * tl.load(s_x + m, mask=m_ok, other=0.0)[None, :]
    tl.store(y + N * x_row[None, :] + n[:, None], acc.to(y.dtype.element_ty),
             mask=n_ok[:, None] & m_ok[None, :])


@jit
def fp4_step(acc, w, w_scales, n_ok, x, x_scales, m_ok, k, count, blocks, BY_INDEX: tl.constexpr,
             DEPTH: tl.constexpr):
    """acc (ROWS, TOKENS) += DEPTH blocks of W times those of X, from block k of `count` on."""
    kb, byte = k + tl.arange(0, DEPTH), 8 * k + tl.arange(0, 8 * DEPTH)
    kb_ok, byte_ok, block, column = kb < count, byte < 8 * count, kb, byte
    if BY_INDEX:
        block = tl.load(blocks + kb, kb_ok, 0)
        column = 8 * tl.load(blocks + byte // 8, byte_ok, 0) + byte % 8
        column = tl.max_contiguous(tl.multiple_of(column, 8), 8)      # runs of 8 bytes
    a = tl.load(w[:, None] + column[None, :], n_ok[:, None] & byte_ok[None, :], 0)
    b = tl.load(x[None, :] + byte[:, None], m_ok[None, :] & byte_ok[:, None], 0)
    s_a = tl.load(w_scales[:, None] + block[None, :], n_ok[:, None] & kb_ok[None, :], 0)
    s_b = tl.load(x_scales[:, None] + kb[None, :], m_ok[:, None] & kb_ok[None, :], 0)
    return tl.dot_scaled(a, s_a.to(tl.float8e4nv, bitcast=True), "e2m1",
                         b, s_b.to(tl.float8e4nv, bitcast=True), "e2m1", acc)


def tile_sizes(M, E, N, native, memory):
    """ROWS, TOKENS, DEPTH (blocks of K at a time), warps, stages, measured on an H200: many small
    programs for few rows an expert, since only loads in flight matter; large tiles for many, since
    each tile of tokens unpacks W again. (Native: by analogy, no such GPU was at hand.)"""
    load = M / max(E, 1)                                    # rows of X an expert
    if native:
        return 128, (16 if load <= 16 else 32 if load <= 32 else 64), 16, 8, 3
    if load <= 8:
        return 64, 16, 16, 4, 3
    large = (256, 128, 8, 16, 3) if load > 128 and memory > 170_000 else (128, 64, 8, 8, 3)
    large = (128, 32, 8, 4, 3) if load <= 32 else large
    if M * N >= 132 * large[0] * large[1]:                  # one for each of an H200's 132 SMs
        return large
    return (64, 32, 16, 4, 3) if load <= 32 else (64, 64, 16, 4, 2)


def grouped_matmul_kernels(x, w, counts, out_dtype, residual, blocks, operand, native, tiles=None):
    """`grouped_matmul` through the kernels. tiles: what `schedule` returns, if it is there."""
    M, (E, N, KB), device = len(x.codes), w.scales.shape, x.codes.device
    y = torch.empty((M, N), dtype=out_dtype, device=device)
    if y.numel() == 0:
        return y
    gpu = torch.cuda.get_device_properties(device) if y.is_cuda else None
    memory = gpu.shared_memory_per_block_optin if gpu else 0
    ROWS, TOKENS, DEPTH, warps, stages = tile_sizes(M, E, N, native, memory)
    tiles = schedule(counts.to(device), M, TOKENS) if tiles is None else tiles
    if native:
        r = x if residual is None else residual
        right = [t.contiguous().view(torch.uint8) for t in (x.codes, x.scales, r.codes, r.scales)]
        right.append(tiles if residual is None else blocks.contiguous())
    else:
        right = [fold(x, residual, blocks) if operand is None else operand] * 5
    grouped_matmul_kernel[(triton.cdiv(N, ROWS), len(tiles))](
        *right, x.global_scale.expand(M, 1).contiguous(), w.codes.contiguous().view(torch.int64),
        w.scales.contiguous().view(torch.uint8), w.global_scale.contiguous(), tiles, y, N, KB,
        right[0].shape[1], 0 if residual is None else len(blocks), ROWS, TOKENS, DEPTH,
        KB % DEPTH > 0, native, "" if triton.knobs.runtime.interpret else unpack_ptx(),
        num_warps=warps, num_stages=stages)
    return y


@functools.cache
def kernel_path(device):
    """How products run on "cpu" or "cuda": ("native", "emulated" or "torch", the reason). The
    environment's NVFP4_PATH, read once, forces one; ValueError if it cannot be had."""
    forced = os.environ.get("NVFP4_PATH", "")
    path, reason = "emulated", "this GPU has no FP4 units"
    if triton is None:
        path, reason = "torch", "Triton is not installed"
    elif device == "cpu" and not (forced and triton.knobs.runtime.interpret):
        path, reason = "torch", "there is no GPU"
    elif device == "cuda" and torch.cuda.get_device_capability()[0] >= 10:
        # One tile, native against emulated (its own generator: the global one stays).
        x = torch.randn(128, 512, generator=torch.Generator(device).manual_seed(0), device=device)
        q, ids = quantize(x[:16], row_scaled=True), torch.arange(0, 32, 2, device=device)
        r = quantize(x[16:32, :256] / 16, global_scale=q.global_scale)
        try:
            y, z = (grouped_matmul_kernels(q, quantize(x[None]), torch.tensor([16], device=device),
                                           torch.float32, r, ids, None, native)
                    for native in (True, False))
            error = ((y - z).norm() / z.norm()).item()
            path, reason = "native" if error < 1e-4 else path, f"one tile differs by {error:.0e}"
        except Exception as error:           # Triton's compiler raises what it likes
            reason = f"native FP4 fails with {type(error).__name__}: {str(error).splitlines()[0]}"
    if forced == "torch" or forced == "emulated" and path == "native":
        return forced, "NVFP4_PATH says so"
    if forced not in ("", path):
        raise ValueError(f"NVFP4_PATH is {forced!r}: use native, emulated or torch, or unset it; "
                         f"here it can be {path}, because {reason}.")
    return path, reason


def grouped_matmul(x, w, counts, out_dtype=torch.float32, residual=None, blocks=None, operand=None):
    """The W4A4 product of a Mixture-of-Experts layer: each row meets its own expert's matrix.

    x: NVFP4 (M, K), row-scaled, rows sorted by expert; w: NVFP4 (E, N, K); counts: (E,) integers,
    rows of each expert. residual: NVFP4 (M, 16 * len(blocks)) of rac.py, in x's global scale, which
    is added to x on the 16-blocks `blocks` (distinct ids). operand: what `fold` makes of both, if
    it is there. Returns (M, N). Raises ValueError if x, w or counts do not fit (counts on a GPU
    are not looked at, it would have to be waited for: wrong ones give garbage)."""
    M, K, (E, N, half) = len(x.codes), 2 * x.codes.shape[1], w.codes.shape
    rows = [M] if counts.is_cuda else counts.tolist()
    if (K != 2 * half or len(counts) != E or sum(rows) != M or min(rows, default=0) < 0
            or w.global_scale.shape != (E, 1, 1)):
        raise ValueError(f"grouped_matmul: x is ({M}, {K}) and w is ({E}, {N}, {2 * half}), so K "
                         f"must be equal, w needs one global scale an expert (quantize it without "
                         f"row_scaled), and counts must be {E} numbers >= 0 that add up to {M}; "
                         f"got {len(counts)} that add up to {sum(rows)}.")
    path = kernel_path(x.codes.device.type)[0]
    if path == "torch":
        return grouped_matmul_ref(x, w, counts, out_dtype, residual, blocks)
    return grouped_matmul_kernels(x, w, counts, out_dtype, residual, blocks, operand,
                                  path == "native")


def matmul(x, w, out_dtype=torch.float32, residual=None, blocks=None):
    """The W4A4 product (M, K) x (N, K) -> (M, N): `grouped_matmul` with a single expert."""
    one = NVFP4(w.codes[None], w.scales[None], w.global_scale.reshape(1, 1, 1))
    counts = torch.tensor([x.codes.shape[0]], device=x.codes.device)
    return grouped_matmul(x, one, counts, out_dtype, residual, blocks)


if __name__ == "__main__":
    x = torch.randn(256, 1024)
    lost = (dequantize(quantize(x, row_scaled=True)) - x).norm() / x.norm()
    print(f"NVFP4 loses {lost:.2%} of normal numbers; path: {kernel_path('cpu')[0]} on a CPU")
