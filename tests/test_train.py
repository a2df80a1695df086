"""The main job: settings, warm-up, steps, files, errors, and an exact resume.

    python -m pytest tests/test_train.py
"""
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from rollout import sequence_logp
from start import load_checkpoint

ROOT = Path(__file__).parents[1]
TINY = ("--sft-steps 30 --sft-batch 8 --steps 4 --prompts 4 --group 4 --max-new-tokens 24 --threads"
        " 1 --eval-every 2 --eval-problems 8 --data builtin --device cpu").split()
TIMES = {"rollout_tok_s", "train_tok_s", "sync_s", "step_s", "peak_gb"}


def rows_of(out):
    with open(out / "metrics.csv") as f:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(f)]


def equal(a, b):
    """Bit for bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def state(out):
    saved = torch.load(out / "checkpoint.pt", weights_only=True)
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in saved["rows"]]
    return {k: saved[k] for k in ("model", "optimizer", "energy", "step", "sft_step")}, rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run of four steps, by the real command."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = subprocess.run([sys.executable, "train.py", *TINY, "--out", out], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def run_from(out, *flags):
    """The objects of a run, without running it."""
    run = train.Run(*train.settings([*TINY, "--out", str(out), *flags]))
    run.model.set_qat(train.qat.RECIPES[run.s.recipe][1])
    return run


# --- what a run says and writes ------------------------------------------------------------------

def test_first_lines_and_files(whole):
    out, text = whole
    for word in ("device", "data     home-made", "model    cpu: 0.5", "threads  1", "emulated",
                 "memory   about 0.", "fp32 weights 0.00", "AdamW's moments", "a pass",
                 "recipe   quads: rollout nvfp4+rac, trainer's QAT w4a16"):
        assert word in text
    assert json.loads((out / "config.json").read_text())["recipe"] == "quads"
    assert (out / "curves.png").read_bytes()[1:4] == b"PNG"
    assert not list(out.glob("*.tmp"))
    rows = rows_of(out)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0]["solved"] and not rows[0]["reward"] and not rows[1]["solved"]
    names = ("reward solved solved_bf16 zero_std_groups truncated answer_tokens entropy grad_norm "
             "clip_fraction gap_mean gap_max gap_p99 gap_tail kl_k1 kl_k3 router_agreement").split()
    assert set(names) <= rows[4].keys() and TIMES <= set(
        (out / "metrics.csv").read_text().splitlines()[0].split(","))
    for name in names:
        assert float(rows[4][name]) == float(rows[4][name])      # not NaN
    for share in ("reward", "solved", "truncated", "zero_std_groups", "router_agreement"):
        assert 0 <= float(rows[4][share]) <= 1


def test_defaults_follow_the_device_and_flags_beat_the_preset(monkeypatch):
    s, _ = train.settings([])
    assert (s.recipe, s.sft_steps > 0, s.out) == ("quads", True, "runs/quads-seed0")
    if not torch.cuda.is_available():
        assert (s.device, s.preset, s.data, s.sloppy, s.max_new_tokens) == \
            ("cpu", "cpu", "builtin", 0.7, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    s, _ = train.settings(["--lr", "0.5", "--recipe", "qat"])
    assert (s.device, s.preset, s.data, s.sloppy, s.lr, s.group, s.out) == \
        ("cuda", "gpu", "hub", 0.0, 0.5, 16, "runs/qat-seed0")
    s, _ = train.settings(["--device", "cpu", "--data", "/data", "--sloppy", "0.2"])
    assert (s.preset, s.data, s.sloppy, s.max_new_tokens) == ("cpu", "/data", 0.2, 256)
    s, _ = train.settings(["--init", str(ROOT), "--recipe", "qat"])
    assert (s.init, s.data, s.sft_steps, s.lr, s.max_new_tokens, s.group, s.threads) == \
        (str(ROOT), "hub", 0, 1e-6, 256, 16, 0)
    s, _ = train.settings(["--init", str(ROOT), "--device", "cpu", "--lr", "1e-5"])
    assert (s.data, s.sft_steps, s.lr, s.max_new_tokens, s.group) == ("builtin", 0, 1e-5, 256, 8)


def test_threads_are_at_most_those_of_the_machine(whole, monkeypatch):
    kept, asked = torch.get_num_threads(), []
    monkeypatch.setattr(train.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(train, "Run", lambda s, saved: 1 / 0)
    for threads in ("1", "3", "9", "0"):
        with pytest.raises(ZeroDivisionError):
            train.main(["--resume", str(whole[0]), "--steps", "0", "--threads", threads])
    assert asked == [1, 3, 4, kept]
    assert train.settings(["--device", "cpu"])[0].threads == 2


def test_evaluation_of_a_saved_run_in_another_precision_changes_nothing(whole, capsys):
    out, _ = whole
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    train.main(["--resume", str(out), "--steps", "0", "--recipe", "fp8", "--eval-problems", "6"])
    text = capsys.readouterr().out
    assert "rollout fp8" in text and "of 6" in text and text.count("  e.g. ") == 5
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("recipe", train.qat.RECIPES)
def test_every_recipe_runs(recipe, tmp_path):
    train.main([*TINY, "--recipe", recipe, "--sft-steps", "2", "--steps", "1", "--eval-problems",
                "2", "--out", str(tmp_path)])
    row = rows_of(tmp_path)[1]
    same_numbers = recipe in ("bf16", "qat-symmetric")      # both sides multiply the same operands
    assert float(row["gap_mean"]) < 1e-5 if same_numbers else float(row["gap_mean"]) > 1e-5


def test_real_gsm8k_text_from_a_folder(tmp_path, capsys):
    sample = (Path(__file__).parent / "gsm8k_sample.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(sample))
    (tmp_path / "test.jsonl").write_text("\n".join(sample[:5]))
    train.main([*TINY, "--data", str(tmp_path), "--steps", "1", "--sft-steps", "2", "--out",
                str(tmp_path / "run")])
    assert "official" in capsys.readouterr().out
    rows = rows_of(tmp_path / "run")
    assert rows[0]["official"] and rows[1]["official"] and rows[1]["reward"]


# --- a checkpoint instead of a new model ---------------------------------------------------------

def test_export_init_resume_export_init(whole, tmp_path, capsys):
    """A run goes out as a Hugging Face folder, comes in as somebody else's, and out again."""
    small = ("--recipe quads --device cpu --threads 1 --prompts 4 --group 4 --max-new-tokens 24 "
             "--eval-problems 4 --steps 1").split()
    first, second = tmp_path / "first", tmp_path / "second"

    def done(*flags):
        train.main([*map(str, flags)])
        return capsys.readouterr().out
    text = done("--resume", whole[0], "--export", first)
    assert f"{first}/bf16" in text and f"{first}/nvfp4" in text and "step   " not in text
    real = command("--init", first / "bf16", *small, "--out", tmp_path / "run")
    text = real.stdout + real.stderr
    assert real.returncode == 0, text
    assert f"model    {first}/bf16: 0.5" in text and "loss" not in text and "step   1" in text
    saved, rows = state(tmp_path / "run")
    assert saved["step"] == 1 and 0 < float(rows[1]["gap_mean"]) < 0.5
    assert "step   2" in done("--resume", tmp_path / "run", "--steps", "2")
    done("--resume", tmp_path / "run", "--export", second)
    run = train.Run(*train.settings(["--init", str(second / "bf16"), *small]))
    before = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(p, before[k].bfloat16()) for k, p in run.model.state_dict().items())
    assert (first / "bf16" / "tokenizer.json").read_text() == \
        (second / "nvfp4" / "tokenizer.json").read_text()
    for flags, words in ((["--resume", tmp_path / "run", "--export", second], "already there"),
                         (["--export", tmp_path / "x"], "add --resume RUN"),
                         (["--init", second / "nvfp4"], "has quantization_config"),
                         (["--init", second], "config.json is missing"),
                         (["--init", first / "bf16", "--sft-steps", "3"], "drop --sft-steps"),
                         (["--resume", tmp_path / "run", "--init", second], "has init = ")):
        with pytest.raises(ValueError, match=words):
            train.main([*map(str, flags), "--out", str(tmp_path / "bad")] if "--resume" not in flags
                       else [*map(str, flags)])
    (first / "bf16").rename(first / "gone")
    with pytest.raises(ValueError, match=f"{first}/bf16/.* is missing"):
        train.main(["--resume", str(tmp_path / "run"), "--steps", "3"])
    (second / "bf16" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        train.main(["--init", str(second / "bf16"), "--out", str(tmp_path / "bad")])


def test_an_imported_run_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    """2 steps = 1 + 1: bf16 moments and the noise that rounds them. (Rewards by a hash: the model
    solves nothing, and what is never right teaches nothing.)"""
    saved = load_checkpoint(whole[0] / "checkpoint.pt")
    train.export_run(saved, tmp_path / "hf")
    monkeypatch.setattr(train.gsm8k, "grade", lambda text, gold: len(text) % 2)
    small = ["--init", str(tmp_path / "hf/bf16"), "--device", "cpu", "--threads", "1", "--group",
             "4", "--prompts", "4", "--max-new-tokens", "24", "--eval-problems", "2", "--steps"]
    train.main([*small, "2", "--out", str(tmp_path / "a")])
    train.main([*small, "1", "--out", str(tmp_path / "b"), "--eval-every", "2"])
    train.main(["--resume", str(tmp_path / "b"), "--steps", "2"])
    (a, a_rows), (b, b_rows) = state(tmp_path / "a"), state(tmp_path / "b")
    assert equal(a, b) and a_rows[2] == b_rows[2] and float(a_rows[2]["grad_norm"]) > 0
    assert a["optimizer"]["steps"] == 2 and a["optimizer"]["moments"][0].dtype == torch.bfloat16
    moved = [(a["model"][k] - v).abs().max() for k, v in saved["model"].items()]
    assert 1e-7 < max(moved) < 1e-2           # two steps of 1e-6, and what bf16 cut off


def test_export_says_what_is_wrong_and_writes_both_or_none(whole, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    for flags, words in ((["--export", str(tmp_path / "new")], "add --resume RUN"),
                         (["--export", str(tmp_path / "there"), "--resume", str(whole[0])],
                          "there is already there: name a new folder"),
                         (["--export", str(tmp_path / "new"), "--resume", str(whole[0]), "--steps",
                           "0", "--outliers", "64"], "its model is not exported")):
        with pytest.raises(ValueError, match=words):
            train.main(flags)
    save = train.checkpoint.save_file

    def full(shard, path, metadata):
        if "nvfp4" in str(path):
            raise train.SafetensorError("No space left on device")
        save(shard, path, metadata)

    monkeypatch.setattr(train.checkpoint, "save_file", full)
    with pytest.raises(OSError, match="new cannot be written: No space left"):
        train.main(["--export", str(tmp_path / "new"), "--resume", str(whole[0])])
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(train.checkpoint, "save_file", save)
    train.main(["--export", str(tmp_path / "new"), "--resume", str(whole[0])])      # and now it can
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"bf16", "nvfp4"}
    assert not (tmp_path / "new.tmp").exists()


def test_other_activations_choose_racs_blocks_anew(whole):
    """Evaluated with --outliers or other --data, the blocks of the run would be the wrong ones."""
    resume = ["--resume", str(whole[0]), "--steps", "0"]
    for flags, kept in (([], True), (["--eval-problems", "4"], True), (["--outliers", "64"], False),
                        (["--outlier-blocks", "2"], False)):
        run = train.Run(*train.settings(resume + flags))
        assert bool(run.rollout.energy) == kept
    run = train.Run(*train.settings(resume + ["--outliers", "64"]))
    run.rollout.sync([run.prompt(p) for p in run.problems("train", "calibration", 32)])
    assert all(blocks.tolist() == [0, 2, 4, 6] for blocks in run.rollout.blocks.values())


def test_batches_made_ahead_are_the_same_batches(tmp_path, monkeypatch):
    """By 0 and by 2 processes: the same order, the same weights."""
    rows = (ROOT / "tests" / "gsm8k_sample.jsonl").read_text(encoding="utf-8")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    weights, workers, loader = [], [], torch.utils.data.DataLoader
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda *a, num_workers, **k: workers.append(
        num_workers) or loader(*a, num_workers=num_workers, **k))
    for cores in (1, 3):
        monkeypatch.setattr(train.os, "cpu_count", lambda: cores)
        s, _ = train.settings(["--data", str(tmp_path), "--device", "cpu", "--threads", "1",
                               "--sft-steps", "4", "--sft-batch", "3", "--out", str(tmp_path)])
        run = train.Run(s, None)
        run.sft_step = 1                                             # as after a resume
        train.warm_up(run, [])
        weights.append(run.model.state_dict())
    assert workers == [0, 2] and run.sft_step == 4 and equal(*weights)


def test_a_relative_folder_is_the_same_one_when_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    rows = (ROOT / "tests" / "gsm8k_sample.jsonl").read_text(encoding="utf-8")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows, encoding="utf-8")
    relative = os.path.relpath(tmp_path)
    s, _ = train.settings(["--data", relative, "--device", "cpu", "--out", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    run = train.Run(s, None)
    run.save()
    again, _ = train.settings(["--resume", str(tmp_path / "run"), "--data", relative])
    assert again.data == s.data == str(tmp_path)


# --- exact resume (RL.md 4.23) -------------------------------------------------------------------

def test_kill_9_and_resume_equals_an_uninterrupted_run(whole, tmp_path):
    """4 steps = 2 or 3, kill -9, resume: weights, optimizer, RAC, problems, samples, metrics."""
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-u", "train.py", *TINY, "--out", out], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith("step   3"):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL
    saved, _ = state(out)
    assert saved["step"] in (2, 3)
    with open(out / "metrics.csv", "a") as f:
        f.write("9,0.5\n")                          # a row that the checkpoint does not know
    done = subprocess.run([sys.executable, "train.py", "--resume", out], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (a, a_rows), (b, b_rows) = state(whole[0]), state(out)
    assert a["step"] == 4 and equal(a, b) and equal(a_rows, b_rows)
    assert rows_of(whole[0]) == rows_of(out)


@pytest.mark.parametrize("line", ["warm-up", "step   1"])
def test_ctrl_c_finishes_the_step_saves_and_resumes_exactly(whole, tmp_path, line):
    out = tmp_path / "stopped"
    process = subprocess.Popen([sys.executable, "-u", "train.py", *TINY, "--out", out], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if line == "warm-up":
        while not (out / "config.json").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        for text in process.stdout:
            if text.startswith("run "):
                break
        time.sleep(0.3)
    else:
        for text in process.stdout:
            if text.startswith(line):
                break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "saved: go on with" in errors and "Traceback" not in errors
    saved, _ = state(out)
    assert (saved["sft_step"] < 30) if line == "warm-up" else (1 <= saved["step"] < 4)
    train.main(["--resume", str(out)])
    (a, a_rows), (b, b_rows) = state(whole[0]), state(out)
    assert equal(a, b) and equal(a_rows, b_rows)


def test_problems_depend_on_the_seed_and_the_label_only(tmp_path):
    a, b = run_from(tmp_path / "a"), run_from(tmp_path / "b", "--seed", "1")
    assert a.problems("train", "step 3", 4) == a.problems("train", "step 3", 4)
    assert a.problems("train", "step 3", 4) != a.problems("train", "step 4", 4)
    assert a.problems("train", "step 3", 4) != b.problems("train", "step 3", 4)


# --- the update ----------------------------------------------------------------------------------

def sampled(run, group=4):
    """A batch as grpo_step makes it, with rewards that differ within the groups."""
    problems = run.problems("train", "test", 4)
    prompts = [run.prompt(p) for p in problems]
    run.rollout.sync(prompts)
    ids, mask, logp = run.rollout.generate(prompts, group, 16, 1.0, seed=5)
    adv = torch.tensor([1.0, -1, 0.5, -0.5] * 3 + [0.0] * 4)     # the last group teaches nothing
    return [p for p in prompts for _ in range(group)], ids, mask, logp, adv


def test_gradient_does_not_depend_on_micro_batches(tmp_path, monkeypatch):
    """RL.md 4.9, through the real update and model, in fp32."""
    gradients = []
    for i, tokens in enumerate((100_000, 400, 130, 1)):
        run = run_from(tmp_path / str(i), "--recipe", "bf16")
        batch = sampled(run)
        monkeypatch.setattr(train, "micro_tokens", lambda s, config: tokens)
        monkeypatch.setattr(run.optimizer, "step", lambda: gradients.append(
            torch.cat([p.grad.flatten().clone() for p in run.model.parameters()])))
        metrics = train.update(run, *batch)
        assert metrics["grad_norm"] > 0
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() <= 1e-5 * gradients[0].norm()


def test_groups_of_equal_rewards_teach_nothing_but_are_monitored(tmp_path):
    run = run_from(tmp_path / "run")
    prompts, ids, mask, logp, adv = sampled(run)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    metrics = train.update(run, prompts, ids, mask, logp, torch.zeros_like(adv))
    assert equal(before, dict(run.model.state_dict())) and metrics["grad_norm"] == 0
    assert metrics["gap_mean"] > 0 and metrics["entropy"] > 0    # quads: a small gap, not none


def test_both_sides_agree_again_after_a_large_step(tmp_path):
    """RL.md 4.11 and 4.13: no stale weights and no stale cache in the rollout."""
    run = run_from(tmp_path / "run", "--recipe", "bf16", "--lr", "0.02", "--sft-steps", "0")
    batch = sampled(run)
    assert train.update(run, *batch)["gap_max"] < 1e-4
    prompts, ids, mask, old, _ = batch
    assert (sequence_logp(run.model, prompts, ids, mask, 1.0)[0] - old)[mask].abs().max() > 1e-2
    assert train.update(run, *sampled(run))["gap_max"] < 1e-4


def test_a_cut_answer_earns_nothing(tmp_path):
    run = run_from(tmp_path / "run")
    ids, end = run.tokenizer.encode_ordinary("#### 18"), run.model.config.end_id
    assert run.grade([*ids, end], {"answer": "#### 18"}) == ("#### 18", 1, False)
    assert run.grade(ids, {"answer": "#### 18"}) == ("#### 18", 0, True)
    assert run.grade([], {"answer": "#### 18"})[1:] == (0, True)


def test_corrections_are_wired_to_the_loss(tmp_path, monkeypatch):
    """With tis and mask the ratio is against the trainer itself: only the weights see the gap."""
    clipped = {}
    for correction in ("none", "tis", "mask"):
        run = run_from(tmp_path / correction, "--recipe", "nvfp4", "--correction", correction)
        for p in run.model.parameters():
            p.data.mul_(3)                                       # a gap wide enough to clip
        clipped[correction] = train.update(run, *sampled(run))["clip_fraction"]
    assert clipped["none"] > 0 and clipped["tis"] == clipped["mask"] == 0


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(tmp_path, monkeypatch):
    run = run_from(tmp_path / "run")
    batch = sampled(run)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: torch.tensor(float("nan")))
    with pytest.raises(ValueError, match="gradient of step 1 is not finite"):
        train.update(run, *batch)
    assert equal(before, dict(run.model.state_dict()))


# --- bad input: one sentence, before work is lost ------------------------------------------------

def command(*flags):
    return subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)


@pytest.mark.parametrize("flags, words", [
    (["--recipe", "nvfp5"], "invalid choice: 'nvfp5'"),
    (["--recipy", "quads"], "unrecognized arguments: --recipy"),
    (["--rec", "quads"], "unrecognized arguments"),
    (["--steps", "-1"], "steps = -1 is out of range"),
    (["--rac-ratio", "1.5"], "--rac-ratio, --rac-coverage must be 0 to 1; got 1.5, 0"),
    (["--group", "0"], "group = 0 is out of range"),
    (["--lr", "nan"], "lr = nan is out of range"),
    (["--resume", ""], "there is no checkpoint.pt"),
    (["--data", "/no/such/folder"], "/no/such/folder"),
    (["--out", "/proc/self/status/run"], "/proc/self/status/run"),
    (["--resume", "/no/such/run"], "there is no /no/such/run/checkpoint.pt"),
])
def test_bad_flags(flags, words, tmp_path, capsys):
    out = [] if "--out" in flags or "--resume" in flags else ["--out", str(tmp_path / "run")]
    with pytest.raises((ValueError, OSError, SystemExit)) as error:
        train.main(["--device", "cpu", *flags, *out])
    assert words in str(error.value) + capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_an_error_is_one_sentence_of_the_command(tmp_path):
    done = command("--device", "cpu", "--steps", "-1", "--out", str(tmp_path / "run"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: steps = -1 is out of range: from 0 to below 1e9.\n"


def test_an_evaluation_never_trains_or_writes(tmp_path, capsys):
    """Also of a run that was stopped in its warm-up: it must not go on under other settings."""
    out = tmp_path / "run"
    run = run_from(out)
    out.mkdir()
    run.sft_step = 3
    run.save()
    before = (out / "checkpoint.pt").read_bytes()
    train.main(["--resume", str(out), "--steps", "0", "--recipe", "bf16", "--eval-problems", "4"])
    assert "evaluation after step 0" in capsys.readouterr().out
    assert (out / "checkpoint.pt").read_bytes() == before and len(list(out.iterdir())) == 1


def test_a_run_without_warm_up_can_be_resumed_after_its_first_evaluation(tmp_path):
    out = tmp_path / "run"
    train.main([*TINY, "--sft-steps", "0", "--steps", "0", "--out", str(out)])
    train.main(["--resume", str(out), "--steps", "1", "--eval-problems", "4"])
    assert [row["step"] for row in rows_of(out)] == ["0", "1"]


def test_a_warm_up_that_diverges_saves_nothing(tmp_path):
    with pytest.raises(ValueError, match="smaller --sft-lr"):
        train.main([*TINY, "--sft-steps", "4", "--sft-lr", "1e8", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_answers_that_cannot_fit_are_refused_before_the_warm_up(tmp_path):
    with pytest.raises(ValueError, match="the context has 1024: remove it, or lower --max-new"):
        train.main([*TINY, "--max-new-tokens", "1000", "--out", str(tmp_path / "run")])


def test_a_full_disk_is_one_sentence(tmp_path):
    def full(temporary):
        raise RuntimeError("inline_container.cc: file write failed")
    with pytest.raises(OSError, match="checkpoint.pt cannot be written"):
        train.save_file(tmp_path / "checkpoint.pt", full)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU here: use --device cpu"):
        train.settings(["--device", "cuda"])


def test_bad_data_rows_are_found_before_the_warm_up(tmp_path):
    good = json.dumps({"question": "Tom has 3 pens and buys 4. How many?",
                       "answer": "He has 3+4=<<3+4=7>>7.\n#### 7"})
    for name, text, words in (("empty", "", "is empty: use"), ("json", good + "\n{", "line 2"),
                              ("long", good.replace("Tom", "Tom " * 2000), "the context has 1024")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.jsonl").write_text(text)
        (folder / "test.jsonl").write_text(good)
        with pytest.raises((ValueError, OSError), match=words):
            train.main([*TINY, "--data", str(folder), "--out", str(folder / "run")])
    (folder / "test.jsonl").unlink()
    (folder / "train.jsonl").write_text(good)
    with pytest.raises(OSError, match="test.jsonl"):
        train.main([*TINY, "--data", str(folder), "--out", str(folder / "run")])


def test_a_run_folder_is_not_used_twice(whole):
    """RL.md 4.28."""
    out, _ = whole
    before = (out / "config.json").read_bytes()
    with pytest.raises(ValueError, match="already holds a run: --resume"):
        train.main([*TINY, "--seed", "1", "--out", str(out)])
    assert (out / "config.json").read_bytes() == before


@pytest.mark.parametrize("flags", [["--recipe", "bf16"], ["--lr", "1"], ["--preset", "gpu"],
                                   ["--seed", "3"], ["--data", "hub"]])
def test_a_checkpoint_of_other_settings_is_refused(whole, flags):
    with pytest.raises(ValueError, match=f"has {flags[0][2:]} = .*, not {flags[1]}"):
        train.settings(["--resume", str(whole[0]), *flags])
    train.settings(["--resume", str(whole[0]), "--steps", "9", "--eval-every", "3"])    # may change


def test_truncated_and_foreign_checkpoints(whole, tmp_path):
    path, good = tmp_path / "checkpoint.pt", (whole[0] / "checkpoint.pt").read_bytes()
    for bad in (b"", good[:100], good[:len(good) // 2], good[:-40], b"text"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="cannot be read"):
            train.settings(["--resume", str(tmp_path)])
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="not written by this program"):
        train.settings(["--resume", str(tmp_path)])


def test_a_crash_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train.save_file(path, fail)
    assert path.read_text() == "old"
