"""How precise each format is, and how fast.

    python bench.py                          # output error of a product, log-prob gap of a model
    python bench.py --run runs/quads-seed*   # the gap of trained models, on their own problems
    python bench.py kernels                  # NVFP4, FP8 and BF16 products on this GPU

Same functions as in training, nothing written again here. Every table is Markdown and says what it
was measured on. A speed is the median of many runs, after the result was compared with PyTorch's.
"""
from __future__ import annotations

import argparse
import platform
import random
import subprocess
from functools import partial
from pathlib import Path

import torch

import grpo
import gsm8k
import nvfp4
import qat
import rac
import train
from moe import PRESETS, MoETransformer
from nvfp4 import jit, tl, triton
from rollout import Rollout, fp8_grouped_matmul, fp8_quantize, sequence_logp
from start import settings

RATIOS = (0.125, 0.25, 0.5, 0.75, 1.0)
TOKENS = (1, 16, 64, 256, 1024, 8192)


def heading():
    """What the numbers below belong to: device, versions, commit."""
    commit = subprocess.run("git describe --always --dirty", shell=True, capture_output=True,
                            text=True, cwd=Path(__file__).parent).stdout.strip() or "unknown"
    gpu = torch.cuda.is_available()
    path, reason = nvfp4.kernel_path("cuda" if gpu else "cpu")
    return (f"{torch.cuda.get_device_name() if gpu else platform.machine()}, PyTorch "
            f"{torch.__version__}, Triton {triton.__version__ if triton else 'missing'}, commit "
            f"{commit}; NVFP4: {path} ({reason})")


# --- Table 1: the output error of one expert product ---------------------------------------------

def output_errors(x, w):
    """x (M, K), w (E, N, K): {format: (relative error of Y, the part of the activations alone)}.

    Y is compared with the float64 product of x and w; for the second number with the product of x
    and the *quantized* w, which is what a trainer with W4A16 weights computes.
    """
    E = len(w)
    counts = torch.full((E,), len(x) // E, device=x.device)
    wq, (w8, s8) = nvfp4.quantize(w), fp8_quantize(w)
    energy = rac.residual_energy(x)                                               # (K/16,)
    weights = {"bf16": w.bfloat16(), "fp8": w8.float() * s8, "nvfp4": nvfp4.dequantize(wq)}

    def exact(weight):                                                            # (M, N) float64
        return torch.cat([rows @ weight[e].double().T
                          for e, rows in enumerate(x.double().split(counts.tolist()))])

    def error(y, weight):
        return [((y - r).norm() / r.norm()).item() for r in (exact(w), exact(weights[weight]))]

    y = qat.grouped_linear(x.bfloat16().float(), weights["bf16"].float(), counts)   # fp32 sums
    result = {"BF16": error(y, "bf16"), "FP8": error(fp8_grouped_matmul(x, w8, s8, counts), "fp8")}
    plain = nvfp4.grouped_matmul(nvfp4.quantize(x, row_scaled=True), wq, counts)
    result["NVFP4"] = error(plain, "nvfp4")
    for ratio in RATIOS:
        y, _ = rac.compensated_grouped_matmul(x, wq, counts, rac.select_blocks(energy, ratio))
        result[f"NVFP4 + RAC {100 * ratio:g}%"] = error(y, "nvfp4")
    return result


def print_output_errors(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=generator).to(device)                    # (M, K)
    w = torch.randn(4, 256, 1024, generator=generator).to(device)                 # (E, N, K)
    outliers = x * torch.where(torch.arange(1024, device=device) % 128 == 5, 64.0, 1.0)
    print("Relative error of Y = X W^T against float64, X (512, 1024), W (4, 256, 1024) gaussian; "
          "outliers: 8 of the 1024 channels times 64\n")
    print("| format            | gaussian | activations alone | outliers | activations alone |")
    print("|---|---|---|---|---|")
    normal, heavy = output_errors(x, w), output_errors(outliers, w)
    for name in normal:
        print(f"| {name:17} | {normal[name][0]:.4f}   | {normal[name][1]:.4f}            "
              f"| {heavy[name][0]:.4f}   | {heavy[name][1]:.4f}            |")


# --- Table 2: the log-prob gap -------------------------------------------------------------------

def gaps(model, prompts, new_tokens, seed=0, group=4):
    """The same sampled sequences under every rollout precision and both kinds of trainer.

    Sampling anew for each precision would compare different sequences: not even monotone. So the
    answers are sampled once, by the bf16 rollout, and then only scored (teacher forcing).
    Returns {(rollout, trainer): grpo.mismatch + router_agreement}.
    """
    rollout = Rollout(model, "bf16")
    rollout.sync()
    ids, mask, _ = rollout.generate(prompts, group, new_tokens, 1.0, seed)        # (R, T)
    repeated = [p for p in prompts for _ in range(group)]                         # R of them
    result = {}
    with torch.no_grad():
        trainers = {}
        for mode in ("none", "w4a16"):
            model.set_qat(mode)
            trainers[mode] = sequence_logp(model, repeated, ids, mask, 1.0)
        model.set_qat("none")
        for recipe, ratio in (("bf16", 0), ("fp8", 0), ("nvfp4", 0), *(("rac", r) for r in RATIOS)):
            rollout = Rollout(model, recipe, ratio)
            rollout.sync(prompts)       # RAC chooses its blocks on the prompts
            logp, _, routes = sequence_logp(rollout.model, repeated, ids, mask, 1.0)   # (R, T)
            name = f"nvfp4 + rac {100 * ratio:g}%" if ratio else recipe
            for mode, (logp_train, _, routes_train) in trainers.items():
                result[name, mode] = grpo.mismatch(logp_train, logp, mask)
                result[name, mode]["router_agreement"] = \
                    grpo.router_agreement(routes_train, routes, mask)
    return result


def random_model(seed, device="cpu", preset="cpu"):
    torch.manual_seed(seed)
    return MoETransformer(PRESETS[preset],
                          torch.bfloat16 if device == "cuda" else torch.float32).to(device)


def trained_model(run, device):
    """The model of a run folder, and 128 prompts of its own held-out problems."""
    run = train.Run(*settings(["--resume", str(run), "--steps", "0", "--device", device]))
    rng = random.Random(0)
    return run.model, [run.prompt(gsm8k.fresh("test", rng, run.pool)) for _ in range(128)]


def print_gaps(runs, device):
    results = []
    for run in runs:
        model, prompts = trained_model(run, device)
        results.append(gaps(model, prompts, new_tokens=64))
    for seed in range(0 if runs else 3):
        rng = random.Random(seed)
        prompts = [[rng.randrange(512) for _ in range(rng.randint(16, 48))] for _ in range(32)]
        results.append(gaps(random_model(seed, device), prompts, 32, seed))
    what = f"mean over the models of {', '.join(runs)}, 128 held-out prompts, 4 answers each" \
        if runs else "mean of three seeds, random weights, cpu preset, random prompts"
    print(f"|logp_train - logp_rollout| in nats on the same sequences: {what}\n")
    print("| rollout experts   | BF16 trainer: mean | p99    | max   | same experts "
          "| W4A16 trainer: mean | p99    | max   | same experts |\n" + "|---" * 9 + "|")
    for rollout in dict.fromkeys(rollout for rollout, _ in results[0]):
        cells = [f"{rollout:17}"]
        for trainer, width in (("none", 18), ("w4a16", 19)):
            mean = [sum(r[rollout, trainer][k] for r in results) / len(results)
                    for k in ("gap_mean", "gap_p99", "gap_max", "router_agreement")]
            cells += [f"{mean[0]:<{width}.5f}", f"{mean[1]:.4f}", f"{mean[2]:.3f}",
                      f"{mean[3]:<12.4f}"]
        print(f"| {' | '.join(cells)} |")


# --- Speed of the kernels ------------------------------------------------------------------------

@jit
def dense_kernel(x, w, s_x, s_w, tiles, y, N, K, ROWS: tl.constexpr, TOKENS: tl.constexpr,
                 DEPTH: tl.constexpr, SCALED: tl.constexpr):
    """The rival: a plain Triton loop over x (M, K) and w (E, N, K), both BF16, or both FP8 with a
    scale for each row (SCALED). Same tiles and layout as nvfp4.grouped_matmul_kernel."""
    tile = tiles + 3 * tl.program_id(1)
    expert, m = tl.load(tile), tl.load(tile + 1) + tl.arange(0, TOKENS)           # (TOKENS,)
    if expert < 0:
        return
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)      # (ROWS,)
    n_ok, m_ok = n < N, m < tl.load(tile + 2)
    w_row, x_row = expert.to(tl.int64) * N + n, m.to(tl.int64)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, K, DEPTH):                                              # K % DEPTH is 0
        a = tl.load(w + w_row[:, None] * K + (start + k)[None, :], n_ok[:, None], 0.0)
        b = tl.load(x + x_row[None, :] * K + (start + k)[:, None], m_ok[None, :], 0.0)
        acc = tl.dot(a, b, acc)
    if SCALED:
        acc *= tl.load(s_w + w_row, n_ok, 0.0)[:, None] * tl.load(s_x + m, m_ok, 0.0)[None, :]
    tl.store(y + N * x_row[None, :] + n[:, None], acc.to(y.dtype.element_ty),
             n_ok[:, None] & m_ok[None, :])


# The rival's tiles: ROWS, TOKENS, DEPTH (bytes), warps, stages. All are tried, the fastest counts.
DENSE_TILES = [(64, 16, 256, 4, 3), (128, 16, 256, 4, 3), (64, 16, 128, 4, 4), (64, 32, 256, 4, 3),
               (64, 32, 128, 4, 4), (128, 32, 256, 4, 3), (128, 64, 128, 8, 3),
               (128, 128, 128, 4, 3), (128, 128, 128, 8, 3), (128, 256, 64, 8, 4),
               (128, 256, 128, 8, 3)]


@jit
def fp8_quantize_kernel(x, codes, s_x, K, BLOCK_K: tl.constexpr):
    """rollout.fp8_quantize for one row a program: the rival's quantizer, for a fair comparison."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    v = tl.load(x + row * K + k, k < K, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(v), 0) / 448.0, 2.0**-126)
    tl.store(s_x + row, scale)
    tl.store(codes + row * K + k, tl.clamp(v / scale, -448.0, 448.0).to(tl.float8e4nv), k < K)


def microseconds(run):
    """Median time on the GPU of what `run` launches, with an empty L2 cache, in a CUDA graph (short
    kernels would wait for Python)."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1000 * triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")


def fastest(name, candidates, expected, tolerance):
    """candidates: {label: function of no argument -> (M, N)}. Check each, time each: (us, label).
    One that does not run here (too little shared memory, another PyTorch) is left out; one that
    gives a wrong result stops everything."""
    times = []
    for label, run in candidates.items():
        try:
            run().fill_(float("nan"))       # the next run writes into the same memory
            y = run().double()
        except Exception as error:
            times.append((float("inf"), f"{label}: {type(error).__name__}"))
            continue
        error = ((y - expected).norm() / expected.norm()).item()
        assert error < tolerance, f"{name}, {label}: relative error {error:.1e}"   # NaN fails too
        times.append((microseconds(run), label))
    return min(times)


def ceilings():
    """What this GPU can do: GB/s of a copy (read + write), and TFLOP/s of BF16 and FP8 products."""
    a, b = torch.randn(2, 2**28, device="cuda")
    copy = 8 * 2**28 / 1e6 / triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")
    x, y = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    x8, y8, one = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn), x.new_ones(()).float()
    return copy, *(2 * 8192**3 / 1e6 / microseconds(run) for run in (
        lambda: x @ y, lambda: torch._scaled_mm(x8, y8.T, one, one, out_dtype=torch.bfloat16)))


def print_products(name, E, A, N, K, limits):
    """One table: the grouped product of a layer of E experts, A of them for each of some tokens."""
    path, (copy, bf16_rate, fp8_rate) = nvfp4.kernel_path("cuda")[0], limits
    memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    w = torch.randn(E, N, K, device="cuda") * K**-0.5
    wq, (w8, s8), w16 = nvfp4.quantize(w), fp8_quantize(w), w.bfloat16()
    print(f"\n{name}: {E} experts, {A} active, N = {N}, K = {K}; microseconds\n\n| tokens | NVFP4, "
          f"{path} | + RAC 50% | FP8 | BF16 | floors NVFP4 / FP8 / BF16 | RAC: GB/s, of its floor "
          "| FP8 / RAC | BF16 / RAC | with quantizer: NVFP4, + RAC, FP8 |\n" + "|---" * 10 + "|")
    for T in TOKENS:
        chosen = torch.rand(T, E, device="cuda").topk(A).indices                  # (T, A)
        counts, M = chosen.flatten().bincount(minlength=E), T * A                 # (E,)
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        blocks, offsets = rac.select_blocks(rac.residual_energy(x), 0.5), counts.cumsum(0).int()

        # NVFP4, from its quantizer's output, and from the BF16 activations.
        tiles = nvfp4.schedule(counts, M, nvfp4.tile_sizes(M, E, N, path == "native", memory)[1])
        times = []
        for ids in (blocks[:0], blocks):
            quantizer = partial(rac.compensate_kernels, x, ids, False, path == "emulated")
            q, r, _, operand = quantizer()
            r = r if len(ids) else None
            expected = nvfp4.grouped_matmul_ref(q, wq, counts, torch.float32, r, ids).double()
            product = partial(nvfp4.grouped_matmul_kernels, q, wq, counts, torch.bfloat16, r, ids,
                              operand, path == "native", tiles)
            times.append(fastest("NVFP4", {path: product}, expected, 3e-3)[0])
            times.append(times[-1] + microseconds(quantizer))

        # FP8 and BF16: the library's product and the plain loop, whichever is faster.
        x8 = torch.empty(M, K, dtype=torch.float8_e4m3fn, device="cuda")
        s_x = torch.empty(M, device="cuda")
        fp8_quantizer = partial(fp8_quantize_kernel[(M,)], x, x8, s_x, K,
                                triton.next_power_of_2(K))
        fp8_quantizer()

        def rivals(a, b):
            """Plain loops over a (M, K) and b (E, N, K), with the tiles that may suit."""
            y = torch.empty((M, N), dtype=torch.bfloat16, device="cuda")
            for tile in DENSE_TILES:
                if K % tile[2] == 0 and M / E / 8 < tile[1] < max(33, 8 * M / E):
                    tiles = nvfp4.schedule(counts, M, tile[1])

                    def run(tile=tile, tiles=tiles):
                        dense_kernel[(triton.cdiv(N, tile[0]), len(tiles))](
                            a, b, s_x, s8, tiles, y, N, K, *tile[:2], tile[2] // a.element_size(),
                            a is x8, num_warps=tile[3], num_stages=tile[4])
                        return y
                    yield f"loop {tile}", run

        fp8 = fastest("FP8", {"torch": lambda: torch._scaled_grouped_mm(
            x8, w8.transpose(1, 2), s_x, s8[..., 0], offs=offsets, out_dtype=torch.bfloat16),
            **dict(rivals(x8, w8))}, fp8_grouped_matmul(x.float(), w8, s8, counts).double(), 2e-2)
        bf16 = fastest("BF16", {"torch": lambda: torch._grouped_mm(
            x, w16.transpose(1, 2), offs=offsets), **dict(rivals(x, w16))},
            qat.grouped_linear(x.float(), w16.float(), counts).double(), 5e-3)

        # The floor: each active weight read once, X and Y once, or the arithmetic, if that is more.
        active, flop = (counts > 0).sum().item(), 2 * M * N * K
        least = [(active * N * K + M * K) * size + 2 * M * N for size in (0.5625, 1, 2)]   # bytes
        rates = (bf16_rate if path == "emulated" else 2 * fp8_rate), fp8_rate, bf16_rate
        floors = [max(size / copy / 1e3, flop / rate / 1e6) for size, rate in zip(least, rates)]
        plain, plain_all, comp, comp_all = times
        print(f"| {T} | {plain:.1f} | {comp:.1f} | {fp8[0]:.1f} {fp8[1]} | {bf16[0]:.1f} {bf16[1]} "
              f"| {floors[0]:.1f} / {floors[1]:.1f} / {floors[2]:.1f} "
              f"| {least[0] / comp / 1000:.0f}, {floors[0] / comp:.0%} | {fp8[0] / comp:.2f} "
              f"| {bf16[0] / comp:.2f} | {plain_all:.1f}, {comp_all:.1f}, "
              f"{fp8[0] + microseconds(fp8_quantizer):.1f} |", flush=True)


def print_quantizer(copy):
    print("\nThe quantizer, BF16 in: bytes read and written, against a copy's speed\n\n| rows x K "
          "| RAC | writes the fp16 operand too | us | GB/s | of a copy |\n" + "|---" * 6 + "|")
    for M, K in ((8192, 2048), (65536, 768), (512, 2048)):
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        for ratio, fold in ((0, False), (0.5, False), (0, True), (0.5, True)):
            ids = rac.select_blocks(rac.residual_energy(x), ratio)
            run = partial(rac.compensate_kernels, x, ids, False, fold)
            q, r, _, operand = run()
            for got, want in zip((q, r), rac.compensate_ref(x, ids)):
                assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                           for a, b in zip(got, want)), "the quantizer differs from its reference"
            size = sum(t.nbytes for t in (x, *q, *r[:2], *([operand] if fold else [])))
            us = microseconds(run)
            print(f"| {M} x {K} | {ratio:.0%} | {'yes' if fold else 'no'} | {us:.1f} "
                  f"| {size / us / 1e3:.0f} | {size / us / 1e3 / copy:.0%} |", flush=True)


def print_kernels():
    limits, c = ceilings(), PRESETS["gpu"]
    print("Measured ceilings: copy {:.0f} GB/s, BF16 {:.0f} and FP8 {:.0f} TFLOP/s".format(*limits))
    print_products("Qwen3-30B-A3B gate_up", 128, 8, 1536, 2048, limits)
    print_products("Qwen3-30B-A3B down", 128, 8, 2048, 768, limits)
    for name, N, K in (("gate_up", 2 * c.expert_width, c.d_model),
                       ("down", c.d_model, c.expert_width)):
        print_products(f"preset gpu {name}", c.experts, c.active, N, K, limits)
    print_quantizer(limits[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("what", nargs="?", choices=("precision", "kernels"), default="precision")
    parser.add_argument("--run", nargs="+", default=[], help="trained runs for the second table")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.what == "kernels" and (device == "cpu" or nvfp4.kernel_path(device)[0] == "torch"):
        parser.error("kernels needs a GPU and Triton: " + nvfp4.kernel_path(device)[1] + ".")
    print(f"{heading()}\n")
    if args.what == "kernels":
        print_kernels()
    else:
        print_output_errors(device)
        print()
        print_gaps(args.run, device)
