"""The paper's claims, reproduced where anyone can run them, and where they end.

    python reproduce.py recipes --quick  # naive NVFP4 beside QUADS, one seed: 5 minutes, two cores
    python reproduce.py recipes          # all seven recipes, three seeds
    python reproduce.py ratio            # then: how much of the gap each RAC ratio closes
    python reproduce.py layers           # then: how far expert outputs are apart, by layer
    python reproduce.py limits           # outliers that a fixed ratio of 50% no longer covers

Small models trained from scratch have no activation outliers, and without them no recipe fails. So
outliers are put in: a rescaling that leaves the function as it is, bit for bit (moe.set_outliers).

Every run is a folder of train.py, all runs of a seed start from one warm-up checkpoint, and what is
done is not done again: after Ctrl-C the same command goes on. Flags that are not known here go to
the warm-up, and hold for all its runs (`--device cuda --data FOLDER`). Tables are Markdown; figures
and CSV files go to --out. "Deployed" means: greedy, in the recipe's own rollout precision.
"""
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import grpo
import qat
import rac
import train
from bench import heading
from rollout import Rollout, sequence_logp
from start import load_checkpoint, save_file, settings

PAPER = {"bf16": 73.15, "fp8": 72.88, "nvfp4": 51.37, "qat": 71.1, "quads": 72.86}     # pass@1, %
PAPER_RATIO = {0: "~1.3", 12.5: .923, 25: .901, 50: .854, 75: .812, 100: .759}     # largest gap


# --- Runs ----------------------------------------------------------------------------------------

def warm_up(args, seed):
    """The folder of a seed's warm-up, done or resumed: the start of all its runs."""
    out = args.out / f"warmup-seed{seed}"
    started = (out / "checkpoint.pt").exists()
    run = train.Run(*settings(
        ["--resume", str(out), "--steps", "1"] if started else
        ["--recipe", "bf16", "--seed", str(seed), "--out", str(out), *args.flags]))
    if not started or run.sft_step < run.s.sft_steps:
        out.mkdir(parents=True, exist_ok=True)
        train.warm_up(run, stopping=[])
        run.save()
    return out


def prepare(args, name, seed, **settings):
    """The folder of one run: at first a copy of the warm-up's checkpoint under other settings."""
    out = args.out / f"{name}-seed{seed}"
    settings |= {"steps": args.steps, "threads": 1}
    if not (out / "checkpoint.pt").exists():
        saved = load_checkpoint(warm_up(args, seed) / "checkpoint.pt")
        saved["settings"].update(settings, out=str(out))
        out.mkdir(parents=True, exist_ok=True)
        save_file(out / "checkpoint.pt", lambda path: torch.save(saved, path))
    found = load_checkpoint(out / "checkpoint.pt")["settings"]
    for key in [key for key in settings if found[key] != settings[key]]:
        raise ValueError(f"{out} was made with {key} = {found[key]}, not {settings[key]}: choose "
                         "another --out, or the same flags as before.")
    return out


def finish(args, folders):
    """Run what is not finished, `jobs` at a time, by the real command. Output: FOLDER/log.txt."""
    def unfinished():
        return [f for f in dict.fromkeys(folders)
                if load_checkpoint(f / "checkpoint.pt")["step"] < args.steps]

    waiting, running, start = unfinished(), {}, time.time()
    while waiting or running:
        while waiting and len(running) < args.jobs:
            folder = waiting.pop(0)
            with open(folder / "log.txt", "a", encoding="utf-8") as log:
                running[folder] = subprocess.Popen(
                    [sys.executable, Path(train.__file__), "--resume", folder], stdout=log,
                    stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"})
        for folder in [f for f, process in running.items() if process.poll() is not None]:
            status = running.pop(folder).returncode
            print(f"{folder.name}: {'STOPPED' if status else 'done'} after "
                  f"{(time.time() - start) / 60:.1f} minutes, {len(waiting + [*running])} to go")
            waiting = [] if status else waiting
        time.sleep(0.2)
    for folder in unfinished():
        raise ValueError(f"{folder} is not finished, see its log.txt: give the same command again.")


def over_seeds(values):
    """Mean and standard error, which is 0 for a single seed: there is no telling."""
    return np.mean(values), np.std(values, ddof=1) / len(values)**0.5 if len(values) > 1 else 0


def cell(values, digits=3):
    return " ± ".join(f"{value:.{digits}f}" for value in over_seeds(values)[:len(values)])


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
    bars.tick_params(axis="x", rotation=40)
    gap.set_yscale("symlog", linthresh=1e-4)            # logarithmic, with room for an exact 0
    accuracy.set(title="deployed accuracy (dotted: BF16 weights)", xlabel="GRPO step")
    gap.set(title="log-prob gap, nats (dotted: largest)", xlabel="GRPO step")
    entropy.set(title="entropy, nats (dotted: answer tokens)", xlabel="GRPO step")
    bars.set_title("deployed accuracy at the end")
    gap.legend(gap.lines[::2], names, fontsize=8)
    drawing.suptitle(title)
    return drawing


def recipes(args):
    names, strength = args.recipes, args.outliers
    folders = {(name, seed): prepare(
        args, f"{name}-x{strength}", seed, recipe=name, outliers=strength,
        outlier_blocks=args.outlier_blocks) for seed in args.seeds for name in names}
    finish(args, folders.values())
    runs = {key: load_checkpoint(folder / "checkpoint.pt")["rows"]
            for key, folder in folders.items()}
    rows = [{"recipe": key[0], "seed": key[1], **row} for key in runs for row in runs[key]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns] + [[f"{row[c]:.6g}" if isinstance(row.get(c), float) else str(row.get(c, ""))
                          for c in columns] for row in rows]
    save_file(args.out / f"recipes-x{strength}.csv",
              lambda path: path.write_text("".join(",".join(line) + "\n" for line in lines)))
    what = f"{strength} times, in {args.outlier_blocks} blocks" if strength else "none"
    title = f"{len(args.seeds)} seed(s), {args.steps} steps, outliers: {what}"
    drawing = figure(runs, names, args.seeds, title)
    save_file(args.out / f"recipes-x{strength}.png",
              lambda path: drawing.savefig(path, format="png", dpi=70))
    print(f"\n{title}; held-out problems, greedy; mean ± standard error over seeds\n\n"
          "| recipe | deployed at the end | its weights in BF16 | reward, last 15 steps "
          "| gap_mean, steps 1-5 | gap_mean, last 15 | largest gap | paper: pass@1 |\n"
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
    print(f"\nsee {args.out}/recipes-x{strength}.png and .csv")


# --- ratio: what RAC closes ----------------------------------------------------------------------

def trained(args, seed, problems=128):
    """A finished quads run of `recipes`; prompts; the same for each answer; ids and mask (R, T)."""
    folder = args.out / f"quads-x{args.outliers}-seed{seed}"
    if not (folder / "checkpoint.pt").exists():
        raise ValueError(f"there is no {folder}: first run python reproduce.py recipes.")
    run = train.Run(*settings(["--resume", str(folder), "--steps", "0"]))
    prompts = [run.prompt(problem) for problem in run.problems("test", "held out", problems)]
    sampler = Rollout(run.model, "bf16")
    sampler.sync()
    ids, mask, _ = sampler.generate(prompts, 4, run.s.max_new_tokens, 1.0, seed=seed << 32)
    return run, prompts, [p for p in prompts for _ in range(4)], ids, mask


@torch.no_grad()
def ratio(args):
    """The same sequences are scored under every ratio: sampled anew, they would not compare."""
    gaps = {}                                   # (share, strength) -> monitors, a dict a seed
    for seed in args.seeds:
        run, prompts, repeated, ids, mask = trained(args, seed)
        for strength in (args.outliers, 0):
            run.model.set_outliers(strength, args.outlier_blocks)
            run.model.set_qat("w4a16")
            logp_train, _, routes_train = sequence_logp(run.model, repeated, ids, mask, 1.0)
            run.model.set_qat("none")
            for share in PAPER_RATIO:
                rollout = Rollout(run.model, "rac", share / 100)
                rollout.sync(prompts)           # RAC chooses its blocks on the prompts
                logp, _, routes = sequence_logp(rollout.model, repeated, ids, mask, 1.0)
                gap = grpo.mismatch(logp_train, logp, mask)
                same = grpo.router_agreement(routes_train, routes, mask)
                gaps.setdefault((share, strength), []).append({**gap, "same": same})
    print(f"|logp_train - logp_rollout| in nats, trainer W4A16: the quads models of seeds "
          f"{args.seeds}, 128 held-out prompts x 4 answers\n\n| RAC | mean | p99 | largest "
          "| same experts | no outliers: mean | p99 | largest | same experts | paper: largest |\n"
          + "|---" * 10 + "|")
    for share in PAPER_RATIO:
        cells = [f"{share:g}%"]
        for found in (gaps[share, args.outliers], gaps[share, 0]):
            mean, p99, largest, same = ([gap[k] for gap in found]
                                        for k in ("gap_mean", "gap_p99", "gap_max", "same"))
            cells += [cell(mean, 5), cell(p99, 4), f"{max(largest):.2f}", f"{np.mean(same):.4f}"]
        print(f"| {' | '.join(cells)} | {PAPER_RATIO[share]} |")


# --- layers: weight error, activation error, and what QAT cancels --------------------------------

def layer_output(moe, x, routed, mode="none", product=None):
    """An MoE layer's output for x (S, D) with forced experts: `routed` is what `route` returned."""
    moe.route, moe.qat_mode, own = lambda _: routed, mode, moe.product
    moe.product = product or own
    y = moe(x).double()                                                           # (S, D)
    del moe.route
    moe.qat_mode, moe.product = "none", own
    return y


@torch.no_grad()
def layers(args):
    """Both sides get the same inputs and the same experts. Their numerics differ as between real
    engines: the rollout rounds activations to BF16 on the way in and between its two products, the
    trainer keeps the dtype of training (fp32 on a CPU)."""
    errors = {}
    for seed in args.seeds:
        run, prompts, repeated, ids, mask = trained(args, seed)
        sides = {"NVFP4": Rollout(run.model, "nvfp4"),
                 "NVFP4 + RAC 50%": Rollout(run.model, "quads")}
        for side in sides.values():
            side.sync(prompts)
        inputs = []                         # of each layer: x (S, D), and its weights and experts
        for block in run.model.blocks:
            block.moe.register_forward_hook(
                lambda moe, x, y: inputs.append((x[0], moe.route(x[0]))))
        sequence_logp(run.model, repeated, ids, mask, 1.0)
        for i, (block, (x, routed)) in enumerate(zip(run.model.blocks, inputs)):
            def rounded(x, *rest, product=block.moe.product):                     # W16A4
                return product(qat.fake_quantize(x, row_scaled=True), *rest)
            exact, w4a16, w4a4 = (layer_output(block.moe, x, routed, mode)
                                  for mode in ("none", "w4a16", "w4a4"))
            pairs = {"weights rounded, activations not": (w4a16, exact), "activations rounded, "
                     "weights not": (layer_output(block.moe, x, routed, "none", rounded), exact)}
            for name, side in sides.items():
                y = layer_output(side.model.blocks[i].moe, x.bfloat16(), routed)
                pairs |= {f"rollout {name}, trainer {t}": (y, reference) for t, reference in (
                    ("BF16", exact), ("W4A16", w4a16), ("W4A4 (symmetric)", w4a4))}
            for name, (y, reference) in pairs.items():
                error = ((y - reference).norm() / reference.norm()).item()
                errors.setdefault(name, {}).setdefault(i, []).append(error)
    print(f"Relative error of a layer's output: the quads models of seeds {args.seeds}, outliers "
          f"{args.outliers} times\n\n| | " + " | ".join(f"layer {i}" for i in errors[name])
          + " |\n" + "|---" * (1 + len(errors[name])) + "|")
    for name, found in errors.items():
        print(f"| {name} | " + " | ".join(cell(values, 4) for values in found.values()) + " |")


# --- limits: outliers in more blocks than half ---------------------------------------------------

def limits(args):
    """quads with RAC 50%, and where that fails with --rac-coverage: see rac.select_blocks."""
    config = load_checkpoint(warm_up(args, args.seeds[0]) / "checkpoint.pt")["config"]
    total = config["d_model"] // rac.BLOCK
    some = (total // 4, total // 2, total)
    folders = {(s, b, coverage): [prepare(
        args, f"quads-x{s}-b{b}-c{coverage:g}", seed, recipe="quads", outliers=s, outlier_blocks=b,
        rac_coverage=coverage) for seed in args.seeds]
        for s, b, coverage in ((0, 1, 0), *((32, b, 0) for b in some), *((64, b, 0) for b in some),
                               *((64, b, args.coverage) for b in some))}
    finish(args, sum(folders.values(), []))
    print(f"\nquads after {args.steps} steps, seeds {args.seeds}\n\n| outliers | second pass for "
          "| that is | deployed | its weights in BF16 | seconds a step |\n" + "|---" * 6 + "|")
    for (s, b, coverage), of_case in folders.items():
        ends = [load_checkpoint(folder / "checkpoint.pt") for folder in of_case]
        chosen = [(rac.select_blocks(energy, 0.5, coverage) < len(energy)).sum() / len(energy)
                  for end in ends for energy in end["energy"].values()]
        solved, bf16, seconds = ([end["rows"][-1][column] for end in ends]
                                 for column in ("solved", "solved_bf16", "step_s"))
        print(f"| {f'{s} times, in {b} of {total} blocks' if s else 'none'} "
              f"| {f'{coverage:.0%} of the residual' if coverage else '50% of the blocks'} "
              f"| {np.mean(chosen):.0%} of the blocks | {cell(solved)} | {cell(bf16)} "
              f"| {cell(seconds, 1)} |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("what", choices=("recipes", "ratio", "layers", "limits"))
    add("--quick", action="store_true", help="nvfp4 and quads, one seed, 25 steps")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--recipes", nargs="+", default=list(qat.RECIPES), choices=list(qat.RECIPES))
    add("--outliers", type=int, default=64, help="how many times larger; 0 puts none in")
    add("--outlier-blocks", type=int, default=4, help="blocks of an expert's input that hold one")
    add("--coverage", type=float, default=0.95, help="of the residual energy, for limits")
    add("--steps", type=int, default=50, help="GRPO steps of a run")
    add("--jobs", type=int, default=2, help="runs at once, each on one CPU thread")
    add("--out", type=Path, default=Path("runs/reproduce"), help="folder of all runs and tables")
    args, args.flags = parser.parse_known_args(argv)
    if args.quick:
        args.seeds, args.recipes, args.steps = args.seeds[:1], ["nvfp4", "quads"], 25
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
