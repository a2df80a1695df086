"""Residual Activation Compensation (RAC): a second FP4 pass where the first one lost most.

The rollout rounds activations X to NVFP4, and what is lost is the residual R = X - Q(X). RAC
quantizes R too, on the blocks S of the reduction axis where it is largest, and adds its product:

    Y  =  Q(X) Wq^T  +  Q(R)[:, S] Wq[:, S]^T                 (QUADS, arXiv 2607.15810)

Both terms are W4A4 products, so the FP4 units still do all the work. At a ratio of 50% the
second pass reads half of the weight columns again (from cache, in a fused kernel), costs half of
the FLOPs again, and half of 4.5 bits more for each activation value. At ratio 0 nothing is left but
plain NVFP4; at ratio 1 the activations have about 8 bits and their error falls below 1%.

Two choices make it cheap and stable:
- S is made of whole 16-blocks, so the weights' codes and scales are used as they are.
- S is fixed between two weight syncs and belongs to a matrix, not to a token: what a token's
  activations become never depends on the other tokens of its batch.

RAC repairs the error of the *activations*. The weights' error remains, and qat.py aligns that one.

Run `python rac.py` for the error with and without, on random and on outlier-heavy activations.
"""
import torch

from nvfp4 import BLOCK, NVFP4, dequantize, grouped_matmul, matmul, quantize


# --- 1. Measure the residual ---------------------------------------------------------------------

def residual_of(x, q):
    """What quantization lost: x - dequantize(q), (M, K) fp32, with 0 where q is exact."""
    return x.float() - dequantize(q)


def block_energy(residual):
    """Squared residual of each 16-block, summed over rows: (M, K) -> (K/16,) fp32."""
    return residual.square().reshape(-1, residual.shape[-1] // BLOCK, BLOCK).sum((0, 2))


def residual_energy(x):
    """Squared quantization residual of each 16-block of x: (..., K) -> (K/16,) fp32.

    x is quantized with one global scale a row, as the rollout does it. Energies of two batches add
    up. Raises ValueError if K is not a multiple of 16 or x is not finite.
    """
    return block_energy(residual_of(x, quantize(x, row_scaled=True)))


# --- 2. Choose the blocks ------------------------------------------------------------------------

def select_blocks(energy, ratio):
    """The blocks with the largest residual: (K/16,) -> LongTensor of round(ratio * K/16) ids.

    Ascending, so that the second pass walks through the weights in order; among equals the lower
    id wins, so that the choice is the same on every device. Raises ValueError outside 0..1.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"the RAC ratio is a share of the blocks, 0 to 1; got {ratio}.")
    if not torch.isfinite(energy).all():
        raise ValueError("the residual energy is not finite: the activations hold NaN, infinity or "
                         "values whose square overflows.")
    order = energy.argsort(descending=True, stable=True)                  # (K/16,)
    return order[:round(ratio * len(energy))].sort().values               # (S,)


# --- 3. Apply the second pass --------------------------------------------------------------------

def take_blocks(x, blocks):
    """The columns of the chosen 16-blocks, in order: (M, K), (S,) -> (M, 16 S)."""
    return x.unflatten(-1, (-1, BLOCK))[..., blocks, :].flatten(-2)


def take_bytes(stored, blocks, width):
    """The bytes of the chosen blocks: 8 of codes or 1 of scales each. (N, *) -> (N, S * width)."""
    return stored.unflatten(-1, (-1, width))[:, blocks].flatten(-2)


def compensate(x, blocks):
    """Quantize x, and quantize its residual on the chosen blocks.

    x: (M, K); blocks: (S,) ids. Returns (q, r, energy): q NVFP4 (M, K), row-scaled; r NVFP4
    (M, 16 S); energy (K/16,) fp32 of the whole residual, for the next choice of blocks.
    The residual reuses the row's s_global: one of its own gains nothing (measured: .0089 against
    .0090 at 50%), and with a shared one a kernel needs one accumulator and one final scale.
    """
    q = quantize(x, row_scaled=True)
    residual = residual_of(x, q)                                          # (M, K) fp32
    if len(blocks) == 0:                                                  # ratio 0: plain NVFP4
        r = NVFP4(q.codes[:, :0], q.scales[:, :0], q.global_scale)
    else:
        r = quantize(take_blocks(residual, blocks), global_scale=q.global_scale)
    return q, r, block_energy(residual)


def reconstruct(x, blocks):
    """The activations that the compensated product really uses: (M, K) fp32.

    dequantize(Q(x)) plus, on the chosen blocks, dequantize(Q(residual)).
    """
    q, r, _ = compensate(x, blocks)
    full = dequantize(q).unflatten(-1, (-1, BLOCK))                       # (M, K/16, 16)
    second = dequantize(r).unflatten(-1, (-1, BLOCK))                     # (M, S, 16)
    return full.index_add(1, blocks, second).flatten(-2)


def compensated_matmul_ref(x, w, blocks):
    """The equation at the top, term by term: (M, K), NVFP4 (N, K), (S,) -> (M, N) fp32."""
    q, r, _ = compensate(x, blocks)
    w_S = NVFP4(take_bytes(w.codes, blocks, 8), take_bytes(w.scales, blocks, 1), w.global_scale)
    return matmul(q, w) + matmul(r, w_S)


def compensated_matmul(x, w, blocks, out_dtype=torch.float32):
    """The same as one product, because both terms multiply the same weights: (M, N)."""
    q, r, _ = compensate(x, blocks)
    return matmul(q, w, out_dtype, r, blocks)


def compensated_grouped_matmul(x, w, counts, blocks, out_dtype=torch.float32):
    """For a Mixture of Experts: x (M, K) sorted by expert, w NVFP4 (E, N, K), counts (E,).

    One selection serves all experts of a layer. Returns (Y, energy): (M, N) and (K/16,).
    """
    q, r, energy = compensate(x, blocks)
    return grouped_matmul(q, w, counts, out_dtype, r, blocks), energy


# --- The file proves its point -------------------------------------------------------------------

if __name__ == "__main__":
    torch.manual_seed(0)
    M, K, N = 256, 1024, 512
    gaussian = torch.randn(M, K)
    # A few channels much larger than the rest, as large language models have them.
    outlier = gaussian * torch.where(torch.arange(K) % 128 == 5, 64.0, 1.0)
    w = torch.randn(N, K)                                                 # (N, K)
    wq = quantize(w)

    def error(x_used, w_used, x):
        y, exact = x_used.double() @ w_used.double().T, x.double() @ w.double().T   # (M, N)
        return ((y - exact).norm() / exact.norm()).item()

    def fp8(x):
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    print(f"Relative error of Y = X W^T, X ({M}, {K}), W ({N}, {K}):\n")
    print("| X as                    | outlier channels, W exact | outlier channels, W NVFP4 | "
          "gaussian, W exact |\n|---|---|---|---|")
    columns = ((outlier, w), (outlier, dequantize(wq)), (gaussian, w))
    for ratio in (0, 0.125, 0.25, 0.5, 0.75, 1):
        name = f"RAC {100 * ratio:g}% of the blocks" if ratio else "NVFP4, row-scaled"
        row = [error(reconstruct(x, select_blocks(residual_energy(x), ratio)), w_used, x)
               for x, w_used in columns]
        print(f"| {name:23} | {row[0]:.4f}                    | {row[1]:.4f}                    | "
              f"{row[2]:.4f}            |")
    chosen = torch.randperm(K // BLOCK)[:K // BLOCK // 8].sort().values
    for name, used in (("random 12.5%", lambda x: reconstruct(x, chosen)),
                       ("FP8, one scale a row", fp8)):
        row = [error(used(x), w_used, x) for x, w_used in columns]
        print(f"| {name:23} | {row[0]:.4f}                    | {row[1]:.4f}                    | "
              f"{row[2]:.4f}            |")
