"""GRPO: from rewards and log-probs to a loss, and the monitors of the rollout-to-train gap.

    maximise  J = 1/N sum_i sum_t  w_it * min(r_it A_i, clip(r_it, 1 - clip_low, 1 + clip_high) A_i)
    ratio     r_it = pi(token t of answer i) / pi_old(the same token) = exp(logp - logp_old)
    advantage A_i  = (reward_i - mean of its group) / standard deviation of its group
    N         sampled tokens in the whole batch: all after the prompt, end token included

  1. Kept: the group mean is the baseline, so there is no value network (DeepSeekMath 2402.03300).
  2. Kept: division by the group's deviation; off is Dr. GRPO (2503.20783), which found that it
     gives nearly solved and nearly unsolved prompts more say than the rest.
  3. Kept: the clipped ratio; the upper bound may differ ("clip-higher", DAPO 2503.14476, 3.1).
  4. Removed: the mean over each answer's own tokens, which makes a wrong answer cheaper the longer
     it is. Every token weighs 1/N instead (DAPO, 3.3), however the batch is cut for memory.
  5. Removed: the KL term, as in DAPO: a graded answer needs no leash (`kl_penalty` brings it back).

The precision gap enters through pi_old. NVFP4 drew the tokens, BF16 differentiates them, and if
pi_old is the rollout, then r_it is off 1 before any update: the gap fires the clip, weighs the
gradient and, if it grows, ends the run. QUADS shrinks the gap; `correction_weights` (w_it, 1 by
default) is the usual repair after the fact; `mismatch` and `router_agreement` measure it.

With one update per batch the printed loss starts near 0 (r is 1, and the advantages of a group
sum to 0): watch reward.

Letters: P prompts, G answers a prompt (a group), B = P*G sequences, T answer tokens, V vocabulary,
L layers, A experts active per token. Log-probs are in nats. A mask is 1 on sampled tokens, bool or
0/1 in any dtype; padding may hold anything, NaN included.
"""
import torch


def advantages(rewards, normalize_std=True):
    """Group-relative advantages (DeepSeekMath, 4.1.2): rewards (P, G), any dtype -> (P, G) fp32.

    The deviation divides by G, not G - 1: |A| < sqrt(G). Equal rewards, or a group of one, give
    exactly 0. Raises ValueError if rewards are not (P, G) or not finite.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be (prompts, group), got {rewards.shape}")
    bad = (~rewards.isfinite()).any(dim=1).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"rewards of prompt rows {bad} are not finite: the grader has a bug")
    # In fp32, equal rewards less their mean need not be 0; less the first of them they are.
    centred = rewards.float() - rewards[:, :1].float()                  # (P, G) fp32
    centred = centred - centred.mean(dim=1, keepdim=True)               # (P, G)
    std = centred.square().mean(dim=1, keepdim=True).sqrt()             # (P, 1) < 1e-4 is rounding
    scaled = centred / std if normalize_std else centred                # (P, G)
    return torch.where(std < 1e-4, 0.0, scaled)                         # (P, G)


def _log_ratio(logp, logp_other, mask):
    """log(pi / pi_other) on sampled tokens, exactly 0 on padding: (B, T) fp32, bool mask."""
    if not logp.shape == logp_other.shape == mask.shape:
        raise ValueError(f"log-probs {logp.shape}, {logp_other.shape}, mask {mask.shape} differ")
    if min(torch.finfo(x.dtype).bits for x in (logp, logp_other)) < 32:
        raise ValueError("log-probs must be float32: near -5 those of bfloat16 lie 0.03 apart")
    mask = mask.bool()                                                  # (B, T)
    # Chosen before exp, not after: the gradient of an unused branch is 0 * inf = NaN.
    log_ratio = torch.where(mask, logp - logp_other, 0.0)               # (B, T)
    bad = (~log_ratio.isfinite()).nonzero().tolist()
    if bad:
        raise ValueError(f"{len(bad)} sampled tokens lack a finite log-prob, first at {bad[0]}")
    return log_ratio, mask


def _token_mean(values, mask, token_count=None):
    """Sum of values (B, T) over sampled tokens / token_count (default: their number) -> ()."""
    count = torch.as_tensor(mask.sum() if token_count is None else token_count)
    return torch.where(mask, values, 0.0).sum() / count.clamp(min=1)    # ()


def policy_loss(logp, logp_old, advantages, mask, clip_low=0.2, clip_high=0.2, token_count=None,
                weights=None):
    """The clipped objective, negated: (loss, metrics), all () fp32; only the loss has a gradient.

    logp, logp_old, mask (B, T); advantages (B,). Pass the whole batch's token_count (int or 0-dim
    tensor) with every micro-batch: loss, gradient and metrics then add up, however it is split.
    `correction_weights` makes weights (B, T) and says what logp_old is. Metrics: `ratio_mean`, and
    `clip_fraction`, the share of tokens whose min took the clipped branch (their gradient is 0).
    In the first update on a batch only the precision gap can clip (with the trainer's own logp_old
    nothing does); from the second on it can. All masked: loss and gradient are 0. ValueError if
    shapes disagree, or log-probs are half precision or not finite; so do the next three functions.
    """
    log_ratio, mask = _log_ratio(logp, logp_old.detach(), mask)         # (B, T), (B, T)
    weights = torch.ones_like(log_ratio) if weights is None else weights.detach()     # (B, T)
    if advantages.shape != logp.shape[:1] or weights.shape != logp.shape:
        raise ValueError(f"advantages {advantages.shape} must fit the rows of logp {logp.shape}, "
                         f"and weights {weights.shape} all of it")
    ratio = log_ratio.exp()                                             # (B, T) 1 on padding
    free = ratio * advantages[:, None]                                  # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages[:, None]          # (B, T)
    objective = weights * torch.minimum(free, clipped)                  # (B, T)
    metrics = {"clip_fraction": _token_mean((clipped < free).float(), mask, token_count),
               "ratio_mean": _token_mean(ratio.detach(), mask, token_count)}
    return _token_mean(-objective, mask, token_count), metrics


def correction_weights(logp_train, logp_rollout, mask, mode, cap=2.0, low=0.5, high=2.0):
    """Importance weights pi_train / pi_rollout for `policy_loss`: (B, T) fp32, no gradient.

    mode   weight, with its source                             logp_old of `policy_loss`
    none   1                                                   the rollout's: the gap can clip
    tis    min(ratio, cap)                (Yao et al. 2025)    the trainer's own, before updates
    mask   ratio, 0 outside [low, high]   (IcePop 2510.18855)  the trainer's own, before updates
    With tis and mask the clip sees only updates, the weight only the gap. Unknown mode: ValueError.
    """
    ratio = _log_ratio(logp_train.detach(), logp_rollout.detach(), mask)[0].exp()     # (B, T)
    if mode == "none":
        return torch.ones_like(ratio)                                   # (B, T)
    if mode == "tis":
        return ratio.clamp(max=cap)                                     # (B, T)
    if mode == "mask":
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)              # (B, T)
    raise ValueError(f"unknown correction {mode!r}: choose none, tis or mask")


def kl_penalty(logp, logp_ref, mask, token_count=None):
    """k3 estimate of KL(pi || pi_ref) a token, in nats: () with a gradient (DeepSeekMath, eq. 4).

    Never negative (Schulman 2020, "Approximating KL divergence"). For samples of pi the value is
    unbiased, and the gradient averages to that of the reversed KL(pi_ref || pi).
    """
    log_ratio, mask = _log_ratio(logp_ref.detach(), logp, mask)         # (B, T), (B, T)
    # expm1(d) - d, not exp(d) - 1 - d: at d = 1e-3 the fp32 rounding of exp(d) is a tenth of it.
    return _token_mean(torch.expm1(log_ratio) - log_ratio, mask, token_count)         # ()


@torch.no_grad()
def mismatch(logp_train, logp_rollout, mask):
    """How far the two sides are apart on the tokens that the rollout sampled: a dict of floats.

    With d = logp_train - logp_rollout (B, T): gap_mean, gap_max, gap_p99 (99% of tokens are at or
    below it) of |d|; gap_tail, share above ln 2; kl_k1 = mean(-d), kl_k3 = mean(exp(d) - 1 - d),
    two estimates of KL(rollout || train). Direction matters: a token at -5 and -15 has k3 = 22,015
    if the trainer says -5, and 9 if it says -15. Averaged in float64; without tokens, zeros.
    """
    log_ratio, mask = _log_ratio(logp_train, logp_rollout, mask)        # (B, T), (B, T)
    d = log_ratio[mask].double() if mask.any() else torch.zeros(1)      # (N,) N sampled tokens
    gap = d.abs().sort().values                # (N,) torch.quantile stops at 16M elements
    return {"gap_mean": gap.mean().item(), "gap_max": gap[-1].item(),
            "gap_p99": gap[(99 * len(gap) - 1) // 100].item(),
            "gap_tail": (gap.exp() > 2).double().mean().item(),
            "kl_k1": (0 - d).mean().item(), "kl_k3": (torch.expm1(d) - d).mean().item()}


def router_agreement(experts_train, experts_rollout, mask):
    """Share of (sampled token, layer) pairs whose set of experts is the same on both sides: float.

    experts (B, T, L, A) integer ids, in any order; mask (B, T). No sampled token gives 1.0.
    """
    train, rollout = experts_train.shape, experts_rollout.shape
    if train != rollout or train[:2] != mask.shape:
        raise ValueError(f"expert ids {train}, {rollout} and mask {mask.shape} do not fit")
    same = experts_train.sort(-1).values == experts_rollout.sort(-1).values           # (B, T, L, A)
    same = same.all(-1)[mask.bool()].double()                           # (N, L)
    return same.mean().item() if same.numel() else 1.0


def pass_at_k(correct, n, k):
    """Unbiased chance that one of k answers is right (Chen et al. 2107.03374, eq. 1).

    correct (P,) of n answers -> (P,) fp64: 1 - C(n - correct, k) / C(n, k). Average it over P.
    """
    if not 1 <= k <= n or (correct < 0).any() or (correct > n).any():
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got k={k}, n={n}")
    j = torch.arange(k, device=correct.device)                          # (k,) answers already drawn
    wrong = (n - correct[:, None] - j).clamp(min=0).double()            # (P, k) wrong ones left
    return 1 - (wrong / (n - j)).prod(dim=1)                            # (P,)


def standard_error(values):
    """Sample deviation / sqrt(n) of a list or (n,) tensor: float. One value has no spread: NaN."""
    values = torch.as_tensor(values).double()                           # (n,)
    return (values.std() / len(values)**0.5).item() if len(values) > 1 else float("nan")


def curves(rows, title):
    """A figure of the monitors over the steps. rows: dicts of the columns of metrics.csv."""
    from matplotlib.figure import Figure        # here, so that importing this file needs no plots
    figure = Figure(figsize=(16, 3.6), layout="constrained")
    panels = figure.subplots(1, 4)
    for panel, names in zip(panels, ("reward", "solved solved_bf16 official",
                                     "gap_max gap_p99 gap_mean", "entropy")):
        for name in names.split():
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                panel.plot(*zip(*points), ".-" if "solved" in names else "-", label=name)
                panel.legend()
        panel.set_xlabel("GRPO step")
    panels[2].set_yscale("symlog", linthresh=1e-6)      # logarithmic, with room for an exact 0
    figure.suptitle(title)
    return figure
