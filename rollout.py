"""The sampler: answers and their log-probabilities, in the precision of the recipe.

    sync       copy the trainer's weights: experts into BF16, FP8 or packed NVFP4, the rest into the
               compute dtype (norms and router fp32); with RAC, choose the blocks of its pass
    prefill    each prompt runs once; its keys and values are copied to the answers of its group
    decode     one token a step for all answers that still run; the finished ones leave the batch

The key-value cache is static: its size is fixed when generation starts and kept for the next one,

    bytes = 2 * L * sequences * (longest prompt + new tokens) * G * head_dim * bytes of the dtype

so the `gpu` preset needs 1.1 GB for 256 sequences of 512 tokens in bf16 (L 8, G 4, head_dim 64).

What comes back: ids, mask and log-probs of the answers only, (P * group, T), row p * group + g.
The log-probs are log_softmax(logits / temperature) in fp32 over the real vocabulary, of exactly the
ids that were sampled. Training uses these ids as they are: decoding them to text and encoding it
again would give other ids.

No top-k and no top-p: cutting the sampler's distribution and not the trainer's would be one more
mismatch. FP8 is emulated in fp32: right numbers, no speed.
"""
import copy
from functools import partial

import torch
import torch.nn.functional as F
from tqdm import tqdm

import nvfp4
import qat
import rac

FP8_MAX = 448.0           # the largest finite E4M3 value
SHRINK_AT = 0.75          # finished rows leave once the running ones are this share of the batch


# --- FP8, the rival: E4M3 with one fp32 scale a row of activations, one an output channel --------

def fp8_quantize(x):
    """(..., K) -> codes (..., K) float8_e4m3fn and scales (..., 1) fp32, x ~ codes * scales."""
    amax = x.float().abs().amax(-1, keepdim=True)                         # (..., 1)
    # (divided by a tensor, for the reason that nvfp4.quantize gives)
    scale = (amax / amax.new_tensor(FP8_MAX)).clamp(min=nvfp4.MIN_GLOBAL)
    scale = torch.where(amax == 0, 1.0, scale)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fp8_grouped_matmul(x, w_codes, w_scales, counts):
    """W8A8 product, x (M, K) sorted by expert, w (E, N, K) and (E, N, 1): (M, N) in x's dtype."""
    codes, s_x = fp8_quantize(x)                                          # (M, K), (M, 1)
    rows = codes.float().split(counts.tolist())                           # E x (counts[e], K)
    y = torch.cat([rows[e] @ w_codes[e].float().T * w_scales[e].T for e in range(len(w_codes))])
    return (y * s_x).to(x.dtype)                                          # (M, N)


# --- Log-probs and sampling ----------------------------------------------------------------------

def log_probs(logits, temperature, real_vocab):
    """log_softmax(logits / temperature) in fp32 over the tokens that exist: (..., real_vocab).

    Sampler and trainer both call this one. At temperature 0 (greedy) it means temperature 1.
    """
    return F.log_softmax(logits[..., :real_vocab].float() / (temperature or 1.0), dim=-1)


def uniform(seeds, t):
    """One number in [0, 1) for each row from its own seed: (R,) int64, int -> (R,) float64.

    A hash instead of a generator: number t of a row depends on nothing but (seed, t), so a row can
    be sampled again alone, and rows may leave the batch. The constants are those of `lowbias32`.
    """
    def mix(h):                                                           # (R,) int64 below 2^32
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        h = ((h ^ (h >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return h ^ (h >> 16)
    h = mix(seeds & 0xFFFFFFFF ^ 0x9E3779B9)      # any constant will do: mix(0) is 0, and seeds are
    h = mix(h ^ ((seeds >> 32) & 0xFFFFFFFF))     # often 0
    return mix(h ^ t).double() / 2**32


def sample(logp, temperature, seeds, t):
    """logp (R, V) -> ids (R,): the likeliest at temperature 0, else drawn by inverting the CDF."""
    if temperature == 0:
        return logp.argmax(-1)
    cdf = logp.double().exp().cumsum(-1)                                  # (R, V)
    # right=True steps over tokens of probability zero; scaling by the last entry, which may be
    # 1 - 1e-7, keeps the result inside the vocabulary.
    u = uniform(seeds, t)[:, None] * cdf[:, -1:]                          # (R, 1)
    return torch.searchsorted(cdf, u, right=True)[:, 0]


def sequence_logp(model, prompts, ids, mask, temperature):
    """What `model` gives to answers that are already there: teacher forcing, one forward pass.

    prompts: B id lists; ids, mask: (B, T) answers as `generate` returns them. The trainer calls
    this with gradients; called with `rollout.model` it tells what the rollout's precision gives.
    Returns logp (B, T) fp32, 0 outside the mask; entropy (B, T) in nats, without gradient; and the
    experts of each token, (B, T, L, A) int64.
    """
    device, config, mask = ids.device, model.config, mask.bool()
    prompt_length = torch.tensor([len(p) for p in prompts], device=device)[:, None]   # (B, 1)
    length = prompt_length + mask.sum(1, keepdim=True)                                # (B, 1)
    rows = [torch.cat([torch.tensor(p, device=device), ids[b][mask[b]]])
            for b, p in enumerate(prompts)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)                  # (B, W)
    # The logits at position i predict the token at i + 1: the last token is never an input.
    position = torch.arange(tokens.shape[1] - 1, device=device)                       # (W-1,)
    valid = position < length - 1                                                     # (B, W-1)
    select = valid & (position >= prompt_length - 1)      # (B, W-1), as many True as mask, in order
    logits = model(tokens[:, :-1], valid=valid, select=select)                        # (S, V)
    all_logp = log_probs(logits, temperature, config.real_vocab)                      # (S, V)
    logp = all_logp.gather(1, ids[mask][:, None])[:, 0]                               # (S,)
    with torch.no_grad():
        entropy = -(all_logp.exp() * all_logp).sum(-1)                                # (S,)
    zeros = torch.zeros(ids.shape, device=device)                                     # (B, T) fp32
    routes = torch.zeros(*ids.shape, config.layers, config.active, dtype=torch.int64,
                         device=device)
    routes[mask] = model.routes()[select[valid]]                                      # (S, L, A)
    return zeros.masked_scatter(mask, logp), zeros.masked_scatter(mask, entropy), routes


def micro_batches(prompts, mask, max_tokens, last):
    """Cut B sequences into parts of at most max_tokens tokens, padding counted, for sequence_logp.

    The longest come first and similar lengths together, so that there is little padding; rows with
    last (B,) True come at the end. Yields ids of rows (b,) and their longest answer, to cut T to.
    """
    length = mask.sum(1)                                                              # (B,)
    width = length + torch.tensor([len(p) for p in prompts], device=mask.device)      # (B,)
    rows = (10**6 * last - width).argsort(stable=True)      # (B,), 10**6 is more than any width
    while len(rows):
        n = max(1, max_tokens // int(width[rows].max()))
        yield rows[:n], int(length[rows[:n]].max())
        rows = rows[n:]


# --- The sampler ---------------------------------------------------------------------------------

class Rollout:
    """A second copy of the model, whose experts are held in the rollout precision.

    model: the trainer's MoETransformer, read again at each `sync`. recipe: a name of qat.RECIPES.
    rac_ratio: the share of blocks that get the second pass, if the recipe has one; rac_coverage, if
    not 0: those that hold this share of the residual energy instead (see rac.select_blocks).
    """

    def __init__(self, model, recipe, rac_ratio=0.5, rac_coverage=0):
        if recipe not in qat.RECIPES:
            raise ValueError(f"unknown recipe {recipe!r}: use one of {', '.join(qat.RECIPES)}.")
        rac.select_blocks(torch.ones(1), rac_ratio, rac_coverage)         # raises if out of range
        self.source, self.precision = model, qat.RECIPES[recipe][0]
        self.ratio, self.coverage = rac_ratio, rac_coverage
        self.weights = {}       # (layer, name) -> a tuple of tensors, overwritten at each sync
        self.blocks = {}        # (layer, name) -> (S,) ids of RAC's blocks, overwritten likewise
        self.energy = {}        # (layer, name) -> (K/16,) residual energy of the last rollout
        self.measuring = None   # while measuring, a new `energy` in the making
        self.synced = False
        self.cache = None       # L pairs of keys and values, each (B, G, S, head_dim)
        for block in model.blocks:
            block.moe.chosen = block.moe.balance = None      # a live graph cannot be copied
        experts = [p for block in model.blocks for p in (block.moe.gate_up, block.moe.down)]
        self.model = copy.deepcopy(model, {id(p): p for p in experts})    # all but the experts:
        for layer, block in enumerate(self.model.blocks):
            del block.moe.gate_up, block.moe.down            # kept in self.weights instead, and
            block.moe.product = partial(self.product, layer)     # multiplied by self.product
        self.model.requires_grad_(False)
        for name, p in self.model.named_parameters():
            if not name.endswith(("norm", "router")):        # those are small and stay fp32
                p.data = p.data.to(model.dtype)

    # --- weights ---

    @torch.no_grad()
    def sync(self, calibration_ids=None):
        """Take over the trainer's weights, in place, and refresh RAC's block selection.

        The selection follows the activations of the last `generate`. Before the first one there are
        none: pass calibration_ids, a few prompts as id lists, to measure them on.
        Raises ValueError if a weight is NaN or infinite (nothing is overwritten then), or if RAC
        has nothing to measure on.
        """
        source = dict(self.source.named_parameters())
        for name, p in source.items():
            if not torch.isfinite(p).all():
                raise ValueError(f"the weight {name} holds NaN or infinity, so it cannot be synced "
                                 "into the rollout: training diverged; start a new run with a "
                                 "smaller learning rate.")
        if self.precision == "nvfp4+rac" and not self.energy and not calibration_ids:
            raise ValueError("the first sync of a recipe with RAC has no activations to choose "
                             "blocks by: pass calibration_ids, some prompts as lists of ids.")
        self.synced = False                                  # until all of it is done
        for name, p in self.model.named_parameters():
            p.copy_(source[name])
        for layer, block in enumerate(self.source.blocks):
            for name in ("gate_up", "down"):
                new = self.convert(block.moe.weight(name))
                for old, tensor in zip(self.weights.setdefault((layer, name), new), new):
                    old.copy_(tensor)                        # the same memory as before
        if self.precision == "nvfp4+rac":
            if calibration_ids:
                kept, self.blocks = self.blocks, {}          # measured under plain NVFP4
                self.measuring = {}
                try:
                    self.prefill(calibration_ids, 0)
                    self.energy = self.measuring
                finally:
                    self.blocks, self.measuring = kept, None
            for key, energy in self.energy.items():
                chosen = rac.select_blocks(energy, self.ratio, self.coverage)         # (S,)
                self.blocks.setdefault(key, chosen).copy_(chosen)
        self.synced = True

    def convert(self, w):
        """A stacked fp32 master (E, N, K) in the rollout precision: a tuple of tensors."""
        if self.precision == "bf16":
            return (w.to(self.model.dtype, copy=True),)
        if self.precision == "fp8":
            return fp8_quantize(w)
        return nvfp4.quantize(w)

    def product(self, layer, x, name, counts):
        """Replaces MoE.product: x (S, K) sorted by expert -> (S, N), in the rollout precision."""
        w = self.weights[layer, name]
        if self.precision == "bf16":
            return qat.grouped_linear(x, w[0], counts)
        if self.precision == "fp8":
            return fp8_grouped_matmul(x, *w, counts)
        # Without RAC, and before its first selection (calibration), no block has a second pass.
        blocks = self.blocks.get((layer, name), counts[:0])
        y, energy = rac.compensated_grouped_matmul(x, w, counts, blocks, x.dtype,
                                                   self.measuring is not None)
        if self.measuring is not None:
            self.measuring[layer, name] = self.measuring.get((layer, name), 0) + energy
        return y

    # --- generation ---

    def reserve(self, rows, length):
        """The static cache: L pairs of keys and values (B, G, S, head_dim), enlarged at need."""
        c = self.model.config
        B, S = (0, 0) if self.cache is None else self.cache[0][0].shape[::2]
        if B < rows or S < length:
            self.cache = None                                # free the old one first
            shape = (max(B, rows), c.kv_heads, max(S, length), c.head_dim)
            self.cache = [[torch.zeros(shape, dtype=self.model.dtype,
                                       device=self.model.embedding.device) for _ in range(2)]
                          for _ in range(c.layers)]
        return self.cache

    def prefill(self, prompts, max_new_tokens, rows=0):
        """Run P prompts once, into the first P rows of a cache for `rows` answers.

        Returns the logits after each prompt (P, V), the experts of its last token (P, L, A), and
        the lengths (P,). Raises ValueError if a prompt is empty or too long.
        """
        c, device = self.model.config, self.model.embedding.device
        for p, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= c.max_seq_len - max_new_tokens:
                raise ValueError(f"prompt {p} has {len(prompt)} tokens: with {max_new_tokens} new "
                                 f"ones it must fit into the context of {c.max_seq_len}, and not "
                                 "be empty.")
        length = torch.tensor([len(p) for p in prompts], device=device)               # (P,)
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(p, dtype=torch.int64, device=device) for p in prompts], True)   # (P, T)
        # Padding on the right: positions are those of the prompt alone, causal attention never
        # looks at the padding, and decoding overwrites its cache slots before they are read.
        T = ids.shape[1]
        position = torch.arange(T, device=device).expand_as(ids)                      # (P, T)
        valid, last = position < length[:, None], position == length[:, None] - 1     # (P, T)
        cache = self.reserve(max(rows, len(prompts)), T + max_new_tokens)
        views = [[kept[:len(prompts), :, :T] for kept in pair] for pair in cache]
        logits = self.model(ids, position, valid, last, views)                        # (P, V)
        return logits, self.model.routes()[last[valid]], length

    @torch.no_grad()
    def generate(self, prompts, group, max_new_tokens, temperature, seed, measure=True):
        """Sample `group` answers to each of P prompts.

        prompts: P lists of ids. temperature: 0 is greedy. seed: row r draws from stream seed + r,
        so prompt p alone with seed + p * group gives the same answers. measure: let these
        activations decide RAC's next blocks (an evaluation should not).
        Returns ids (R, T) int64, mask (R, T) bool, logp (R, T) fp32 with R = P * group and T =
        max_new_tokens. The mask covers the end token, if the answer reached one; behind it ids are
        the end token and logp is 0. `self.routes` then holds each token's experts, (R, T, L, A).
        Raises ValueError for prompts that do not fit, and if the logits are not finite.
        """
        c, device, R = self.model.config, self.model.embedding.device, len(prompts) * group
        if not self.synced:
            raise RuntimeError("call sync() before generate(): the rollout has no weights yet.")
        if not (temperature >= 0 and group >= 1 and max_new_tokens >= 1):
            raise ValueError(f"generate needs temperature >= 0, group >= 1 and max_new_tokens >= "
                             f"1; got {temperature}, {group} and {max_new_tokens}.")
        ids = torch.full((R, max_new_tokens), c.end_id, device=device)                # (R, T)
        mask = torch.zeros((R, max_new_tokens), dtype=torch.bool, device=device)
        logp = torch.zeros((R, max_new_tokens), device=device)
        self.routes = torch.zeros(R, max_new_tokens, c.layers, c.active, dtype=torch.int64,
                                  device=device)
        if R == 0:
            return ids, mask, logp
        self.measuring = {} if measure and self.precision == "nvfp4+rac" else None
        logits, routes, length = self.prefill(prompts, max_new_tokens, R)
        # Each prompt's logits, experts, length and cache serve the whole group.
        logits, routes, length = (x.repeat_interleave(group, 0) for x in (logits, routes, length))
        longest = int(length.max())
        for kept in [tensor for pair in self.cache for tensor in pair]:
            kept[:R, :, :longest] = kept[:len(prompts), :, :longest].repeat_interleave(group, 0)

        # Row i of the running batch is answer live[i], and running[i] turns False at its end. When
        # enough have ended, the batch shrinks: live [0 1 2 3], running [1 0 0 1] -> live [0 3].
        live = torch.arange(R, device=device)
        running = torch.ones(R, dtype=torch.bool, device=device)
        bar = tqdm(range(max_new_tokens), desc="rollout", leave=False, disable=None)
        for t in bar:
            all_logp = log_probs(logits, temperature, c.real_vocab)                   # (n, V)
            if all_logp[running].isnan().any():
                raise ValueError(f"the rollout's logits are not finite at token {t}: the weights "
                                 "overflow in its precision; training diverged.")
            token = sample(all_logp, temperature, seed + live, t)                     # (n,)
            rows = live[running]
            ids[rows, t], mask[rows, t] = token[running], True
            logp[rows, t] = all_logp.gather(1, token[:, None])[running, 0]
            self.routes[rows, t] = routes
            running = running & (token != c.end_id)
            n, span = int(running.sum()), longest + t + 1    # rows left, cache slots in use
            bar.set_postfix(live=n, refresh=False)
            if n == 0 or t == max_new_tokens - 1:
                break
            if n <= SHRINK_AT * len(running):
                for kept in [tensor for pair in self.cache for tensor in pair]:
                    kept[:n, :, :span] = kept[:len(running), :, :span][running]
                live, token, running = live[running], token[running], running[running]
            position = length[live] + t                      # (n,) of the token just sampled
            views = [[kept[:len(live), :, :span] for kept in pair] for pair in self.cache]
            logits = self.model(token[:, None], position[:, None], running[:, None], None,
                                views)[:, 0]                                          # (n, V)
            routes = self.model.routes()                                # (running rows, L, A)
        bar.close()
        self.energy, self.measuring = self.measuring or self.energy, None     # kept if not measured
        return ids, mask, logp
