"""Tests of rac.py: python -m pytest tests/test_rac.py (seconds, one CPU thread, no download)."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import rac  # noqa: E402
from nvfp4 import NVFP4, dequantize, grouped_matmul, matmul, quantize  # noqa: E402

torch.set_num_threads(1)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
RATIOS = (0, 0.125, 0.25, 0.5, 0.75, 1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(M, K):
    """Gaussian rows, with every 64th channel 60 times larger."""
    return randn(M, K) * torch.where(torch.arange(K) % 64 == 5, 60.0, 1.0)


def relative(y, exact):
    return ((y.double() - exact.double()).norm() / exact.double().norm()).item()


def ids(*blocks):
    return torch.tensor(blocks, dtype=torch.long)


def same_bytes(a, b):
    return (torch.equal(a.codes, b.codes) and torch.equal(a.global_scale, b.global_scale)
            and torch.equal(a.scales.view(torch.uint8), b.scales.view(torch.uint8)))


# --- 1. Measure ----------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_energy(dtype):
    """Squared residual by block, in fp32; batches add up, shapes and strides do not matter."""
    x = outliers(12, 128).to(dtype)
    energy = rac.residual_energy(x)
    lost = x.double() - dequantize(quantize(x, row_scaled=True)).double()
    assert energy.shape == (8,) and energy.dtype == torch.float32
    torch.testing.assert_close(energy.double(), (lost**2).view(12, 8, 16).sum((0, 2)), rtol=1e-5,
                               atol=0)
    x[3] *= 1e3                                               # row-scaled: rows do not interact
    parts = sum(rac.residual_energy(row[None]) for row in x)
    torch.testing.assert_close(rac.residual_energy(x), parts, rtol=1e-5, atol=0)
    assert torch.equal(rac.residual_energy(x.view(3, 4, 128)), rac.residual_energy(x))
    for other in (rac.residual_energy(x.t().contiguous().t()), rac.compensate(x, ids(1))[2]):
        torch.testing.assert_close(other, parts, rtol=1e-5, atol=0)
    torch.testing.assert_close(rac.residual_energy(x[3]), rac.residual_energy(x[3:4]))


def test_bad_activations_are_refused():
    for x in (torch.full((2, 32), float("nan")), torch.full((2, 32), float("inf"))):
        with pytest.raises(ValueError, match="NaN or infinity"):
            rac.residual_energy(x)
    with pytest.raises(ValueError, match="K = 40"):
        rac.residual_energy(torch.zeros(2, 40))


# --- 2. Choose -----------------------------------------------------------------------------------

def test_select_blocks():
    energy = torch.tensor([1.0, 5, 3, 5, 0, 3, 9, 3])
    for ratio, chosen in ((0, []), (0.125, [6]), (0.25, [1, 6]), (0.375, [1, 3, 6]),
                          (0.5, [1, 2, 3, 6]), (0.75, [1, 2, 3, 5, 6, 7]), (1, list(range(8)))):
        blocks = rac.select_blocks(energy, ratio)
        assert blocks.dtype == torch.long and blocks.tolist() == chosen
    assert rac.select_blocks(torch.ones(1000), 0.5).tolist() == list(range(500))     # many ties
    for count in range(1, 20):
        for ratio in RATIOS:
            assert len(rac.select_blocks(randn(count), ratio)) == round(ratio * count)
    for bad in (-0.01, 1.01, float("nan")):
        for wrong in ((bad, 0), (0.5, bad)):
            with pytest.raises(ValueError, match=f"0 to 1; got {wrong[0]}, {wrong[1]}"):
                rac.select_blocks(energy, *wrong)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite"):
            rac.select_blocks(torch.tensor([1.0, bad]), 0.5)


def test_coverage():
    """The fewest blocks that hold the share; 8 fills the list up; no energy chooses nothing."""
    energy = torch.tensor([1.0, 5, 3, 5, 0, 3, 9, 3])                  # 29 in all
    for share, chosen in ((9 / 29, [6]), (9.1 / 29, [1, 6]), (0.5, [1, 3, 6]),
                          (19.5 / 29, [1, 2, 3, 6]), (1, [0, 1, 2, 3, 5, 6, 7])):
        blocks = rac.select_blocks(energy, 0.5, share)
        assert blocks.dtype == torch.long and blocks.tolist() == chosen + [8] * (8 - len(chosen))
    assert rac.select_blocks(torch.zeros(4), 0.5, 0.9).tolist() == [4] * 4


def test_places_left_over_change_nothing():
    x, w, counts = randn(12, 128), quantize(randn(3, 48, 128)), torch.tensor([5, 0, 7])
    for chosen in ([], [0, 5], [1, 2, 7]):
        y, energy = rac.compensated_grouped_matmul(x, w, counts, ids(*chosen))
        filled = ids(*chosen, *[8] * (8 - len(chosen)))
        full, same = rac.compensated_grouped_matmul(x, w, counts, filled)
        assert torch.equal(y, full) and torch.equal(energy, same)


# --- 3. Apply ------------------------------------------------------------------------------------

def test_case_20_ratio_0_and_1():
    x, w, none = randn(16, 256), quantize(randn(64, 256)), ids()
    q, r, _ = rac.compensate(x, none)
    plain = quantize(x, row_scaled=True)
    assert same_bytes(q, plain) and r.codes.shape == (16, 0) and r.scales.shape == (16, 0)
    assert torch.equal(rac.compensated_matmul(x, w, none), matmul(plain, w))
    assert torch.equal(rac.compensated_matmul_ref(x, w, none), matmul(plain, w))
    assert torch.equal(rac.reconstruct(x, none), dequantize(plain))
    experts, counts = quantize(randn(2, 64, 256)), torch.tensor([10, 6])
    y, _ = rac.compensated_grouped_matmul(x, experts, counts, none)
    assert torch.equal(y, grouped_matmul(plain, experts, counts))
    assert relative(rac.reconstruct(x, torch.arange(16)), x) <= 0.01


def test_case_21_nothing_to_repair():
    x = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(8, (4, 64))] * 448
    x[:, ::16], w = 2688, quantize(randn(24, 64))             # s_global 1, all s_block 448
    q, r, energy = rac.compensate(x, torch.arange(4))
    assert torch.equal(dequantize(q), x) and not energy.any()
    assert not r.scales.view(torch.uint8).any() and not dequantize(r).any()
    assert torch.equal(rac.compensated_matmul(x, w, torch.arange(4)), matmul(q, w))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [(0,), (1, 2, 4), (0, 3, 8), tuple(range(9))])
def test_one_product_equals_the_equation(blocks, dtype, device):
    """Fused and term by term, against the float64 product of the operands; N and K have tails."""
    x, w = outliers(33, 144).to(device, dtype), quantize(randn(24, 144).to(device))
    x *= 10.0 ** (torch.arange(33, device=device)[:, None] % 5)
    blocks = ids(*blocks).to(device)
    strided = x.t().contiguous().t()
    exact = rac.reconstruct(x, blocks).double() @ dequantize(w).double().T
    for product in (rac.compensated_matmul, rac.compensated_matmul_ref):
        y = product(x, w, blocks)
        assert y.dtype == torch.float32 and torch.equal(product(strided, w, blocks), y)
        assert ((y - exact).norm(dim=1) <= 1e-6 * exact.norm(dim=1)).all()
    low = rac.compensated_matmul(x, w, blocks, torch.bfloat16)
    assert low.dtype == torch.bfloat16 and relative(low, exact) <= 2.5e-3


def test_reconstruct_by_hand():
    """The second pass is NVFP4 of what the first one lost, under the row's own s_global."""
    x, blocks = outliers(8, 128), ids(2, 4, 7)
    q = quantize(x, row_scaled=True)
    lost = (x - dequantize(q)).view(8, 8, 16)
    second = dequantize(quantize(lost[:, blocks].flatten(1), global_scale=q.global_scale))
    expected = dequantize(q).view(8, 8, 16).clone()
    expected[:, blocks] += second.view(8, 3, 16)
    assert torch.equal(rac.reconstruct(x, blocks), expected.flatten(1))
    assert torch.equal(rac.compensate(x, blocks)[1].global_scale, q.global_scale)
    untouched = [0, 1, 3, 5, 6]
    assert torch.equal(rac.reconstruct(x, blocks).view(8, 8, 16)[:, untouched],
                       dequantize(q).view(8, 8, 16)[:, untouched])


def test_a_token_never_depends_on_its_batch():
    x, blocks = outliers(5, 64), ids(0, 2, 3)
    x[3] *= 1e6
    q, r, _ = rac.compensate(x, blocks)
    for m in range(5):
        alone = rac.compensate(x[m:m + 1], blocks)
        for batch, one in zip((q, r), alone):
            assert same_bytes(NVFP4(*(t[m:m + 1] for t in batch)), one)
        assert torch.equal(rac.reconstruct(x, blocks)[m], rac.reconstruct(x[m:m + 1], blocks)[0])


def test_grouped_equals_expert_by_expert():
    x, w, counts = outliers(20, 96), randn(4, 24, 96), [7, 0, 12, 1]
    wq, blocks = quantize(w * torch.tensor([1, 1e3, 1e-3, 40.0])[:, None, None]), ids(0, 4)
    y, energy = rac.compensated_grouped_matmul(x, wq, torch.tensor(counts), blocks)
    for e, (rows, mine) in enumerate(zip(x.split(counts), y.split(counts))):
        if len(rows):
            alone = rac.compensated_matmul(rows, NVFP4(*(t[e] for t in wq)), blocks)
            assert relative(mine, alone) <= 1e-6
    assert torch.equal(energy, rac.residual_energy(x))
    low, _ = rac.compensated_grouped_matmul(x, wq, torch.tensor(counts), blocks, torch.bfloat16)
    assert torch.equal(low, y.bfloat16())


@pytest.mark.parametrize("blocks", [(), (1,), (0, 1)])
def test_no_rows(blocks):
    x, w = torch.zeros(0, 32), quantize(randn(4, 8, 32))
    y, energy = rac.compensated_grouped_matmul(x, w, torch.tensor([0] * 4), ids(*blocks))
    assert y.shape == (0, 8) and energy.tolist() == [0, 0]
    assert rac.reconstruct(x, ids(*blocks)).shape == (0, 32)
    assert rac.residual_energy(x).tolist() == [0, 0]


@pytest.mark.parametrize("amax", [1e-42, 1e-36, 1e36])
def test_extreme_sizes(amax):
    x = randn(8, 64).double()
    x = (x / x.abs().amax(1, keepdim=True) * amax).float()
    x[2] = 0
    y = rac.reconstruct(x, torch.arange(4))
    assert y.isfinite().all() and not y[2].any()
    assert (y - x).abs().max() <= (dequantize(quantize(x, row_scaled=True)) - x).abs().max()


# --- What it is worth ----------------------------------------------------------------------------

@pytest.mark.parametrize("data, ceilings", [(outliers, (.07, .045, .014, .012, .01, .007)),
                                            (randn, (.097, .092, .085, .07, .05, .01))])
def test_the_error_falls_with_the_ratio(data, ceilings):
    """Each step strictly, and on outliers the chosen blocks beat random ones by far."""
    x, w = data(64, 1024), randn(128, 1024, seed=1)
    exact = x.double() @ w.double().T
    energy = rac.residual_energy(x)
    errors = [relative(rac.reconstruct(x, rac.select_blocks(energy, ratio)).double()
                       @ w.double().T, exact) for ratio in RATIOS]
    assert all(a > b for a, b in zip(errors, errors[1:]))
    assert all(e <= ceiling for e, ceiling in zip(errors, ceilings)), errors
    if data is outliers:
        random = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:16].sort().values
        assert relative(rac.reconstruct(x, random).double() @ w.double().T, exact) > 2 * errors[2]


def test_the_file_runs():
    run = subprocess.run([sys.executable, "rac.py"], cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "|  50.0% | 0.01" in run.stdout, run.stderr
