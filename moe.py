"""The policy: a Mixture-of-Experts transformer of the Qwen3-MoE architecture.

Letters, the same in all files:

    B sequences     D model width       G key-value heads          F expert width
    T tokens        H query heads       E experts                  V vocabulary
    L layers        A experts active per token                     S tokens or rows in one flat list
    M, N, K only inside a matrix product: (M, K) x (N, K) -> (M, N); K is the reduction.

The path of one token: embedding -> L blocks -> norm -> head -> logits. A block is attention
(QK-norm per head, rotary positions, H query heads share G key-value heads) and a mixture of
experts: a router scores E experts, the best A of them run, and their outputs are added with the
router's renormalised weights. An expert is a SwiGLU MLP: down(silu(gate(x)) * up(x)). No biases.

What is quantized: the two expert matrices of each layer, `gate_up` (E, 2F, D) and `down`
(E, D, F), which hold nearly all parameters, and the activations that enter them. What never is:
router (fp32 logits: its top-A choice is discrete), attention, embeddings, norms and head.

Parameters are fp32 masters and are cast to the compute dtype (bf16 on a GPU, fp32 on a CPU) where
they are used. The same code serves trainer and sampler: the sampler replaces `MoE.product`, the one
function through which all expert products go, and passes a key-value cache.
"""
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import qat


@dataclass
class Config:
    vocab_size: int = 512       # V, rows of the embedding; `real_vocab` of them stand for a token
    real_vocab: int = 512
    end_id: int = 511           # the token that ends an answer
    d_model: int = 128          # D
    layers: int = 2             # L
    heads: int = 4              # H
    kv_heads: int = 2           # G
    head_dim: int = 32
    experts: int = 4            # E
    active: int = 2             # A
    expert_width: int = 128     # F
    max_seq_len: int = 1024     # the context: prompt and answer together
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied: bool = True           # the head is the embedding

    def __post_init__(self):
        if not (self.end_id < self.real_vocab <= self.vocab_size and self.active <= self.experts):
            raise ValueError(f"need end_id < real_vocab <= vocab_size, active <= experts: {self}")


PRESETS = {
    # 0.56M parameters, for two CPU cores.
    "cpu": Config(),
    # 83M parameters, 26M of them active for a token, for one GPU.
    "gpu": Config(vocab_size=2048, real_vocab=2048, end_id=2047, d_model=512, layers=8, heads=8,
                  kv_heads=4, head_dim=64, experts=8, active=2, expert_width=768,
                  max_seq_len=1024),
}


def linear(x, weight):
    """x (..., K) times weight (N, K), an fp32 master cast to x's dtype: (..., N)."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x, weight, eps):
    """x / rms(x) * weight over the last axis, in fp32; returns x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary positions: turn the pairs (x[i], x[i + head_dim/2]) by their position's angle.

    x: (B, T, heads, head_dim); cos, sin: (B or 1, T, 1, head_dim/2) fp32.
    """
    a, b = x.float().chunk(2, dim=-1)                             # (B, T, heads, head_dim/2) each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.wq = nn.Parameter(torch.empty(c.heads * c.head_dim, c.d_model))
        self.wk = nn.Parameter(torch.empty(c.kv_heads * c.head_dim, c.d_model))
        self.wv = nn.Parameter(torch.empty(c.kv_heads * c.head_dim, c.d_model))
        self.wo = nn.Parameter(torch.empty(c.d_model, c.heads * c.head_dim))
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))

    def forward(self, x, cos, sin, positions, cache):
        """x: (B, T, D). cache: None, or keys and values (B, G, S, head_dim), written in place."""
        c, (B, T, _) = self.config, x.shape
        q = linear(x, self.wq).view(B, T, c.heads, c.head_dim)            # (B, T, H, head_dim)
        k = linear(x, self.wk).view(B, T, c.kv_heads, c.head_dim)         # (B, T, G, head_dim)
        v = linear(x, self.wv).view(B, T, c.kv_heads, c.head_dim)         # (B, T, G, head_dim)
        q = rotate(rms_norm(q, self.q_norm, c.norm_eps), cos, sin).transpose(1, 2)
        k = rotate(rms_norm(k, self.k_norm, c.norm_eps), cos, sin)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2),
                                               is_causal=True, enable_gqa=True)
        else:
            keys, values = cache                                          # (B, G, S, head_dim)
            rows = torch.arange(B, device=x.device)[:, None]              # (B, 1)
            keys[rows, :, positions], values[rows, :, positions] = k, v
            slots = torch.arange(keys.shape[2], device=x.device)          # (S,)
            # A slot after the token's own position is empty or belongs to an earlier use.
            seen = slots <= positions[..., None]                          # (B, T, S)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None],
                                               enable_gqa=True)
        return linear(y.transpose(1, 2).reshape(B, T, -1), self.wo)       # (B, T, D)


def load_balancing_loss(probs, chosen):
    """E * sum_e (share of assignments to e) * (mean router probability of e): 1 when balanced.

    probs: (S, E) fp32, chosen: (S, A). The shares are counts and have no gradient; the router
    learns through the probabilities (Switch Transformer, arXiv 2101.03961, equation 4).
    """
    E = probs.shape[1]
    share = chosen.flatten().bincount(minlength=E) / max(chosen.numel(), 1)   # (E,)
    return E * (share * probs.sum(0) / max(len(probs), 1)).sum()              # ()


class MoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.router = nn.Parameter(torch.empty(c.experts, c.d_model))                   # (E, D)
        self.gate_up = nn.Parameter(torch.empty(c.experts, 2 * c.expert_width, c.d_model))
        self.down = nn.Parameter(torch.empty(c.experts, c.d_model, c.expert_width))
        self.qat_mode = "none"                    # of the trainer alone: none, w4a16, w4a4 (qat.py)
        self.chosen = self.balance = None         # of the last forward: (S, A) ids, () fp32 loss
        self.outliers = {}                        # name -> (K,), see MoETransformer.set_outliers

    def weight(self, name):
        """The stacked master as products see it: its outlier columns divided, if there are any."""
        w = getattr(self, name)                                                   # (E, N, K)
        return w / self.outliers[name] if self.outliers else w

    def product(self, x, name, counts):
        """x (S, K) sorted by expert times the stacked matrix `name`: (S, N)."""
        return qat.expert_matmul(x, self.weight(name), counts, self.qat_mode)

    def route(self, x):
        """x (S, D) -> weights (S, A) fp32 that sum to 1, and expert ids (S, A)."""
        logits = F.linear(x.float(), self.router)                                 # (S, E) fp32
        probs = logits.softmax(dim=-1)                                            # (S, E)
        # A stable sort: equal scores fall to the lower expert id, on every side and every batch.
        weights, chosen = (ranked[:, :self.config.active]
                           for ranked in probs.sort(dim=-1, descending=True, stable=True))
        self.chosen, self.balance = chosen, load_balancing_loss(probs, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen                    # (S, A) each

    def run_experts(self, x, counts):
        """SwiGLU of rows sorted by expert: (S, D) -> (S, D)."""
        if self.outliers:
            x = x * self.outliers["gate_up"].to(x.dtype)                          # (S, D)
        gate, up = self.product(x, "gate_up", counts).chunk(2, dim=-1)            # (S, F) each
        if self.outliers:
            up = up * self.outliers["down"].to(x.dtype)                           # (S, F)
        return self.product(F.silu(gate) * up, "down", counts)                    # (S, D)

    def loop_ref(self, x):
        """The definition, expert by expert. x: (S, D) -> (S, D)."""
        weights, chosen = self.route(x)                                           # (S, A) each
        out = torch.zeros_like(x)                                                 # (S, D)
        for e in range(self.config.experts):
            rows, slot = (chosen == e).nonzero(as_tuple=True)                     # (n,) each
            counts = chosen.new_zeros(self.config.experts)                        # (E,)
            counts[e] = len(rows)
            y = self.run_experts(x[rows], counts)                                 # (n, D)
            out = out.index_add(0, rows, (y * weights[rows, slot, None]).to(x.dtype))
        return out

    def forward(self, x):
        """The same with one grouped product for all experts. x: (S, D) -> (S, D)."""
        weights, chosen = self.route(x)                                           # (S, A) each
        order = chosen.flatten().argsort(stable=True)                             # (S*A,)
        counts = chosen.flatten().bincount(minlength=self.config.experts)         # (E,)
        copies = x[:, None].expand(-1, self.config.active, -1).flatten(0, 1)      # (S*A, D)
        y = self.run_experts(copies[order], counts)                               # (S*A, D)
        # Back into token order, so that a token's A outputs are added in the router's order.
        y = y[order.argsort()].unflatten(0, chosen.shape)                         # (S, A, D)
        return (y * weights[..., None]).sum(1).to(x.dtype)                        # (S, D)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.eps = c.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(c.d_model))
        self.attention = Attention(c)
        self.moe_norm = nn.Parameter(torch.ones(c.d_model))
        self.moe = MoE(c)

    def forward(self, x, cos, sin, positions, valid, cache):
        x = x + self.attention(rms_norm(x, self.attention_norm, self.eps), cos, sin, positions,
                               cache)                                             # (B, T, D)
        h = rms_norm(x, self.moe_norm, self.eps)                                  # (B, T, D)
        if valid is None:
            return x + self.moe(h.flatten(0, 1)).view_as(x)
        # Padding never reaches the experts: it would cost time, fill their statistics, and count
        # in the load-balancing loss.
        y = torch.zeros_like(h)
        y[valid] = self.moe(h[valid])                                             # (S, D)
        return x + y


@contextmanager
def unchanged(moe):
    """chosen and balance belong to the forward pass: what a recomputation sets is taken back. (The
    recomputed balance would also keep alive all that it was recomputed from.)"""
    kept = moe.chosen, moe.balance
    try:
        yield
    finally:
        moe.chosen, moe.balance = kept


class MoETransformer(nn.Module):
    """config: sizes. dtype: of the computation; parameters stay fp32 masters. recompute: a block
    keeps only its input for the backward pass, and runs again there (activation checkpointing)."""

    def __init__(self, config, dtype=torch.float32, recompute=False):
        super().__init__()
        c = self.config = config
        self.dtype, self.recompute = dtype, recompute
        self.embedding = nn.Parameter(torch.empty(c.vocab_size, c.d_model))       # (V, D)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.d_model))
        self.head = None if c.tied else nn.Parameter(torch.empty(c.vocab_size, c.d_model))
        for p in self.parameters():
            if p.dim() > 1:                       # norms start at 1, matrices so that they keep
                nn.init.normal_(p, std=p.shape[-1]**-0.5)                 # the size of their input

        inverse = c.rope_theta ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)  # (head_dim/2,)
        angles = torch.arange(c.max_seq_len)[:, None] * inverse                   # (T, head_dim/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def set_qat(self, mode):
        """Choose the trainer's expert product: "none", "w4a16" or "w4a4" (see qat.RECIPES)."""
        for block in self.blocks:
            block.moe.qat_mode = mode

    def set_outliers(self, strength, blocks):
        """Make some channels of the experts' inputs `strength` times larger, and the weight columns
        that they meet as much smaller; 0 takes it back. Large models grow such channels, small ones
        do not. The function stays the same, bit for bit if strength is a power of two, and FP8
        hardly notices. NVFP4 loses twice: the 15 neighbours of an outlier in its block, and the
        divided columns, which mostly round to 0 beside theirs. One channel in each of `blocks` of
        the D/16 blocks, the same share before `down`. Raises ValueError if there are not so many.
        """
        c, scales = self.config, {}                                               # name -> (K,)
        if strength and not (strength >= 1 and 1 <= blocks <= c.d_model // 16):
            raise ValueError(f"--outliers {strength} --outlier-blocks {blocks}: need a strength of "
                             f"at least 1, and 1 to {c.d_model // 16} blocks.")
        for name, K in (("gate_up", c.d_model), ("down", c.expert_width)) if strength else ():
            n = max(1, round(blocks * K / c.d_model))
            scales[name] = self.norm.detach().new_ones(K)
            scales[name][torch.arange(n) * (K // 16) // n * 16] = strength        # evenly spaced
        for block in self.blocks:
            block.moe.outliers = scales

    def forward(self, ids, positions=None, valid=None, select=None, cache=None):
        """ids (B, T) -> logits (B, T, V) fp32, or (S, V) of the positions in `select`.

        positions: (B, T) of each token, default 0..T-1. valid: (B, T) bool, False on padding, which
        must come after the real tokens. select: (B, T) bool, where logits are wanted: the head is
        expensive, and training needs it on answers only. cache: a list of L pairs (keys, values),
        each (B, G, S, head_dim), in which this call writes and reads.
        Raises ValueError if there are more tokens than the context holds.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]       # (1, T)
        if ids.shape[1] > self.config.max_seq_len:
            raise ValueError(f"a sequence of {ids.shape[1]} tokens does not fit into the context "
                             f"of {self.config.max_seq_len}.")
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        # (Not embedding[ids], whose gradient CPU threads add up in any order.)
        x = F.embedding(ids, self.embedding).to(self.dtype)                       # (B, T, D)
        for block, pair in zip(self.blocks, cache or [None] * len(self.blocks)):
            run = block if not (self.recompute and torch.is_grad_enabled()) else partial(
                checkpoint, block, use_reentrant=False, preserve_rng_state=False,
                context_fn=lambda moe=block.moe: (nullcontext(), unchanged(moe)))
            x = run(x, cos, sin, positions, valid, pair)                          # (B, T, D)
        x = rms_norm(x if select is None else x[select], self.norm, self.config.norm_eps)
        weight = self.embedding if self.head is None else self.head               # (V, D)
        # bf16 operands, but fp32 sums and logits: bf16 logits would be off by up to 0.4%.
        return F.linear(x.float(), weight.to(self.dtype).float())                 # (.., V) fp32

    def routes(self):
        """The experts that the last forward chose: (S, L, A), S its valid tokens in order."""
        return torch.stack([block.moe.chosen for block in self.blocks], dim=1)

    def size(self):
        return sum(p.numel() for p in self.parameters())

    def balance_loss(self):
        """The load-balancing loss of the last forward, mean over layers: () fp32."""
        return torch.stack([block.moe.balance for block in self.blocks]).mean()


if __name__ == "__main__":
    for name, config in PRESETS.items():
        print(f"{name}: {MoETransformer(config).size() / 1e6:.2f}M parameters; {config}")
    moe, x = MoETransformer(PRESETS["cpu"]).blocks[0].moe, torch.randn(64, 128)
    error = (moe(x) - moe.loop_ref(x)).norm() / moe(x).norm()
    print(f"grouped experts against the loop: relative difference {error:.0e}")
