"""python -m pytest tests/test_reproduce.py (a minute). The subcommands at toy size: files, tables,
what each measures, and going on after a crash."""
import argparse
import contextlib
import csv
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import qat  # noqa: E402
import reproduce  # noqa: E402
import train  # noqa: E402
from moe import Config, MoETransformer  # noqa: E402
from rollout import Rollout  # noqa: E402
from start import load_checkpoint  # noqa: E402

torch.set_num_threads(1)
TINY = ("--sft-steps 20 --sft-batch 8 --prompts 4 --group 4 --max-new-tokens 16 --eval-problems 8 "
        "--data builtin --device cpu").split()
FEW = "--steps 2 --seeds 0 1".split()


def finish(args, folders):
    """Instead of reproduce.finish: the runs one after another in this process, which is faster."""
    for folder in folders:
        if load_checkpoint(folder / "checkpoint.pt")["step"] < args.steps:
            train.main(["--resume", str(folder), *args.flags])


def here(out, *flags, finish=finish):
    """What a subcommand prints."""
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.setattr(reproduce, "finish", finish)
        patch.setattr(reproduce, "trained", functools.partial(reproduce.trained, problems=8))
        patch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        reproduce.main([*flags, "--out", str(out)])
    return text.getvalue()


def table(text):
    """The rows of the last Markdown table, as lists of cells."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """recipes nvfp4 and quads, two seeds, two steps."""
    out = tmp_path_factory.mktemp("reproduce")
    return out, here(out, "recipes", "--recipes", "nvfp4", "quads", *FEW, *TINY)


def test_recipes_writes_what_it_says(done):
    out, text = done
    assert (out / "recipes-x64.png").read_bytes()[1:4] == b"PNG" and not list(out.glob("**/*.tmp"))
    with open(out / "recipes-x64.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(r["recipe"], r["seed"], r["step"]) for r in rows] == [
        (name, seed, step) for seed in "01" for name in ("nvfp4", "quads") for step in "012"]
    shown = {cells[0]: cells for cells in table(text)}
    assert list(shown) == ["nvfp4", "quads"] and shown["quads"][-1] == "72.86"
    for name, cells in shown.items():
        of_seed = [[r for r in rows if r["recipe"] == name and r["seed"] == s] for s in "01"]
        gaps = [np.mean([float(r["gap_mean"]) for r in rows if r["gap_mean"]]) for rows in of_seed]
        error = np.std(gaps, ddof=1) / 2**0.5
        assert cells[4] == cells[5] == f"{np.mean(gaps):.4f} ± {error:.4f}"
        ends = [float(rows[-1]["solved"]) for rows in of_seed]
        assert cells[1].startswith(f"{np.mean(ends):.3f} ± ")
        assert cells[6] == f"{max(float(r['gap_max'] or 0) for r in sum(of_seed, [])):.1f}"
    assert "commit" in text and "seeds [0, 1], 2 steps, outliers 64 times, in 4 blocks" in text


def test_all_runs_of_a_seed_start_from_one_warm_up(done):
    out, _ = done
    for seed in (0, 1):
        warm = load_checkpoint(out / f"warmup-seed{seed}" / "checkpoint.pt")
        assert warm["sft_step"] == 20 and warm["step"] == 0 and warm["settings"]["outliers"] == 0
        for name in ("nvfp4", "quads"):
            run = load_checkpoint(out / f"{name}-x64-seed{seed}" / "checkpoint.pt")
            assert run["settings"]["recipe"] == name and run["settings"]["outliers"] == 64
            assert run["settings"]["seed"] == seed and run["step"] == 2
        args = argparse.Namespace(out=out, steps=2, flags=[])
        folder = reproduce.prepare(args, "new", seed, recipe="fp8", outliers=0, outlier_blocks=1)
        fresh = load_checkpoint(folder / "checkpoint.pt")
        assert fresh["settings"]["recipe"] == "fp8" and fresh["rows"] == [] == [*fresh["energy"]]
        assert all(torch.equal(w, fresh["model"][k]) for k, w in warm["model"].items())


def test_what_is_done_is_not_done_again(done):
    out, _ = done
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/checkpoint.pt")}
    here(out, "recipes", "--recipes", "quads", "nvfp4", *FEW)
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("*/checkpoint.pt")}
    with pytest.raises(ValueError, match="quads-x64-seed0 was made with steps = 2, not 3"):
        here(out, "recipes", "--recipes", "quads", "--steps", "3", "--seeds", "0")
    with pytest.raises(ValueError, match="has lr = 0.0003, not 0.1"):      # a flag for all runs
        here(out, "recipes", "--recipes", "quads", *FEW, "--lr", "0.1")


def test_ratio_falls(done):
    out, _ = done
    rows = table(here(out, "ratio", *FEW))
    assert [row[0] for row in rows] == ["0%", "12.5%", "25%", "50%", "75%", "100%"]
    with_outliers, without = ([float(row[i].split(" ± ")[0]) for row in rows] for i in (1, 5))
    for mean in (with_outliers, without):
        assert mean == sorted(mean, reverse=True) and mean[-1] < 0.5 * mean[0]
    assert with_outliers[0] > 3 * without[0]          # outliers are what hurts, and 50% covers them
    assert with_outliers[3] < 0.3 * with_outliers[0]
    assert [row[-1] for row in rows] == ["~1.3", "0.923", "0.901", "0.854", "0.812", "0.759"]


def test_layers_tells_the_two_errors_apart(done):
    out, _ = done
    rows = table(here(out, "layers", *FEW))
    error = {row[0]: [float(cell.split(" ± ")[0]) for cell in row[1:]] for row in rows}
    assert all(len(values) == 2 for values in error.values()) and len(error) == 7
    for layer in (0, 1):
        of = {name: values[layer] for name, values in error.items()}
        both = of["rollout NVFP4, trainer BF16"]
        assert of["trainer W4A16, trainer BF16 (the weights' error alone)"] < both
        # QAT takes the weights' part away, RAC the activations', together they leave the least.
        assert of["rollout NVFP4, trainer W4A16"] < both
        assert of["rollout NVFP4 + RAC 50%, trainer BF16"] < both
        quads = of["rollout NVFP4 + RAC 50%, trainer W4A16"]
        assert quads < min(of["rollout NVFP4, trainer W4A16"],
                           of["rollout NVFP4 + RAC 50%, trainer BF16"])
        assert quads < of["rollout NVFP4 + RAC 50%, trainer W4A4 (symmetric)"]


def test_layer_output_forces_experts_and_leaves_no_trace():
    torch.manual_seed(0)
    model = MoETransformer(Config(d_model=32, expert_width=32, heads=2, kv_heads=1, head_dim=16))
    moe, x = model.blocks[0].moe, torch.randn(9, 32)
    routed = moe.route(x)
    plain = moe(x)
    assert torch.equal(reproduce.layer_output(moe, x, routed), plain.double())
    other = (routed[0], 3 - routed[1])
    assert not torch.equal(reproduce.layer_output(moe, x, other), plain.double())
    w4a16 = reproduce.layer_output(moe, x, routed, "w4a16")
    assert not torch.equal(w4a16, plain.double()) and moe.qat_mode == "none"
    model.set_qat("w4a16")
    assert torch.equal(moe(x).double(), w4a16)
    model.set_qat("none")
    assert torch.equal(moe(x), plain)
    side = Rollout(model, "nvfp4")
    side.sync()
    reproduce.layer_output(side.model.blocks[0].moe, x, routed)
    assert not torch.equal(side.model.blocks[0].moe(x), plain)       # with its own product, still
    assert "route" not in vars(moe) and "product" not in vars(moe)


def test_limits(done):
    """No outliers, three places for two strengths, and coverage; the share is what was chosen. (Of
    the ten runs the last is run; the others borrow its end, with the energy of their outliers.)"""
    out, _ = done
    ran = []

    def last_only(args, folders):
        finish(args, folders[-1:])
        end = load_checkpoint(folders[-1] / "checkpoint.pt")
        for folder in folders:
            saved = load_checkpoint(folder / "checkpoint.pt")
            ran.append(saved["settings"])
            n = saved["settings"]["outlier_blocks"] * (saved["settings"]["outliers"] > 0)
            energy = torch.ones(8).index_fill(0, torch.arange(n), 400.0)
            saved |= {"step": 1, "rows": end["rows"],
                      "energy": dict.fromkeys(end["energy"], energy)}
            reproduce.save_file(folder / "checkpoint.pt", lambda path: torch.save(saved, path))

    rows = table(here(out, "limits", "--seeds", "0", "--steps", "1", finish=last_only))
    assert len(rows) == 10 and [row[1] for row in rows] == 7 * ["50% of the blocks"] + \
        3 * ["95% of the residual"]
    assert [row[0] for row in rows[:4]] == ["none"] + [
        f"32 times, in {b} of 8 blocks" for b in (2, 4, 8)]
    shares = [int(re.match(r"\d+", row[2])[0]) for row in rows]
    assert shares == [50] * 7 + [25, 50, 100]
    assert [s["rac_coverage"] for s in ran] == 7 * [0] + 3 * [0.95]
    assert [s["outlier_blocks"] for s in ran] == [1] + 3 * [2, 4, 8]
    assert {s["recipe"] for s in ran} == {"quads"}


def test_errors(done, tmp_path):
    for words, flags in (
            ("there is no .*quads-x64-seed0", "ratio --seeds 0"),
            ("--seed is set for each run here: use --seeds", "recipes --seed 1"),
            ("--recipe is set for each run", "recipes --recipe nvfp4"),
            ("must be at least 1", "recipes --jobs 0"), ("must be at least 1", "recipes --steps 0"),
            ("must differ", "recipes --seeds 1 1"),
            ("1 to 8 blocks", f"recipes --recipes bf16 --outlier-blocks 9 {' '.join(TINY)}")):
        with pytest.raises(ValueError, match=words):
            here(tmp_path, *flags.split())
    with pytest.raises(SystemExit):
        here(tmp_path, "recipes", "--tea", "1")
    assert not [*tmp_path.glob("bf16*")]              # what could not be made leaves no folder
    # Made, but not run yet: that is no model to measure.
    args = argparse.Namespace(out=done[0], steps=2, flags=[])
    reproduce.prepare(args, "quads-x16", 0, recipe="quads", outliers=16, outlier_blocks=4)
    with pytest.raises(ValueError, match="quads-x16-seed0 is not finished: first run"):
        here(done[0], "layers", *FEW, "--outliers", "16")


def test_a_run_that_fails_is_told_and_the_others_go_on(done, tmp_path):
    """The real processes, two at once; the folder that fails holds a foreign file."""
    args = argparse.Namespace(out=tmp_path, steps=1, jobs=2, flags=[])
    (tmp_path / "warmup-seed0").mkdir()
    shutil.copy(done[0] / "warmup-seed0" / "checkpoint.pt", tmp_path / "warmup-seed0")
    folders = [reproduce.prepare(args, name, 0, recipe="bf16", outliers=0, outlier_blocks=1)
               for name in ("bad", "good")]
    saved = load_checkpoint(folders[0] / "checkpoint.pt")
    saved["settings"]["data"] = str(tmp_path / "nowhere")
    reproduce.save_file(folders[0] / "checkpoint.pt", lambda path: torch.save(saved, path))
    with pytest.raises(ValueError, match="bad-seed0 is not finished, see its log.txt"):
        reproduce.finish(args, folders)
    assert load_checkpoint(folders[1] / "checkpoint.pt")["step"] == 1
    log = (folders[0] / "log.txt").read_text()
    assert "commit" in log.splitlines()[0] and "nowhere" in log.splitlines()[-1]


def test_ctrl_c_lets_the_runs_finish_their_step(done, tmp_path):
    """Else the next command and the old run would write the same file."""
    (tmp_path / "warmup-seed0").mkdir()
    shutil.copy(done[0] / "warmup-seed0" / "checkpoint.pt", tmp_path / "warmup-seed0")
    flags = "recipes --recipes bf16 nvfp4 quads --seeds 0 --steps 500 --jobs 1".split()
    process = subprocess.Popen([sys.executable, "reproduce.py", *flags, "--out", tmp_path],
                               cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    log = tmp_path / "bf16-x64-seed0" / "log.txt"
    try:
        for _ in range(600):
            if log.exists() and "step   1" in log.read_text():
                break
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and error.splitlines()[-1].startswith("stopped: give the same")
    assert "stopped and saved" in log.read_text()
    assert load_checkpoint(log.parent / "checkpoint.pt")["step"] >= 1
    assert not (tmp_path / "nvfp4-x64-seed0" / "log.txt").exists()       # nothing new was started


def test_a_single_seed_has_no_error():
    assert reproduce.cell([0.5]) == "0.500" and reproduce.over_seeds([0.5]) == (0.5, 0)
    assert reproduce.cell([0.4, 0.6], 1) == "0.5 ± 0.1"
    assert set(reproduce.PAPER) <= set(qat.RECIPES) and callable(train.warm_up)
