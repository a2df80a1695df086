"""How precise each format is: output error of one product, and the log-prob gap of a whole model.

    python bench.py                          # both tables, on random data and a random model
    python bench.py --run runs/quads-seed*   # the gap of trained models, on their own problems

Same functions as in training, nothing written again here. Every table is Markdown and says what it
was measured on. (Speed: a later version. What runs below is an emulation, right but slow.)
"""
import argparse
import platform
import random
import subprocess
from pathlib import Path

import torch

import grpo
import gsm8k
import nvfp4
import qat
import rac
from moe import PRESETS, Config, MoETransformer, load_checkpoint
from rollout import Rollout, fp8_grouped_matmul, fp8_quantize, sequence_logp

RATIOS = (0.125, 0.25, 0.5, 0.75, 1.0)


def heading():
    """What the numbers below belong to: device, versions, commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=Path(__file__).parent).stdout.strip() or "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{device}, PyTorch {torch.__version__}, commit {commit}; FP8 and NVFP4 emulated"


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
    saved = load_checkpoint(Path(run) / "checkpoint.pt")
    model = MoETransformer(Config(**saved["config"]),
                           torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    model.load_state_dict(saved["model"])
    data, tokenizer = saved["settings"]["data"], gsm8k.tokenizer_from_json(saved["tokenizer"])
    pool = None if data == "builtin" else gsm8k.load("train", None if data == "hub" else data)
    rng = random.Random(0)
    questions = [gsm8k.fresh("test", rng, pool)["question"] for _ in range(128)]
    return model, [tokenizer.encode_ordinary(gsm8k.prompt(question)) for question in questions]


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--run", nargs="+", default=[], help="trained runs for the second table")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{heading()}\n")
    print_output_errors(device)
    print()
    print_gaps(args.run, device)
