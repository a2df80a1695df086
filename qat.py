"""Quantization-aware training (QAT): the trainer sees the weights that the rollout will use.

Two sides compute the log-probability of the same token. If their expert weights differ, the ratio
of the two is wrong and so is the policy gradient. QUADS (arXiv 2607.15810) therefore sends the
trainer's weights through the NVFP4 grid as well, and leaves the activations alone: W4A16.

    |                     | expert weights       | activations | gradients        | master weights |
    |---------------------|----------------------|-------------|------------------|----------------|
    | rollout (W4A4)      | NVFP4                | NVFP4       | none             | none           |
    | train forward W4A16 | NVFP4 values in bf16 | bf16        |                  | fp32           |
    | train backward      | the same values      | bf16        | straight through | fp32           |

Why not quantize the activations too (W4A4, "symmetric" QAT)? The weights are the same tensor on
both sides, so their rounding cancels. Activations are recomputed on each side, by other kernels:
they differ in the last bits, land on other sides of a rounding tie, and the error does not cancel.

The straight-through estimator: rounding has gradient zero almost everywhere, so the backward pass
treats it as the identity. The optimizer moves an fp32 copy of the weights, the master weights, and
the grid is applied to them anew in every forward pass; nothing is cached.

On a CPU everything here is fp32 instead of bf16. Only the routed expert matrices are quantized:
router, attention, embeddings, norms and head never are.
"""
import torch

from nvfp4 import block_values, dequantize, quantize

# One word names both sides of a run. rollout: the precision of the experts in the sampler
# (`+rac` adds the second pass of rac.py). trainer: the mode of `expert_matmul` below.
RECIPES = {
    #                  rollout       trainer    what the paper calls it
    "bf16":          ("bf16",       "none"),    # BF16 RL
    "fp8":           ("fp8",        "none"),    # FP8 RL
    "nvfp4":         ("nvfp4",      "none"),    # naive NVFP4 RL: collapses
    "qat":           ("nvfp4",      "w4a16"),   # QAT only
    "qat-symmetric": ("nvfp4",      "w4a4"),    # symmetric QAT
    "rac":           ("nvfp4+rac",  "none"),    # RAC only
    "quads":         ("nvfp4+rac",  "w4a16"),   # QUADS
}


class _FakeQuantize(torch.autograd.Function):
    """Forward: round to the NVFP4 grid and back. Backward: the identity, also where it clips."""

    @staticmethod
    def forward(ctx, x, row_scaled):
        return dequantize(quantize(x, row_scaled), x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def fake_quantize(x, row_scaled=False):
    """dequantize(quantize(x)) in x's dtype, with gradient 1 everywhere.

    x: (..., K) of any float dtype. Raises ValueError as `nvfp4.quantize` does.
    This is the textbook form. Under bf16 the cast rounds once more: see `operand`."""
    return _FakeQuantize.apply(x, row_scaled)


class _Operand(torch.autograd.Function):
    """Forward: the two factors of the quantized x. Backward: the identity in their product."""

    @staticmethod
    def forward(ctx, x, row_scaled, dtype):
        q = quantize(x, row_scaled)
        ctx.save_for_backward(q.global_scale)
        ctx.mark_non_differentiable(q.global_scale)
        ctx.dtype = x.dtype
        return block_values(q, dtype), q.global_scale

    @staticmethod
    def backward(ctx, grad_values, _):
        # x ~ values * s, so what arrives is dL/dx * s: divide s out again. (s is a constant here,
        # although it follows from x: the straight-through rule.)
        (s,) = ctx.saved_tensors
        return (grad_values.float() / s).to(ctx.dtype), None, None


def operand(x, row_scaled=False, dtype=None):
    """x on the NVFP4 grid as a GEMM operand: (e2m1 * s_block in dtype, s_global in fp32).

    Their product is `fake_quantize(x)`, and the gradient with respect to that product reaches x
    unchanged. They come apart because e2m1 * s_block is exact in bf16 while the full product is not
    (it would be rounded in 93% of cases): s_global multiplies the result of the GEMM instead, as in
    the rollout, and so both sides use the same weights bit for bit.
    x: (E, N, K) weights, or (M, K) activations with row_scaled. dtype: of the values, default x's.
    """
    return _Operand.apply(x, row_scaled, dtype or x.dtype)


def grouped_linear(x, w, counts):
    """Each row of x times its own expert's matrix, differentiable: (M, K), (E, N, K) -> (M, N).

    The rows of x are sorted by expert, counts (E,) of them for each; zeros are fine.
    """
    if len(counts) != len(w):
        raise ValueError(f"{len(w)} experts need as many counts, got {len(counts)}.")
    rows = x.split(counts.tolist())                                       # E x (counts[e], K)
    return torch.cat([rows[e] @ w[e].T for e in range(len(w))])           # (M, N)


def expert_matmul(x, weight, counts, mode):
    """The trainer's expert product.

    x: (M, K) in the compute dtype, sorted by expert; weight: (E, N, K) fp32 master; counts: (E,).
    mode: "none" (plain), "w4a16" (weights through the grid), "w4a4" (activations too, row-scaled).
    Returns (M, N) in x's dtype."""
    if mode == "none":
        return grouped_linear(x, weight.to(x.dtype), counts)
    if mode not in ("w4a16", "w4a4"):
        raise ValueError(f"unknown QAT mode {mode!r}: use none, w4a16 or w4a4.")
    w, s_w = operand(weight, dtype=x.dtype)                               # (E, N, K), (E, 1, 1)
    s = s_w.flatten().repeat_interleave(counts)[:, None]                  # (M, 1) fp32
    if mode == "w4a4":
        x, s_x = operand(x, row_scaled=True)                              # (M, K), (M, 1)
        s = s * s_x
    return (grouped_linear(x, w, counts) * s).to(x.dtype)                 # (M, N)


# --- The optimizer's memory: 12 bytes a parameter instead of 16, 84 GB instead of 112 for 7B -----
# fp32 master 4, fp32 gradient 4, moments 2 + 2 (torch.optim.AdamW: 4 + 4). Why not bf16 masters?
# bf16 has 8 significant bits: steps of about 1e-6 would all round to nothing, and the NVFP4 grid
# needs a master that moves. The moments stall too if rounded to nearest, so chance decides.

def stochastic_bf16(x, generator):
    """x (...) fp32, contiguous -> (...) bf16, one of the two neighbours: the mean of many is x."""
    # bf16 is the upper half of an fp32. Random lower bits carry into it as often as they should.
    bits = torch.randint(2**16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    return (bits.add_(x.view(torch.int32)) & -2**16).view(torch.float32).bfloat16()       # (...)


class BF16AdamW:
    """torch.optim.AdamW with both moments in bf16, rounded as above; the arithmetic is fp32."""

    def __init__(self, parameters, lr, betas, weight_decay):
        self.parameters, self.lr, self.betas, self.decay = [*parameters], lr, betas, weight_decay
        self.steps, self.moments = 0, [torch.zeros(2, *p.shape, dtype=torch.bfloat16,
                                                   device=p.device) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        pairs = [pair for pair in zip(self.parameters, self.moments) if pair[0].grad is not None]
        (beta1, beta2), self.steps = self.betas, self.steps + bool(pairs)
        t, generator = self.steps, torch.Generator(self.parameters[0].device)
        generator.manual_seed(t)                  # by number: a resumed run rounds alike
        for p, moments in pairs:                  # one at a time, to save memory; all (...) fp32
            m = moments[0].float().lerp_(p.grad, 1 - beta1)
            v = moments[1].float().lerp_(p.grad.square(), 1 - beta2)
            moments[0], moments[1] = (stochastic_bf16(x, generator) for x in (m, v))
            p.mul_(1 - self.lr * self.decay)
            p.addcdiv_(m, v.div_(1 - beta2**t).sqrt_().add_(1e-8), value=-self.lr / (1 - beta1**t))

    def state_dict(self):
        return {"steps": self.steps, "moments": self.moments}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.moments = [m.to(p.device) for m, p in zip(state["moments"], self.parameters)]
