"""The paper's claims, reproduced where anyone can run them, and where they end.

    python reproduce.py recipes --quick  # naive NVFP4 beside QUADS, one seed: 5 minutes, two cores
    python reproduce.py recipes          # all seven recipes, three seeds
    python reproduce.py ratio            # then: how much of the gap each RAC ratio closes
    python reproduce.py layers           # then: how far expert outputs are apart, by layer
    python reproduce.py limits           # outliers that a fixed ratio of 50% no longer covers

(On a machine with a GPU add `--device cpu` for these.) Small models trained from scratch have no
activation outliers, and without them no recipe fails. So outliers are put in: see moe.set_outliers.

Every run is a folder of train.py, all runs of a seed start from one warm-up checkpoint, and what is
done is not done again: after Ctrl-C the same command goes on. Flags not known here go to train.py
(`--data FOLDER`). "Deployed" means: greedy, in the recipe's own rollout precision.
"""
import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import qat
import rac
import train
from bench import gaps, heading
from rollout import Rollout, sequence_logp
from start import load_checkpoint, save_file, settings

PAPER = {"bf16": 73.15, "fp8": 72.88, "nvfp4": 51.37, "qat": 71.1, "quads": 72.86}     # pass@1, %
COVERAGE = 0.95                                         # of the residual energy, for `limits`
PAPER_RATIO = {0: "~1.3", 12.5: .923, 25: .901, 50: .854, 75: .812, 100: .759}     # largest gap


# --- Runs ----------------------------------------------------------------------------------------

def warm_up(args, seed):
    """The warm-up of a seed, done or resumed, as train.py's Run: the start of all its runs."""
    out = args.out / f"warmup-seed{seed}"
    flags = ["--resume", str(out)] if (out / "checkpoint.pt").exists() else \
        ["--recipe", "bf16", "--seed", str(seed), "--out", str(out)]
    run = train.Run(*settings(flags + args.flags))
    if run.sft_step == 0 or run.sft_step < run.s.sft_steps:
        out.mkdir(parents=True, exist_ok=True)
        train.warm_up(run, stopping=[])
        run.save()
    return run


def prepare(args, name, seed, **changes):
    """The folder of one run: at first a copy of the warm-up's checkpoint under other settings."""
    out = args.out / f"{name}-seed{seed}"
    changes |= {"steps": args.steps, "threads": 1}
    if not (out / "checkpoint.pt").exists():
        start = warm_up(args, seed)
        saved = load_checkpoint(start.out / "checkpoint.pt")
        saved["settings"].update(changes, out=str(out))
        start.model.set_outliers(changes["outliers"], changes["outlier_blocks"])      # or raises
        out.mkdir(parents=True, exist_ok=True)
        save_file(out / "checkpoint.pt", lambda path: torch.save(saved, path))
    found = settings(["--resume", str(out), *args.flags])[1]["settings"]    # raises if flags differ
    for key in [key for key in changes if found[key] != changes[key]]:
        raise ValueError(f"{out} was made with {key} = {found[key]}, not {changes[key]}: choose "
                         "another --out.")
    return out


def finish(args, folders):
    """Run what is not finished, `jobs` at a time, by the real command. Output: FOLDER/log.txt."""
    def unfinished():
        return [f for f in dict.fromkeys(folders)
                if load_checkpoint(f / "checkpoint.pt")["step"] < args.steps]

    def run(folder):
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
            print(heading(), file=log, flush=True)
            status = subprocess.run([sys.executable, "-u", train.__file__, "--resume", folder,
                                     *args.flags], stdout=log, stderr=log).returncode
        print(f"{folder.name}: {'STOPPED' if status else 'done'} after "
              f"{(time.time() - start) / 60:.1f} minutes", flush=True)

    start, pool = time.time(), ThreadPoolExecutor(args.jobs)
    try:
        list(pool.map(run, unfinished()))
    finally:                # Ctrl-C reaches the runs, too: each finishes its step and saves
        pool.shutdown(cancel_futures=True)
    for folder in unfinished():
        raise ValueError(f"{folder} is not finished, see its log.txt: give the same command again.")


def over_seeds(values):
    """Mean and standard error. (A single seed has none, and 0 stands for it.)"""
    return np.mean(values), np.std(values, ddof=1) / len(values)**0.5 if len(values) > 1 else 0


def cell(values, digits=3):
    mean, error = over_seeds(values)
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if len(values) > 1 else "")


# --- recipes: who collapses ----------------------------------------------------------------------

def figure(runs, names, seeds, title):
    """Four panels over the steps; bands span the seeds. runs: {(recipe, seed): rows}."""
    from matplotlib.figure import Figure
    drawing = Figure(figsize=(17, 4.2), layout="constrained")
    accuracy, gap, entropy, bars = drawing.subplots(1, 4)
    length = entropy.twinx()
    for i, name in enumerate(names):
        for panel, column, style in ((accuracy, "solved", "-"), (accuracy, "solved_bf16", ":"),
                                     (gap, "gap_mean", "-"), (gap, "gap_max", ":"),
                                     (entropy, "entropy", "-"), (length, "answer_tokens", ":")):
            rows = [[row for row in runs[name, seed] if column in row] for seed in seeds]
            steps = [row["step"] for row in rows[0]]
            values = np.array([[row[column] for row in one] for one in rows])     # (seeds, steps)
            panel.plot(steps, values.mean(0), f"C{i}{style}", label=name)
            if style == "-":
                panel.fill_between(steps, values.min(0), values.max(0), color=f"C{i}", alpha=0.12)
        mean, error = over_seeds([runs[name, seed][-1]["solved"] for seed in seeds])
        bars.bar(name, mean, yerr=error, color=f"C{i}")
    bars.tick_params(axis="x", rotation=60)
    gap.set_yscale("symlog", linthresh=1e-4)            # logarithmic, with room for an exact 0
    accuracy.set(title="deployed accuracy (dotted: BF16 weights)", xlabel="GRPO step")
    gap.set(title="log-prob gap, nats (dotted: largest)", xlabel="GRPO step")
    entropy.set(title="entropy, nats (dotted: answer tokens)", xlabel="GRPO step")
    bars.set_title("deployed accuracy at the end")
    drawing.legend(gap.lines[::2], names, loc="outside right center")
    drawing.suptitle(title)
    return drawing


def recipes(args):
    names, strength, n = args.recipes, args.outliers, args.outlier_blocks
    folders = {(name, seed): prepare(args, f"{name}-x{strength}", seed, recipe=name,
                                     outliers=strength, outlier_blocks=n)
               for seed in args.seeds for name in names}
    finish(args, folders.values())
    runs = {key: load_checkpoint(folder / "checkpoint.pt")["rows"]
            for key, folder in folders.items()}
    rows = [{"recipe": name, "seed": str(seed)} | {c: f"{v:.6g}" for c, v in row.items()}
            for (name, seed), rows in runs.items() for row in rows]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns] + [[row.get(column, "") for column in columns] for row in rows]
    save_file(args.out / f"recipes-x{strength}.csv",
              lambda path: path.write_text("".join(",".join(line) + "\n" for line in lines)))
    title = f"seeds {args.seeds}, {args.steps} steps, outliers {strength} times, in {n} blocks"
    save_file(args.out / f"recipes-x{strength}.png", lambda path: figure(
        runs, names, args.seeds, title).savefig(path, format="png", dpi=70))
    print(f"\n{title}; held-out problems, greedy; mean ± standard error over seeds\n\n"
          "| recipe | deployed at the end | its weights in BF16 | reward, last 15 steps "
          "| gap_mean, steps 1-5 | gap_mean, last 15 | largest gap | paper: pass@1, % |\n"
          + "|---" * 8 + "|")
    for name in names:
        solved, bf16, reward, gap, largest = (
            [[row[c] for row in runs[name, seed] if c in row] for seed in args.seeds]
            for c in ("solved", "solved_bf16", "reward", "gap_mean", "gap_max"))
        print(f"| {name} | {cell([v[-1] for v in solved])} | {cell([v[-1] for v in bf16])} "
              f"| {cell([np.mean(v[-15:]) for v in reward])} "
              f"| {cell([np.mean(v[:5]) for v in gap], 4)} "
              f"| {cell([np.mean(v[-15:]) for v in gap], 4)} "
              f"| {max(map(max, largest)):.1f} | {PAPER.get(name, 'not given')} |")


# --- ratio: what RAC closes ----------------------------------------------------------------------

def trained(args, seed, problems=128):
    """A finished quads run of `recipes`, and prompts of its held-out problems."""
    folder = args.out / f"quads-x{args.outliers}-seed{seed}"
    s, saved = settings(["--resume", str(folder), "--steps", "0", *args.flags])
    if saved["step"] < args.steps:
        raise ValueError(f"{folder} is not finished: first run python reproduce.py recipes.")
    run = train.Run(s, saved)
    return run, [run.prompt(problem) for problem in run.problems("test", "held out", problems)]


def ratio(args):
    """bench.gaps scores the same sequences under every ratio: sampled anew, they would not compare.
    (BF16 samples them, which outliers do not change.)"""
    found = {}                                  # strength -> all monitors, a dict a seed
    for seed in args.seeds:
        run, prompts = trained(args, seed)
        for strength in {args.outliers, 0}:
            run.model.set_outliers(strength, run.s.outlier_blocks)
            found.setdefault(strength, []).append(
                gaps(run.model, prompts, run.s.max_new_tokens, seed << 32))
    print(f"|logp_train - logp_rollout| in nats, trainer W4A16: the quads models of seeds "
          f"{args.seeds}, outliers {args.outliers} times, {len(prompts)} held-out prompts x 4 "
          "answers\n\n| RAC | mean | p99 | largest | same experts | no outliers: mean | p99 "
          "| largest | same experts | paper: largest |\n" + "|---" * 10 + "|")
    for share in PAPER_RATIO:
        cells = [f"{share:g}%"]
        name = f"nvfp4 + rac {share:g}%" if share else "nvfp4"
        for strength in (args.outliers, 0):
            mean, p99, largest, same = (
                [of_seed[name, "w4a16"][k] for of_seed in found[strength]]
                for k in ("gap_mean", "gap_p99", "gap_max", "router_agreement"))
            cells += [cell(mean, 5), cell(p99, 4), f"{max(largest):.2f}", f"{np.mean(same):.4f}"]
        print(f"| {' | '.join(cells)} | {PAPER_RATIO[share]} |")


# --- layers: weight error, activation error, and what QAT cancels --------------------------------

def layer_output(moe, x, routed, mode="none"):
    """An MoE layer's output for x (S, D) with forced experts: `routed` is what `route` returned."""
    moe.route, moe.qat_mode = lambda _: routed, mode
    y = moe(x).double()                                                           # (S, D)
    del moe.route
    moe.qat_mode = "none"
    return y


@torch.no_grad()
def layers(args):
    """Both sides get the same inputs and the same experts. Their numerics differ as between real
    engines: the rollout holds all around its two products in BF16, their inputs, their outputs and
    the layer's result; the trainer has the dtype of training (fp32 on a CPU)."""
    errors, trainers = {}, {"BF16": "none", "W4A16": "w4a16", "W4A4 (symmetric)": "w4a4"}
    for seed in args.seeds:
        run, prompts = trained(args, seed)
        sampler = Rollout(run.model, "bf16")
        sampler.sync()
        ids, mask, _ = sampler.generate(prompts, 4, run.s.max_new_tokens, 1.0, seed << 32)
        repeated = [p for p in prompts for _ in range(4)]                         # R of them
        rollouts = {"NVFP4": Rollout(run.model, "nvfp4"),
                    "NVFP4 + RAC 50%": Rollout(run.model, "quads")}
        for rollout in rollouts.values():
            rollout.sync(prompts)
        inputs = []                         # of each layer: x (S, D), and its weights and experts
        hooks = [block.moe.register_forward_hook(
            lambda moe, x, y: inputs.append((x[0], moe.route(x[0])))) for block in run.model.blocks]
        sequence_logp(run.model, repeated, ids, mask, 1.0)
        for hook in hooks:
            hook.remove()
        for i, (x, routed) in enumerate(inputs):
            y = {trainer: layer_output(run.model.blocks[i].moe, x, routed, mode)
                 for trainer, mode in trainers.items()}
            pairs = {"trainer W4A16, trainer BF16 (the weights' error alone)":
                     (y["W4A16"], y["BF16"])}
            for name, rollout in rollouts.items():
                mine = layer_output(rollout.model.blocks[i].moe, x.bfloat16(), routed)
                for trainer in trainers:
                    pairs[f"rollout {name}, trainer {trainer}"] = (mine, y[trainer])
            for name, (one, other) in pairs.items():
                error = ((one - other).norm() / other.norm()).item()
                errors.setdefault(name, [[] for _ in inputs])[i].append(error)
    print(f"Relative difference of a layer's outputs: the quads models of seeds {args.seeds}, "
          f"outliers {args.outliers} times\n\n| | "
          + " | ".join(f"layer {i}" for i in range(len(inputs))) + " |\n|---"
          + "|---" * len(inputs) + "|")
    for name, found in errors.items():
        print(f"| {name} | {' | '.join(cell(values, 4) for values in found)} |")


# --- limits: outliers in more blocks than half ---------------------------------------------------

def limits(args):
    """quads with RAC 50%, and where that fails with --rac-coverage: see rac.select_blocks."""
    total = warm_up(args, args.seeds[0]).model.config.d_model // rac.BLOCK
    some = (total // 4, total // 2, total)
    folders = {(s, b, coverage): [prepare(
        args, f"quads-x{s}-b{b}-c{coverage:g}", seed, recipe="quads", outliers=s, outlier_blocks=b,
        rac_coverage=coverage) for seed in args.seeds]
        for s, b, coverage in ((0, 1, 0), *((32, b, 0) for b in some), *((64, b, 0) for b in some),
                               *((64, b, COVERAGE) for b in some))}
    finish(args, sum(folders.values(), []))
    print(f"\nquads after {args.steps} steps, seeds {args.seeds}\n\n| outliers | second pass for "
          "| that is | deployed | its weights in BF16 |\n" + "|---" * 5 + "|")
    for (s, b, coverage), of_case in folders.items():
        ends = [load_checkpoint(folder / "checkpoint.pt") for folder in of_case]
        rac_ratio = ends[0]["settings"]["rac_ratio"]
        chosen = [(rac.select_blocks(e, rac_ratio, coverage) < len(e)).sum() / len(e)
                  for end in ends for e in end["energy"].values()]
        solved, bf16 = ([end["rows"][-1][c] for end in ends] for c in ("solved", "solved_bf16"))
        second = f"{coverage:.0%} of the residual" if coverage else f"{rac_ratio:.0%} of the blocks"
        print(f"| {f'{s} times, in {b} of {total} blocks' if s else 'none'} | {second} "
              f"| {np.mean(chosen):.0%} of the blocks | {cell(solved)} | {cell(bf16)} |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=("recipes", "ratio", "layers", "limits"))
    add("--quick", action="store_true", help="nvfp4 and quads, one seed, 25 steps")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--recipes", nargs="+", default=list(qat.RECIPES), choices=list(qat.RECIPES))
    add("--outliers", type=int, default=64, help="how many times larger; 0 puts none in")
    add("--outlier-blocks", type=int, default=4, help="blocks of an expert's input that hold one")
    add("--steps", type=int, default=50, help="GRPO steps of a run")
    add("--jobs", type=int, default=2, help="runs at once, each on one CPU thread")
    add("--out", type=Path, default=Path("runs/reproduce"), help="folder of all runs and tables")
    args, args.flags = parser.parse_known_args(argv)
    for flag in {"--seed", "--recipe", "--threads", "--resume"} & {*args.flags}:
        raise ValueError(f"{flag} is set for each run here: use --seeds, --recipes, --jobs.")
    if min(args.jobs, args.steps) < 1 or len({*args.seeds}) < len(args.seeds):
        raise ValueError("--jobs and --steps must be at least 1, and --seeds must differ.")
    if args.quick:
        args.seeds, args.recipes, args.steps = args.seeds[:1], ["nvfp4", "quads"], 25
        args.out /= "quick"
    torch.set_num_threads(1)
    print(heading())
    {"recipes": recipes, "ratio": ratio, "layers": layers, "limits": limits}[args.what](args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: give the same command again to go on.")
