"""The paper's claims, reproduced where anyone can run them, and where they end.

    python reproduce.py recipes --quick  # naive NVFP4 beside QUADS, one seed: 5 minutes, two cores
    python reproduce.py recipes          # all seven recipes, three seeds: 40 minutes, two cores
    python reproduce.py ratio            # then: how much of the gap each RAC ratio closes
    python reproduce.py layers           # then: how far the expert outputs are apart, layer by layer
    python reproduce.py limits           # outliers that a fixed ratio of 50% no longer covers

Small models trained from scratch have no activation outliers, and without them no recipe fails. So
outliers are put in (`--outliers`, see moe.set_outliers): a rescaling that leaves the function as it
is, bit for bit. That is harsher than the paper's models: see "What was put in" in the README.

Every run is a folder of train.py, all recipes of a seed start from one warm-up checkpoint, and what
has been computed is not computed again: after Ctrl-C the same command goes on. Tables are Markdown;
figures and CSV files go to --out. "deployed" means: greedy, on held-out problems, in the recipe's own
rollout precision.
"""
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import grpo
import qat
import train
from moe import load_checkpoint, save_file
from nvfp4 import kernel_path
from rollout import Rollout, sequence_logp

PAPER = {"bf16": 73.15, "fp8": 72.88, "nvfp4": 51.37, "qat": 71.1, "quads": 72.86}  # pass@1, percent
PAPER_RATIO = {0: 1.3, 12.5: .923, 25: .901, 50: .854, 75: .812, 100: .759}  # largest gap, Table 3
COLORS = dict(zip(qat.RECIPES, ("black", "tab:green", "tab:red", "tab:orange", "tab:brown",
                                "tab:purple", "tab:blue")))


# --- Runs ----------------------------------------------------------------------------------------

def warm_up(args, seed):
    """The folder of a seed's warm-up, done or resumed: the start of all recipes."""
    out = args.out / f"warmup-seed{seed}"
    flags = ["--resume", str(out), "--steps", "1"] if (out / "checkpoint.pt").exists() else \
        ["--recipe", "bf16", "--seed", str(seed), "--out", str(out), *args.flags]
    run = train.Run(*train.settings(flags))
    if run.sft_step < run.s.sft_steps or not (out / "checkpoint.pt").exists():
        print(f"warm-up, seed {seed}")
        out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(args.threads)
        train.warm_up(run, stopping=[])
        run.save()
    return out


def prepare(args, name, seed, **settings):
    """The folder of one run: at first a copy of the warm-up's checkpoint under other settings."""
    out = args.out / f"{name}-seed{seed}"
    settings |= {"steps": args.steps, "threads": args.threads, "eval_problems": args.eval_problems,
                 "out": str(out)}
    if (out / "checkpoint.pt").exists():
        saved = load_checkpoint(out / "checkpoint.pt")["settings"]
        for key, value in settings.items():
            if saved[key] != value and key != "threads":
                raise ValueError(f"{out} was run with {key} = {saved[key]}, not {value}: choose "
                                 "another --out, or the same flags as before.")
        return out
    saved = load_checkpoint(warm_up(args, seed) / "checkpoint.pt")
    saved["settings"].update(settings)
    out.mkdir(parents=True, exist_ok=True)
    save_file(out / "checkpoint.pt", lambda path: torch.save(saved, path))
    return out


def finish(args, folders):
    """Run what is not finished, some at a time, by the real command; its output: FOLDER/log.txt."""
    waiting = [f for f in folders
               if load_checkpoint(f / "checkpoint.pt")["step"] < args.steps]
    running, start, done = {}, time.time(), 0
    while waiting or running:
        while waiting and len(running) < args.jobs:
            folder = waiting.pop(0)
            with open(folder / "log.txt", "a") as log:
                running[folder] = subprocess.Popen(
                    [sys.executable, "train.py", "--resume", folder], stdout=log, stderr=log,
                    cwd=Path(__file__).parent, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        for folder, process in [*running.items()]:
            if process.poll() is not None:
                del running[folder]
                done += 1
                print(f"{folder.name}: {'done' if process.returncode == 0 else 'STOPPED'}, "
                      f"{done} of {done + len(waiting) + len(running)} after "
                      f"{(time.time() - start) / 60:.1f} minutes", flush=True)
                if process.returncode:
                    waiting.clear()
                    print((folder / "log.txt").read_text().splitlines()[-1], file=sys.stderr)
        time.sleep(0.2)
    if any(load_checkpoint(f / "checkpoint.pt")["step"] < args.steps for f in folders):
        sys.exit("not all runs are finished: give the same command again to go on.")


def rows_of(folder):
    return load_checkpoint(folder / "checkpoint.pt")["rows"]


def mean_and_error(values):
    """Mean and standard error over seeds (n - 1 in the deviation; nan for one seed)."""
    values = torch.tensor(values, dtype=torch.float64)
    return values.mean().item(), (values.std() / len(values)**0.5).item()


def cell(values, digits=3):
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if len(values) > 1 else "")


def summary(runs):
    """What the end of some runs (rows of metrics.csv, a list each seed) looks like."""
    last = [rows[-1] for rows in runs]
    tail = [[row for row in rows if "reward" in row][-15:] for rows in runs]
    return {"deployed": [row["solved"] for row in last],
            "bf16": [row["solved_bf16"] for row in last],
            "reward": [sum(row["reward"] for row in t) / len(t) for t in tail],
            "gap_mean": [sum(row["gap_mean"] for row in t) / len(t) for t in tail],
            "gap_first": [sum(row["gap_mean"] for row in rows[1:6]) / 5 for rows in runs],
            "gap_max": [max(row["gap_max"] for row in rows if "gap_max" in row) for rows in runs]}


def write_csv(path, runs):
    """runs: {(name, seed): rows} -> one CSV."""
    names = list(dict.fromkeys(n for rows in runs.values() for row in rows for n in row))
    lines = [["run", "seed", *names]] + [
        [name, str(seed)] + [f"{row[n]:.6g}" if n in row else "" for n in names]
        for (name, seed), rows in runs.items() for row in rows]
    save_file(path, lambda p: p.write_text("".join(",".join(line) + "\n" for line in lines)))


# --- recipes: who collapses ----------------------------------------------------------------------

def figure(runs, seeds, title):
    """Four panels over the steps; bands span the seeds. runs: {(recipe, seed): rows}."""
    from matplotlib.figure import Figure
    drawing = Figure(figsize=(17, 4.2), layout="constrained")
    accuracy, gap, entropy, bars = drawing.subplots(1, 4)
    length = entropy.twinx()
    names = list(dict.fromkeys(name for name, _ in runs))
    for recipe in names:
        for panel, column, style in ((accuracy, "solved", "-"), (accuracy, "solved_bf16", ":"),
                                     (gap, "gap_mean", "-"), (gap, "gap_max", ":"),
                                     (entropy, "entropy", "-"), (length, "answer_tokens", ":")):
            lines = [[(row["step"], row[column]) for row in runs[recipe, s] if column in row]
                     for s in seeds]
            steps = [step for step, _ in lines[0]]
            values = torch.tensor([[v for _, v in line] for line in lines])       # (seeds, steps)
            panel.plot(steps, values.mean(0), style, color=COLORS[recipe],
                       label=recipe if style == "-" else None)
            if column in ("solved", "gap_mean"):
                panel.fill_between(steps, values.amin(0), values.amax(0), color=COLORS[recipe],
                                   alpha=0.12, linewidth=0)
    ends = [mean_and_error([runs[name, s][-1]["solved"] for s in seeds]) for name in names]
    bars.bar(names, [mean for mean, _ in ends], color=[COLORS[name] for name in names],
             yerr=[error if error == error else 0 for _, error in ends])
    bars.tick_params(axis="x", rotation=40)
    accuracy.set_title("deployed accuracy (dotted: BF16 weights)")
    gap.set_title("log-prob gap, nats (dotted: max)")
    gap.set_yscale("symlog", linthresh=1e-4)
    entropy.set_title("entropy, nats (dotted: answer tokens)")
    bars.set_title("deployed accuracy at the end")
    accuracy.legend(fontsize=8)
    for panel in (accuracy, gap, entropy):
        panel.set_xlabel("GRPO step")
    drawing.suptitle(title)
    return drawing


def recipes(args):
    names = ("nvfp4", "quads") if args.quick else args.recipes
    outliers = {"outliers": args.outliers, "outlier_blocks": args.outlier_blocks}
    tag = f"x{args.outliers}"
    folders = {(name, seed): prepare(args, f"{name}-{tag}", seed, recipe=name, **outliers)
               for seed in args.seeds for name in names}
    finish(args, folders.values())
    runs = {key: rows_of(folder) for key, folder in folders.items()}
    write_csv(args.out / f"recipes-{tag}.csv", runs)
    title = (f"{len(args.seeds)} seed(s), {args.steps} steps; " + (
        f"outliers: {args.outliers} times, in {args.outlier_blocks} blocks of the input"
        if args.outliers else "no outliers put in"))
    save_file(args.out / f"recipes-{tag}.png", lambda path: figure(runs, args.seeds, title).savefig(
        path, format="png", dpi=70))
    print(f"\n{title}; {args.eval_problems} held-out problems; mean ± standard error over seeds\n\n"
          "| recipe | deployed at the end | the same weights in BF16 | reward, last 15 steps "
          "| gap_mean, steps 1-5 | gap_mean, last 15 | largest gap | paper: pass@1 |\n"
          + "|---" * 8 + "|")
    for name in names:
        s = summary([runs[name, seed] for seed in args.seeds])
        print(f"| {name} | {cell(s['deployed'])} | {cell(s['bf16'])} | {cell(s['reward'])} "
              f"| {cell(s['gap_first'], 5)} | {cell(s['gap_mean'], 5)} | {max(s['gap_max']):.1f} "
              f"| {PAPER.get(name, 'not given')} |")
    print(f"\nsee {args.out}/recipes-{tag}.png and .csv")


# --- ratio: what RAC closes ----------------------------------------------------------------------

def trained(args, seed):
    """A finished quads run of the `recipes` command, its held-out prompts, and sampled answers."""
    folder = args.out / f"quads-x{args.outliers}-seed{seed}"
    if not (folder / "checkpoint.pt").exists():
        raise ValueError(f"there is no {folder}: first run python reproduce.py recipes.")
    run = train.Run(*train.settings(["--resume", str(folder), "--steps", "0"]))
    prompts = [run.prompt(p) for p in run.problems("test", "held out", 128)]
    sampler = Rollout(run.model, "bf16")
    sampler.sync()
    ids, mask, _ = sampler.generate(prompts, 4, run.s.max_new_tokens, 1.0, seed=seed << 32)
    return run, prompts, [p for p in prompts for _ in range(4)], ids, mask


@torch.no_grad()
def ratio(args):
    """The same sequences are scored under every precision: sampling anew would compare different
    ones, and would not even be monotone."""
    shares = (0, 12.5, 25, 50, 75, 100)
    rollouts = {"bf16": ("bf16", 0), "fp8": ("fp8", 0)} | {s: ("rac", s / 100) for s in shares}
    results = {}
    for seed in args.seeds:
        run, prompts, repeated, ids, mask = trained(args, seed)
        for strength in (args.outliers, 0):
            run.model.set_outliers(strength, args.outlier_blocks)
            run.model.set_qat("w4a16")
            logp_train, _, routes_train = sequence_logp(run.model, repeated, ids, mask, 1.0)
            run.model.set_qat("none")
            for name, (recipe, share) in rollouts.items():
                rollout = Rollout(run.model, recipe, share)
                rollout.sync(prompts)
                logp, _, routes = sequence_logp(rollout.model, repeated, ids, mask, 1.0)
                gap = grpo.mismatch(logp_train, logp, mask)
                gap["same"] = grpo.router_agreement(routes_train, routes, mask)
                results.setdefault((strength, name), []).append(gap)
    print(f"|logp_train - logp_rollout| in nats, trainer W4A16, the quads models of seeds "
          f"{args.seeds}, 128 held-out prompts x 4 answers, teacher-forced\n\n| rollout experts "
          f"| mean | p99 | max | same experts | no outliers: mean | p99 | max | same experts "
          "| paper: largest gap |\n" + "|---" * 10 + "|")
    for name in rollouts:
        cells = [f"RAC {name}%" if name in shares else name]
        for strength in (args.outliers, 0):
            gaps = results[strength, name]
            cells += [f"{sum(g[k] for g in gaps) / len(gaps):.5f}" for k in ("gap_mean", "gap_p99")]
            cells += [f"{max(g['gap_max'] for g in gaps):.2f}",
                      f"{sum(g['same'] for g in gaps) / len(gaps):.4f}"]
        print(f"| {' | '.join(cells)} | {PAPER_RATIO.get(name, '~.74 between two BF16 engines')} |")


# --- layers: weight error, activation error, and what QAT cancels --------------------------------

def experts(moe, x, routed, mode="none"):
    """The layer's output for x (S, D) with forced experts: routed is what `route` returned."""
    moe.route, moe.qat_mode = lambda _: routed, mode
    try:
        return moe(x).double()                                                    # (S, D)
    finally:
        del moe.route
        moe.qat_mode = "none"


@torch.no_grad()
def layers(args):
    """Rollout and trainer get the same inputs and the same experts. As between real engines their
    numerics differ: the rollout's activations are rounded to BF16 on the way in and between the
    products, the trainer's are kept in fp32 (on a GPU: in BF16, by other kernels)."""
    rows = {}
    for seed in args.seeds:
        run, prompts, repeated, ids, mask = trained(args, seed)
        inputs = {}
        for i, block in enumerate(run.model.blocks):
            block.moe.register_forward_hook(
                lambda moe, x, y, i=i: inputs.setdefault(i, (x[0], moe.route(x[0]))))
        sequence_logp(run.model, repeated, ids, mask, 1.0)
        sides = {name: Rollout(run.model, recipe) for name, recipe in
                 (("NVFP4", "nvfp4"), ("NVFP4 + RAC 50%", "quads"))}
        for side in sides.values():
            side.sync(prompts)
        for i, block in enumerate(run.model.blocks):
            x, routed = inputs[i]
            exact = experts(block.moe, x, routed)
            product = block.moe.product
            block.moe.product = lambda x, *rest: product(qat.fake_quantize(x, True), *rest)
            activations = experts(block.moe, x, routed)                           # W16A4
            del block.moe.product
            trainers = {m: experts(block.moe, x, routed, m) for m in ("none", "w4a16", "w4a4")}
            found = {"weights alone": (trainers["w4a16"], exact),
                     "activations alone": (activations, exact)}
            for name, side in sides.items():
                y = experts(side.model.blocks[i].moe, x.bfloat16(), routed)
                found |= {f"{name}, {m}": (y, trainers[m]) for m in trainers}
            for name, (y, reference) in found.items():
                error = ((y - reference).norm() / reference.norm()).item()
                rows.setdefault(name, {}).setdefault(i, []).append(error)
    count = len(run.model.blocks)
    print(f"Relative error of a layer's expert output, quads models of seeds {args.seeds}, outliers "
          f"{args.outliers} times\n\n| | " + " | ".join(f"layer {i}" for i in range(count))
          + " |\n" + "|---" * (count + 1) + "|")
    for name, found in rows.items():
        if "," in name:
            side, mode = name.split(", ")
            name = f"rollout {side} against a trainer with " + {
                "none": "BF16 experts", "w4a16": "W4A16", "w4a4": "W4A4 (symmetric)"}[mode]
        print(f"| {name} | " + " | ".join(cell(found[i], 4) for i in range(count)) + " |")


# --- limits: outliers in more blocks than half ---------------------------------------------------

def limits(args):
    run = train.Run(*train.settings(["--resume", str(warm_up(args, args.seeds[0])), "--steps", "1"]))
    total = run.model.config.d_model // 16
    grid = [(0, 1)] + [(s, b) for s in (32, 64) for b in (total // 4, total // 2, total)]
    folders = {(s, b, seed): prepare(args, f"quads-x{s}-b{b}", seed, recipe="quads", outliers=s,
                                     outlier_blocks=b) for seed in args.seeds for s, b in grid}
    finish(args, folders.values())
    runs = {(f"x{s} in {b} of {total}", seed): rows_of(folder)
            for (s, b, seed), folder in folders.items()}
    write_csv(args.out / "limits.csv", runs)
    print(f"\nquads with RAC 50%: deployed accuracy after {args.steps} steps (the same weights in BF16); "
          f"seeds {args.seeds}\n\n| outliers | in a quarter of the blocks | in half | in all |\n"
          + "|---" * 4 + "|")
    for s in (0, 32, 64):
        cells = []
        for b in (total // 4, total // 2, total) if s else (1,):
            end = summary([runs[f"x{s} in {b} of {total}", seed] for seed in args.seeds])
            cells.append(f"{cell(end['deployed'])} ({cell(end['bf16'])})")
        print(f"| {s or 'none'} | " + " | ".join(cells * (1 if s else 3)) + " |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("what", choices=("recipes", "ratio", "layers", "limits"))
    parser.add_argument("--quick", action="store_true", help="two recipes, one seed, fewer steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(qat.RECIPES), choices=list(qat.RECIPES))
    parser.add_argument("--outliers", type=int, default=64, help="strength; 0 puts none in")
    parser.add_argument("--outlier-blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="GRPO steps of a run")
    parser.add_argument("--eval-problems", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on one CPU thread")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"))
    args, args.flags = parser.parse_known_args(argv)
    args.threads = 1
    if args.quick:
        args.seeds, args.steps = args.seeds[:1], min(args.steps, 25)
    print(f"PyTorch {torch.__version__}, NVFP4 path {kernel_path('cpu')}")
    {"recipes": recipes, "ratio": ratio, "layers": layers, "limits": limits}[args.what](args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: give the same command again to go on.")
