"""Tests of qat.py: python -m pytest tests/test_qat.py (seconds, one CPU thread, no download).

"Fault" in a docstring: a defect that a public quantization-aware trainer once shipped.
"""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import qat  # noqa: E402
from nvfp4 import NVFP4, block_values, dequantize, grouped_matmul, quantize  # noqa: E402

torch.set_num_threads(1)
MODES = ["none", "w4a16", "w4a4"]
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
COUNTS = torch.tensor([0, 3, 0, 5])                           # experts 0 and 2 have no tokens


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def experts(*shape):
    """Weights (4, ...) of unlike size, with one large column, and one expert that is zero."""
    w = 0.05 * randn(4, *shape) * torch.tensor([1.0, 0.01, 0.0, 100.0])[:, None, None]
    w[..., 7] *= 30
    return w


def relative(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm()).item()


def by_expert(x, w, counts):
    """float64: each row times its expert's matrix, in a plain loop over rows."""
    owner = torch.arange(len(w)).repeat_interleave(counts.cpu())
    return torch.stack([row.double() @ w[e].double().T for row, e in zip(x, owner)])


# --- fake_quantize and operand -------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("row_scaled", [False, True])
def test_fake_quantize(dtype, row_scaled):
    """Case 19. Faults 13 and 14: numerics unlike the kernel's, no gradient where it clips."""
    x = randn(6, 8, 64).to(dtype)
    x[0, 0], x[1, 1, :16], x[2] = -0.01, 0, 0                 # -0.01: a block next to a larger one
    x[3, 2, 5], x[4, :, 16:32] = 300, 1e-6                    # and blocks that round to zero
    x.requires_grad_()
    y = qat.fake_quantize(x, row_scaled)
    assert y.dtype == dtype and torch.equal(y, dequantize(quantize(x.detach(), row_scaled), dtype))
    upstream = randn(*x.shape, seed=1).to(dtype)
    y.backward(upstream)
    assert torch.equal(x.grad, upstream)                      # exactly 1, clipped or zeroed or not


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_operand(dtype, row_scaled):
    """Its two factors are those of `quantize`, the first one exact in bf16, the product's
    gradient 1. (values * s and `dequantize` differ by an ulp: a product of three is rounded twice.)
    """
    x = experts(8, 64).requires_grad_()
    values, s = qat.operand(x, row_scaled, dtype)
    q = quantize(x.detach(), row_scaled)
    assert values.dtype == dtype and s.dtype == torch.float32 and not s.requires_grad
    assert torch.equal(values.float(), block_values(q)) and torch.equal(s, q.global_scale)
    torch.testing.assert_close(values.float() * s, dequantize(q), rtol=2.5e-7, atol=0)
    upstream = torch.randint(-8, 9, x.shape).float()          # integers, so s / s is all there is
    (values.float() * s * upstream).sum().backward()
    torch.testing.assert_close(x.grad, upstream, rtol=4e-7 if dtype == torch.float32 else 2**-8,
                               atol=0)


def test_bf16_cannot_hold_the_full_product():
    """Why `operand` has two parts: 93% of dequantized values are not bf16 numbers."""
    d = dequantize(quantize(randn(64, 256)))
    assert (d != d.bfloat16().float())[d != 0].float().mean() > 0.9


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_input_is_refused(bad):
    w = experts(8, 32)
    w[1, 2, 3] = bad
    for call in (lambda: qat.fake_quantize(w), lambda: qat.operand(w),
                 lambda: qat.expert_matmul(randn(8, 32), w, COUNTS, "w4a16")):
        with pytest.raises(ValueError, match="NaN or infinity"):
            call()
    with pytest.raises(ValueError, match="K = 40"):
        qat.fake_quantize(torch.zeros(4, 40))


# --- The trainer's product -----------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
def test_mode_none_is_the_plain_product(dtype):
    x, w = randn(8, 32).to(dtype), experts(24, 32)
    y = qat.expert_matmul(x, w, COUNTS, "none")
    plain = torch.cat([x[:3] @ w[1].to(dtype).T, x[3:] @ w[3].to(dtype).T])
    assert y.dtype == dtype and torch.equal(y, plain)
    assert torch.equal(y, qat.grouped_linear(x, w.to(dtype), COUNTS))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_by_hand(mode, dtype, device):
    """Y = xq wq^T, dL/dx = g wq, dL/dw = g^T xq over the expert's rows: the grid has gradient 1."""
    x = randn(8, 64, seed=1).to(device, dtype).requires_grad_()
    w = experts(24, 64).to(device).requires_grad_()
    g = randn(8, 24, seed=2).to(device, dtype)
    y = qat.expert_matmul(x, w, COUNTS.to(device), mode)
    y.backward(g)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (dtype, dtype, torch.float32)
    xq, wq, g = (t.detach().double().cpu() for t in (x, w, g))
    if mode != "none":
        wq = dequantize(quantize(wq.float())).double()
    if mode == "w4a4":
        xq = dequantize(quantize(xq.float(), row_scaled=True)).double()
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative(y.cpu(), by_expert(xq, wq, COUNTS)) <= tolerance
    assert relative(x.grad.cpu(), by_expert(g, wq.mT, COUNTS)) <= tolerance
    for e, rows in enumerate((slice(0, 0), slice(0, 3), slice(0, 0), slice(3, 8))):
        hand = g[rows].T @ xq[rows]
        if hand.any():                                        # expert by expert: sizes are unlike
            assert relative(w.grad[e].cpu(), hand) <= tolerance
        else:
            assert not w.grad[e].any()                        # no tokens: exactly 0, and not NaN


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_at_all(mode):
    """Fault 8: experts with no token are never written."""
    x, w = torch.zeros(0, 32, requires_grad=True), experts(24, 32).requires_grad_()
    y = qat.expert_matmul(x, w, torch.zeros(4, dtype=torch.long), mode)
    y.sum().backward()
    assert y.shape == (0, 24) and not w.grad.any() and x.grad.shape == (0, 32)


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_an_all_zero_token_and_an_all_zero_expert(mode):
    x, w = randn(8, 32), experts(24, 32)
    x[1] = 0
    x.requires_grad_(), w.requires_grad_()
    y = qat.expert_matmul(x, w, torch.tensor([2, 2, 2, 2]), mode)
    y.backward(randn(8, 24))
    assert not y[1].any() and not y[4:6].any()
    assert y.isfinite().all() and x.grad.isfinite().all() and w.grad.isfinite().all()
    assert w.grad[2].any() and x.grad[1].any()                # zero expert and token still learn


@pytest.mark.parametrize("dtype", DTYPES)
def test_w4a4_equals_the_rollout(dtype):
    """One quantizer: symmetric QAT computes what the sampler computes (fault 13)."""
    x, w = 3 * randn(8, 64).to(dtype), experts(24, 64)
    x[2] *= 1e4                                               # row-scaled: no other row notices
    y = qat.expert_matmul(x, w, COUNTS, "w4a4")
    rollout = grouped_matmul(quantize(x, row_scaled=True), quantize(w), COUNTS)
    assert ((y - rollout).norm(dim=1) <= (1e-6 if dtype == torch.float32 else 5e-3)
            * rollout.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_trainer_and_rollout_share_weights_bit_for_bit(optimizer, dtype):
    """After 1 and 20 updates: nothing is cached (fault 15, stale scales)."""
    w = torch.nn.Parameter(experts(24, 64))
    step, x, previous = optimizer([w], lr=1e-2), randn(8, 64).to(dtype), None
    for update in range(1, 21):
        qat.expert_matmul(x, w, COUNTS, "w4a16").float().square().mean().backward()
        step.step()
        step.zero_grad()
        if update in (1, 20):
            trainer, s = qat.operand(w, dtype=dtype)
            synced = quantize(w.detach().clone())             # what a weight sync stores
            assert torch.equal(trainer.float(), block_values(synced, dtype).float())
            assert torch.equal(s, synced.global_scale)
            # ... and the product uses them: with x one unit vector it reads out one column.
            unit = torch.zeros(4, 64, dtype=dtype)
            unit[:, 9] = 1
            y = qat.expert_matmul(unit, w, torch.tensor([1] * 4), "w4a16")
            column = block_values(synced)[:, :, 9] * synced.global_scale[:, :, 0]
            assert torch.equal(y, column.to(dtype))
            assert previous is None or not torch.equal(synced.codes, previous.codes)
            previous = NVFP4(*synced)


def test_wrong_arguments():
    for mode in ("W4A16", "w8a8", None, ""):
        with pytest.raises(ValueError, match=f"{mode!r}.*none, w4a16 or w4a4"):
            qat.expert_matmul(randn(8, 32), experts(24, 32), COUNTS, mode)
    for counts in ([0, 3, 0, 4], [8, 0, 0], [0, 3, 0, 4, 1]):           # 7 rows; 3 and 5 experts
        for mode in MODES:
            with pytest.raises((ValueError, RuntimeError, IndexError)):
                qat.expert_matmul(randn(8, 32), experts(24, 32), torch.tensor(counts), mode)


def test_recipes():
    assert list(qat.RECIPES) == ["bf16", "fp8", "nvfp4", "qat", "qat-symmetric", "rac", "quads"]
    assert qat.RECIPES["quads"] == ("nvfp4+rac", "w4a16")
    assert {trainer for _, trainer in qat.RECIPES.values()} == set(MODES)


# --- The optimizer's memory ----------------------------------------------------------------------

def optimize(optimizer, parameters, steps, seed=0):
    """Steps with gradients of very unlike size; step 1 has none, as when no answer teaches."""
    for t in range(steps):
        for i, p in enumerate(parameters):
            p.grad = randn(*p.shape, seed=seed + 10 * t + i) * 10.0**(i - 3) if t != 1 else None
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def pair(seed=0):
    return [torch.nn.Parameter(randn(40, 30, seed=seed)), torch.nn.Parameter(randn(7, seed=seed))]


def test_with_exact_moments_it_is_adamw(monkeypatch):
    settings = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    want = optimize(torch.optim.AdamW(a := pair(), **settings), a, 6)
    ours = qat.BF16AdamW(b := pair(), **settings)
    assert all(m.dtype == torch.bfloat16 for m in ours.moments)
    rounded = optimize(ours, b, 6)
    monkeypatch.setattr(qat, "stochastic_bf16", lambda x, generator: x)
    ours = qat.BF16AdamW(b := pair(), **settings)
    ours.moments = [m.double() for m in ours.moments]
    for w, exact, near, old in zip(want, optimize(ours, b, 6), rounded, pair()):
        torch.testing.assert_close(exact, w, atol=1e-6, rtol=1e-6)
        # 6 steps of at most 0.01, each off by a bf16 step of its moments
        assert 1e-6 < (near - w).abs().max() < 0.02 * (w - old).abs().max()


def test_stochastic_rounding_is_unbiased_and_of_two_neighbours():
    generator = torch.Generator().manual_seed(0)
    for value in (0.3, -0.3, 1e-30, -7e8, 1.0, 0.0):
        x = torch.full((100_000,), value)
        y = qat.stochastic_bf16(x, generator)                             # (100000,) bf16
        ulp = abs(value) * 2**-7
        assert y.dtype == torch.bfloat16 and (y.double() - x).abs().max() <= ulp
        # The mean of n draws between two neighbours: within 5 of its standard errors.
        assert abs(y.double().mean() - x[0].double()) <= 5 * 0.5 * ulp / 100_000**0.5
        assert len(y.unique()) == 1 + (value not in (1.0, 0.0))


def test_moments_rounded_to_nearest_would_stall():
    """beta2 = .99: from 1 towards .9 a step is .001, and bf16 below 1 has steps of .0039."""
    gradient, nearest = 0.9**0.5, torch.ones(1000).bfloat16()
    optimizer = qat.BF16AdamW([p := torch.nn.Parameter(torch.zeros(1000))], 0.0, (0.9, 0.99), 0.0)
    optimizer.moments[0][1] = 1.0
    for _ in range(500):
        p.grad = torch.full((1000,), gradient)
        optimizer.step()
        nearest = nearest.float().lerp(p.grad.square(), 0.01).bfloat16()
    assert (nearest == 1).all() and abs(optimizer.moments[0][1].float().mean() - 0.9) < 0.003


def test_a_resumed_optimizer_goes_on_bit_for_bit():
    whole = qat.BF16AdamW(a := pair(), 0.01, (0.9, 0.99), 0.0)
    optimize(whole, a, 3)
    first = qat.BF16AdamW(b := pair(), 0.01, (0.9, 0.99), 0.0)
    optimize(first, b, 3)
    second = qat.BF16AdamW(b, 0.01, (0.9, 0.99), 0.0)
    second.load_state_dict(first.state_dict())
    for x, y in zip(optimize(whole, a, 3, 5), optimize(second, b, 3, 5)):
        assert torch.equal(x, y)
    assert whole.steps == second.steps == 4          # the step without any gradient is none
    assert all(torch.equal(x, y) for x, y in zip(whole.moments, second.moments))
