"""Tests of grpo.py: python -m pytest tests/test_grpo.py (seconds, one CPU thread, no download).

Most replay a fault that a public RL trainer once shipped; the docstring names the report.
"""
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import grpo  # noqa: E402

torch.set_num_threads(1)
LN2, NAN, INF = math.log(2), float("nan"), float("inf")
LENGTHS = [1, 40, 2, 3, 40, 1, 17, 5]


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def loss_and_grad(logp, *args, **kwargs):
    logp = logp.detach().clone().requires_grad_()
    loss, metrics = grpo.policy_loss(logp, *args, **kwargs)
    assert not any(value.requires_grad for value in metrics.values())
    return loss.detach(), metrics, torch.autograd.grad(loss, logp)[0]


def toy_batch():
    """A tiny policy over 11 tokens, and 2 prompts x 4 answers that an older one sampled."""
    torch.manual_seed(0)
    policy = torch.nn.Embedding(11, 11)                                  # next-token logits
    mask = torch.arange(40) < torch.tensor(LENGTHS)[:, None]             # (B, T)
    ids = torch.randint(11, (8, 41))                                     # (B, T + 1)
    logp_old = token_logp(policy, ids).detach() + 0.2 * torch.randn(8, 40)
    rewards = tensor([1, 0, 0, 0], [1, 1, 0, 1])                         # (P, G)
    return policy, ids, logp_old, grpo.advantages(rewards).flatten(), mask


def token_logp(policy, ids):
    logp = policy(ids[:, :-1]).log_softmax(-1)                           # (B, T, V)
    return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)                 # (B, T)


def step_gradient(policy, batch, pieces, count):
    """Gradient, and [loss, KL, clip fraction], summed over micro-batches (lists of rows)."""
    policy.zero_grad()
    totals = torch.zeros(3)
    for rows in pieces:
        ids, logp_old, advantages, mask = (x[rows] for x in batch)
        logp = token_logp(policy, ids)
        loss, metrics = grpo.policy_loss(logp, logp_old, advantages, mask, token_count=count)
        kl = grpo.kl_penalty(logp, logp_old, mask, token_count=count)
        (loss + 0.1 * kl).backward()
        totals += torch.stack([loss.detach(), kl.detach(), metrics["clip_fraction"]])
    return policy.weight.grad.clone(), totals


def test_two_by_three_by_hand():
    # ratios 2  2  1/2   A = +1, clip [.8, 1.4]: min(2, 1.4)  min(2, 1.4)  min(.5, .8) = 1.4 1.4 .5
    # ratios 2 1/2 pad   A = -2                : min(-4, -2.8)  min(-1, -1.6)          = -4 -1.6
    # Sum -2.3 over 5 tokens: loss .46. Clipped: both 2 in row 1, the 1/2 in row 2.
    # Gradient: -(ratio * A) / 5 where not clipped, 0 where clipped and on the padding.
    logp, logp_old = tensor([-1, -1, -2], [-1, -2, -7]), tensor([-1, -1, -2], [-1, -2, -3])
    logp_old += LN2 * tensor([-1, -1, 1], [-1, 1, 0])
    loss, metrics, grad = loss_and_grad(logp, logp_old, torch.tensor([1.0, -2.0]),
                                        tensor([1, 1, 1], [1, 1, 0]), clip_low=0.2, clip_high=0.4)
    torch.testing.assert_close(loss, torch.tensor(0.46))
    torch.testing.assert_close(grad, tensor([0, 0, -0.1], [0.8, 0, 0]))
    assert metrics["clip_fraction"].item() == pytest.approx(3 / 5)
    assert metrics["ratio_mean"].item() == pytest.approx(7 / 5)


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.35, 1.0, 123456.7])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward, normalize_std):
    """Fault 1 (NeMo-RL 4161): the fp32 deviation of equal rewards is not always 0."""
    for group in (1, 3, 7, 8):
        out = grpo.advantages(torch.full((2, group), reward), normalize_std)
        assert out.dtype == torch.float32 and out.tolist() == [[0.0] * group] * 2
    nearly = tensor([0.3 + 3e-8] + [0.3] * 7)
    assert nearly.unique().numel() == 2 and grpo.advantages(nearly, normalize_std).abs().max() == 0


def test_advantages_by_hand():
    """Fault 1, the other half: seven against one stays below sqrt(G)."""
    out = grpo.advantages(torch.tensor([[1] + [0] * 7, [0] + [1] * 7]))  # integer rewards
    assert out[0, 0].item() == pytest.approx(7**0.5) and out.abs().max() <= 8**0.5
    torch.testing.assert_close(out[1], -out[0])
    torch.testing.assert_close(grpo.advantages(tensor([0, 0, 3]), normalize_std=False),
                               tensor([-1, -1, 2]))


def test_groups_are_rows():
    """Fault 14 (prime-rl 600): reward = prompt index is 0 everywhere, in any order of prompts."""
    for order in itertools.permutations(range(4)):
        rewards = torch.tensor(order).repeat_interleave(3)               # row p*G + g
        assert grpo.advantages(rewards.view(4, 3)).abs().max() == 0
    # The same prompt drawn twice stays two groups, each centred by itself.
    torch.testing.assert_close(grpo.advantages(tensor([0, 1], [1, 1])), tensor([-1, 1], [0, 0]))


def test_end_token_trains_and_padding_does_not():
    """Fault 3 (trl 4970): pad == eos must not remove the end token; padding may hold anything."""
    mask = tensor([1, 1, 1, 0, 0], [1, 0, 0, 0, 0])                      # a row's last 1: its end
    real = mask.bool()
    logp = torch.where(real, -1.0, tensor([0, 0, 0, NAN, -INF], [0, INF, NAN, -INF, 0]))
    old = torch.where(real, -1.1, tensor([0, 0, 0, INF, -INF], [0, INF, 0, NAN, NAN]))
    loss, metrics, grad = loss_and_grad(logp, old, torch.tensor([1.0, -1]), mask,
                                        weights=torch.where(real, 1.0, NAN))
    assert loss.isfinite() and all(value.isfinite() for value in metrics.values())
    penalised = logp.clone().requires_grad_()
    grpo.kl_penalty(penalised, old, mask).backward()
    for gradient in (grad, penalised.grad):
        assert (gradient[real] != 0).all() and (gradient[~real] == 0).all()
    assert all(math.isfinite(value) for value in grpo.mismatch(logp, old, mask).values())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gradient_does_not_depend_on_the_split(size):
    """Fault 9 (ms-swift 10117): shuffled micro-batches of very unequal answers, one gradient."""
    policy, *batch = toy_batch()
    whole, totals = step_gradient(policy, batch, [range(8)], None)
    order = torch.randperm(8).tolist()
    pieces = [order[i:i + size] for i in range(0, 8, size)]
    for count in (sum(LENGTHS), torch.tensor(sum(LENGTHS))):
        split, split_totals = step_gradient(policy, batch, pieces, count)
        assert (split - whole).norm() <= 1e-5 * whole.norm()
        torch.testing.assert_close(split_totals, totals, rtol=1e-5, atol=1e-7)
    assert whole.norm() > 1e-3 and totals[2] > 0


def test_masked_rows_leave_the_denominator():
    """Fault 10 (trl 6369): masking half of the rows equals keeping the other half; all gives 0."""
    policy, *batch, mask = toy_batch()
    half = mask & (torch.arange(8) < 4)[:, None]
    torch.testing.assert_close(step_gradient(policy, (*batch, half), [range(8)], None),
                               step_gradient(policy, (*batch, mask), [range(4)], None))
    for count in (None, 0):
        out = step_gradient(policy, (*batch, torch.zeros_like(mask)), [range(8)], count)
        assert out[0].abs().max() == 0 and out[1].abs().max() == 0


def test_unchanged_weights_give_ratio_one():
    """Fault 21 (prime-rl 568): ratio exactly 1, and the loss is minus the mean advantage."""
    policy, ids, _, advantages, mask = toy_batch()
    logp = token_logp(policy, ids)
    loss, metrics, grad = loss_and_grad(logp, logp, advantages, mask)
    per_token = advantages[:, None].expand_as(mask)                      # (B, T)
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0
    torch.testing.assert_close(loss, -per_token[mask].mean())
    torch.testing.assert_close(grad, torch.where(mask, -per_token / mask.sum(), 0.0))
    assert set(grpo.mismatch(logp, logp, mask).values()) == {0.0}


def test_second_update_clips():
    """Fault 25 (trl 3120): the clip fraction is 0 in the first update on a batch, not later."""
    policy, ids, _, advantages, mask = toy_batch()
    logp_old, fractions = token_logp(policy, ids).detach(), []
    optimizer = torch.optim.SGD(policy.parameters(), lr=20.0)
    for _ in range(2):
        loss, metrics = grpo.policy_loss(token_logp(policy, ids), logp_old, advantages, mask)
        loss.backward()
        optimizer.step()
        fractions.append(metrics["clip_fraction"].item())
    assert fractions[0] == 0 < fractions[1] <= 1


def test_kl_estimators_on_an_enumerated_policy():
    """Fault 24 (trl 3025): each token as often as its probability, so a mean is an expectation."""
    rollout, train = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.2, 0.3, 0.5])
    tokens, mask = torch.tensor([[0, 0, 1, 2]]), torch.ones(1, 4)        # as often as in rollout
    exact = (rollout * (rollout / train).log()).sum().item()
    out = grpo.mismatch(train.log()[tokens], rollout.log()[tokens], mask)
    assert out["kl_k1"] == pytest.approx(exact) and out["kl_k3"] == pytest.approx(exact)
    # kl_penalty with pi = rollout: that value, and the gradient of KL(ref || pi), pi - ref a logit.
    logits = rollout.log().requires_grad_()
    kl = grpo.kl_penalty(logits.log_softmax(-1)[tokens], train.log()[tokens], mask)
    kl.backward()
    assert kl.item() == pytest.approx(exact)
    torch.testing.assert_close(logits.grad, rollout - train)
    for logp_train, logp_rollout, k3 in [(-5, -15, 22015.4658), (-15, -5, 9.0000454)]:
        out = grpo.mismatch(tensor([logp_train]), tensor([logp_rollout]), torch.ones(1, 1))
        assert out["kl_k1"] == logp_rollout - logp_train and out["kl_k3"] == pytest.approx(k3)
        assert out["gap_mean"] == out["gap_max"] == out["gap_p99"] == 10 and out["gap_tail"] == 1
    # A gap of 1e-4 has k3 = 5e-9, which exp(d) - 1 - d cannot hold in fp32.
    small = grpo.kl_penalty(tensor([0]), tensor([1e-4]), torch.ones(1, 1)).item()
    assert small == pytest.approx(5e-9, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_mismatch_statistics_and_mask_dtypes(dtype):
    # 200 sampled tokens with gaps 2.00 1.99 .. .01, signs alternating, among as many padded NaNs.
    gaps = torch.arange(200, 0, -1) / 100 * torch.tensor([1.0, -1.0]).repeat(100)
    rollout, mask = torch.full((20, 20), NAN), torch.zeros(20, 20, dtype=dtype)
    rollout[:, ::2], mask[:, ::2] = (gaps - 3).view(20, 10), 1
    out = grpo.mismatch(torch.full((20, 20), -3.0), rollout, mask)
    assert all(type(value) is float for value in out.values())
    assert out["gap_mean"] == pytest.approx(1.005) and out["gap_max"] == pytest.approx(2)
    assert out["gap_p99"] == pytest.approx(1.98) and out["gap_tail"] == pytest.approx(131 / 200)
    assert set(grpo.mismatch(rollout, rollout, mask * 0).values()) == {0.0}
    assert grpo.policy_loss(rollout, rollout, torch.ones(20), mask)[0] == -1


def test_correction_weights_by_hand():
    train = tensor([1, 1.5, 3, 0.6, 0.4]).log().requires_grad_()
    expected = {"none": [1, 1, 1, 1, 1], "tis": [1, 1.5, 2, 0.6, 0.4], "mask": [1, 1.5, 0, 0.6, 0]}
    for mode, weights in expected.items():
        out = grpo.correction_weights(train, torch.zeros(1, 5), torch.ones(1, 5), mode)
        torch.testing.assert_close(out, tensor(weights))                 # fp32, as tensor() is
        assert not out.requires_grad


def test_which_old_log_probs_go_with_which_weights():
    # Exact gradient of E_pi[reward] from samples of another policy, enumerated. Weights with the
    # trainer's own logp_old repair the gap; so does the rollout's logp_old; ignoring it does not.
    rollout, reward = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0, 0])
    tokens, mask = torch.tensor([[0], [0], [1], [2]]), torch.ones(4, 1)  # as often as in rollout
    logits = torch.tensor([0.45, 0.25, 0.3]).log().requires_grad_()
    exact, = torch.autograd.grad(-(logits.softmax(-1) * reward).sum(), logits)
    logp, logp_rollout = logits.log_softmax(-1)[tokens], rollout.log()[tokens]
    attached = (logp - logp_rollout).exp()                               # must count as a constant
    tis = grpo.correction_weights(logp, logp_rollout, mask, "tis")
    for old, weights, right in [(logp, tis, True), (logp, attached, True),
                                (logp_rollout, None, True), (logp, None, False)]:
        loss, _ = grpo.policy_loss(logp, old, reward[tokens[:, 0]], mask, weights=weights)
        gradient, = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.allclose(gradient, exact, atol=1e-6) is right


def test_router_agreement_ignores_order():
    # (1, 3, 2, 2): one sequence, three tokens (the last is padding), two layers, two experts.
    train = torch.tensor([[[[0, 1], [3, 2]], [[1, 2], [0, 3]], [[0, 1], [0, 1]]]])
    rollout = torch.tensor([[[[1, 0], [2, 3]], [[1, 3], [3, 0]], [[-1, 9], [7, 7]]]])
    mask = torch.tensor([[1, 1, 0]])
    assert grpo.router_agreement(train, rollout, mask) == 3 / 4
    assert grpo.router_agreement(train, rollout, mask * 0) == 1


def test_curves_draw_what_is_there(tmp_path):
    rows = [{"step": 0, "solved": 0.2}, {"step": 1, "reward": 0.5, "gap_max": 0.0, "entropy": 1.0}]
    figure = grpo.curves(rows, "a title")
    assert [len(panel.lines) for panel in figure.axes] == [1, 1, 1, 1]
    assert list(figure.axes[1].lines[0].get_xydata()[0]) == [0, 0.2]
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("n, k", [(1, 1), (5, 1), (5, 3), (6, 6)])
def test_pass_at_k_and_its_error(n, k):
    for correct in range(n + 1):
        draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        expected = sum(map(any, draws)) / len(draws)
        assert grpo.pass_at_k(torch.tensor([correct]), n, k).item() == pytest.approx(expected)
    # Mean 3/4, squared deviations 9/16 + 3/16 = 3/4, over n - 1 = 3 is 1/4: .5 / sqrt(4) = .25.
    assert grpo.standard_error([1, 1, 0, 1]) == 0.25 and math.isnan(grpo.standard_error([1]))


def test_errors_name_the_fault():
    """Fault 2 (trl 5773) among them: one NaN reward poisons its group, so it stops the run."""
    x, a = torch.zeros(2, 3), torch.zeros(2)
    for call, words in [
            (lambda: grpo.advantages(tensor([0, 1], [NAN, 1])), r"rows \[1\] are not finite"),
            (lambda: grpo.advantages(tensor([0], [INF])), r"rows \[1\] are not finite"),
            (lambda: grpo.advantages(a), "prompts, group"),
            (lambda: grpo.policy_loss(x, x[:, :2], a, x), "differ"),
            (lambda: grpo.policy_loss(x, x, a[:1], x), r"advantages .*\[1\]"),
            (lambda: grpo.policy_loss(x, x, a, x, weights=a), r"weights .*\[2\]"),
            (lambda: grpo.policy_loss(x, x.bfloat16(), a, x), "must be float32"),
            (lambda: grpo.mismatch(x, x / 0, x + 1), r"6 sampled .* \[0, 0\]"),
            (lambda: grpo.correction_weights(x, x, x, "clip"), "'clip'.*none, tis or mask"),
            (lambda: grpo.router_agreement(x, x, a), "do not fit"),
            (lambda: grpo.pass_at_k(a + 3, 2, 1), "pass@k needs")]:
        with pytest.raises(ValueError, match=words):
            call()
