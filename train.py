"""The main job: a small Mixture-of-Experts model learns word problems by GRPO, sampled in NVFP4.

    python train.py                                # CPU, offline, 4 minutes on two cores
    python train.py --recipe nvfp4                 # an ablation is one word (see qat.RECIPES)
    python train.py --data FOLDER                  # GSM8K: FOLDER/train.jsonl and test.jsonl
    python train.py --init FOLDER_OR_HUB_ID        # a Qwen3-MoE checkpoint instead of a new model
    python train.py --resume runs/quads-seed0      # go on exactly where it stopped
    python train.py --resume runs/quads-seed0 --steps 0 --recipe fp8     # evaluate in another one
    python train.py --resume runs/quads-seed0 --export FOLDER            # for vLLM and SGLang

The loop in five words: sync, rollout, reward, update, log. Before it a new model gets a supervised
warm-up, because one bit of reward an answer cannot teach arithmetic. On home-made problems most of
its demonstrations are *sloppy*: well calculated, but the last step is missing, or a subtraction is
done as an addition. So the model learns the arithmetic, and GRPO then selects the careful answers.
"""
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm

import checkpoint
import gsm8k
import grpo
import qat
from moe import Config, MoETransformer
from nvfp4 import kernel_path
from rollout import Rollout, micro_batches, sequence_logp
from start import begin, build, data, fits, micro_tokens, save_file, settings

SHOWN = ("reward gap_mean gap_max router_agreement entropy grad_norm answer_tokens truncated "
         "zero_std_groups rollout_tok_s step_s").split()     # after each step; gaps in nats


class Run:
    """All that a checkpoint holds. s: settings; saved: a checkpoint, or None for a new run."""

    def __init__(self, s, saved):
        self.s, self.out = s, Path(s.out)
        # GSM8K: training rows, to be given fresh numbers, and test rows, used as they are.
        self.pool, self.official, rows = data(s)
        self.sft_step, self.step, self.rows = 0, 0, []      # steps done; rows of metrics.csv
        if saved:
            self.sft_step, self.step, self.rows = saved["sft_step"], saved["step"], saved["rows"]
        config, self.tokenizer, self.prompt = begin(s, saved, rows)
        self.memory = fits(s, config, self.tokenizer, self.prompt, rows + self.official)
        self.model = build(s, config, saved)
        self.rollout = Rollout(self.model, s.recipe, s.rac_ratio, s.rac_coverage)
        self.new_optimizer()
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            # (With other data or outliers RAC's blocks are chosen anew, on calibration prompts.)
            own = {"outliers": 0, "outlier_blocks": s.outlier_blocks} | saved["settings"]
            if all(own[k] == vars(s)[k] for k in ("data", "outliers", "outlier_blocks")):
                self.rollout.energy = {k: e.to(s.device) for k, e in saved["energy"].items()}

    def new_optimizer(self):
        """AdamW for the phase that comes next, warm-up or GRPO."""
        lr, beta2, decay = (self.s.sft_lr, 0.95, 0.1) if self.sft_step < self.s.sft_steps else \
                           (self.s.lr, 0.99, 0.0)
        optimizer = qat.BF16AdamW if self.s.init else torch.optim.AdamW
        self.optimizer = optimizer(self.model.parameters(), lr, (0.9, beta2), weight_decay=decay)

    def save(self):
        saved = dict(format="quads-1", settings=vars(self.s), config=asdict(self.model.config),
                     sft_step=self.sft_step, step=self.step, rows=self.rows,
                     tokenizer="" if self.s.init else gsm8k.tokenizer_to_json(self.tokenizer),
                     energy=self.rollout.energy,
                     model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        save_file(self.out / "checkpoint.pt", lambda path: torch.save(saved, path))

    def problems(self, split, label, n):
        """n fresh problems. Drawn by label, not in sequence: a resumed run draws the same ones."""
        rng = random.Random(f"{self.s.seed} {label}")
        return [gsm8k.fresh(split, rng, self.pool) for _ in range(n)]

    def log(self, row):
        """Adds a row to metrics.csv and, if it holds an evaluation, draws curves.png."""
        self.rows.append(row)
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [names] + [[str(row.get(name, "")) for name in names] for row in self.rows]
        text = "".join(",".join(line) + "\n" for line in lines)
        save_file(self.out / "metrics.csv", lambda path: path.write_text(text))
        if "solved" in row:
            figure = grpo.curves(self.rows, f"{self.s.recipe}, {self.s.data}, seed {self.s.seed}")
            save_file(self.out / "curves.png", lambda path: figure.savefig(path, format="png"))

    def grade(self, ids, problem):
        """One answer's ids -> (text, reward, whether it was cut off). A cut answer earns 0: it
        might have gone on ("#### 18" may be the head of "#### 180")."""
        cut = not ids or ids[-1] != self.model.config.end_id
        text = self.tokenizer.decode(ids if cut else ids[:-1], errors="replace")
        return text, 0 if cut else gsm8k.grade(text, problem["answer"]), cut


def export_run(saved, folder):
    """Writes folder/bf16 and folder/nvfp4, both or none, for vLLM and SGLang. saved: a checkpoint
    of a run. Raises ValueError as checkpoint.export does, OSError if the disk is full."""
    model = MoETransformer(Config(**saved["config"]))
    model.load_state_dict(saved["model"])
    source = saved["settings"].get("init") or gsm8k.tokenizer_from_json(saved["tokenizer"])
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for precision in ("bf16", "nvfp4"):
            checkpoint.export(model, source, temporary / precision, precision)
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}.") from error
    temporary.rename(folder)
    print(f"{folder}/bf16 and {folder}/nvfp4: the model after GRPO step {saved['step']}")


# --- Warm-up, evaluation, one GRPO step ---------------------------------------------------------

def demonstrations(run, step):
    """Batch number `step` of the warm-up: B prompts and B answers, as lists of ids."""
    problems = run.problems("train", f"warm-up {step}", run.s.sft_batch)
    rng = random.Random(f"{run.s.seed} demonstrations {step}")
    answers = [run.tokenizer.encode_ordinary(gsm8k.demonstration(problem, rng, run.s.sloppy))
               + [run.model.config.end_id] for problem in problems]
    return [run.prompt(problem) for problem in problems], answers


def warm_up(run, stopping):
    """Supervised steps on demonstrations, in full precision, with the loss on the answers only."""
    s = run.s
    # Fresh numbers for a row of GSM8K take milliseconds, which a GPU would wait for: CPU cores that
    # train nothing make batches ahead, each alone. (Ctrl-C is for this process, not for them.)
    ahead = max(0, min(8, os.cpu_count() - (s.threads or 1))) if run.pool else 0
    batches = torch.utils.data.DataLoader(
        range(run.sft_step, s.sft_steps), batch_size=None, collate_fn=partial(demonstrations, run),
        num_workers=ahead, multiprocessing_context="fork" if ahead else None,
        worker_init_fn=lambda _: signal.signal(signal.SIGINT, signal.SIG_IGN))
    for prompts, answers in tqdm(batches, desc="warm-up", disable=None):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(a) for a in answers], True, -1)
        ids, mask = ids.clamp(min=0).to(s.device), (ids >= 0).to(s.device)        # (B, T) each
        logp, _, _ = sequence_logp(run.model, prompts, ids, mask, 1.0)
        loss = -logp.sum() / mask.sum()
        (loss + 0.01 * run.model.balance_loss()).backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.param_groups[0]["lr"] = s.sft_lr * (1 - 0.9 * run.sft_step / s.sft_steps)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.sft_step += 1
        if run.sft_step == s.sft_steps:
            run.new_optimizer()
        if run.sft_step % 200 == 0 or run.sft_step == s.sft_steps or stopping:
            tqdm.write(f"warm-up {run.sft_step:5d} of {s.sft_steps}  loss {loss.item():.3f}")
            if not loss.isfinite():
                raise ValueError("the warm-up diverged: start a new run with a smaller --sft-lr.")
            run.save()
        if stopping:
            return


def solve(run, rollout, problems):
    """The greedy answer to each problem: a list of (text, reward, cut)."""
    results = []
    for i in range(0, len(problems), 256):
        part = problems[i:i + 256]
        ids, mask, _ = rollout.generate([run.prompt(p) for p in part], 1, run.s.max_new_tokens,
                                        0.0, seed=0, measure=False)               # (256, T) each
        results += [run.grade(row[m].tolist(), p) for row, m, p in zip(ids, mask, part)]
    return results


def evaluate(run, held_out, official, examples=1):
    """Greedy pass@1: as deployed, with BF16 experts and, if asked for, on GSM8K's test split."""
    plain, accuracy, words, answers = Rollout(run.model, "bf16"), {}, [], {}
    run.rollout.sync()
    plain.sync()
    for name, rollout, problems in (("solved", run.rollout, held_out),
                                    ("solved_bf16", plain, held_out),
                                    ("official", run.rollout, run.official * official)):
        if problems:
            answers[name] = solve(run, rollout, problems)
            rewards = torch.tensor([float(reward) for _, reward, _ in answers[name]])     # (n,)
            accuracy[name] = rewards.mean().item()
            error = grpo.standard_error(rewards)
            words.append(f"{name} {accuracy[name]:.3f} +- {error:.3f} of {len(problems)}")
    tqdm.write(f"evaluation after step {run.step}: " + ", ".join(words))
    for problem, (text, reward, _) in zip(held_out[:examples], answers["solved"]):
        tqdm.write(f"  e.g. {problem['question']}\n    -> {' / '.join(text.splitlines())}   "
                   f"reward {reward}")
    return accuracy


def update(run, prompts, ids, mask, logp_rollout, adv):
    """One optimizer step on B answers. ids, mask, logp_rollout: (B, T); adv: (B,)."""
    s, start = run.s, time.perf_counter()
    # Groups of equal rewards have advantage 0 and teach nothing: they are left out of the gradient
    # and of the token count, but not out of the monitors.
    learn, clip_fraction = adv != 0, 0.0                                          # (B,)
    token_count = int(mask[learn].sum())
    logp_train, entropy = torch.zeros_like(logp_rollout), torch.zeros_like(logp_rollout)
    routes = torch.zeros_like(run.rollout.routes)                                 # (B, T, L, A)
    for part, T in micro_batches(prompts, mask, micro_tokens(s, run.model.config), ~learn):  # (b,)
        m, old = mask[part, :T], logp_rollout[part, :T]                           # (b, T) each
        with torch.set_grad_enabled(bool(learn[part].any())):
            logp, entropy[part, :T], routes[part, :T] = sequence_logp(
                run.model, [prompts[i] for i in part.tolist()], ids[part, :T], m, s.temperature)
        logp_train[part, :T] = logp.detach()                                      # (b, T)
        if logp.requires_grad:
            # The ratio is taken against the rollout, so that it holds the gap between the sides;
            # with a correction the weights hold the gap, and the ratio only what updates change.
            weights = grpo.correction_weights(logp, old, m, s.correction)         # (b, T)
            old = old if s.correction == "none" else logp.detach()
            loss, parts = grpo.policy_loss(logp, old, adv[part], m, 0.2, s.clip_high, token_count,
                                           weights)
            loss.backward()
            clip_fraction += float(parts["clip_fraction"])
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0).item()
    if not grad_norm < float("inf"):
        raise ValueError(f"the gradient of step {run.step + 1} is not finite, and the weights are "
                         "as before: start a new run with a smaller --lr.")
    run.optimizer.step()                    # does nothing if no group taught anything
    run.model.zero_grad()
    return {**grpo.mismatch(logp_train, logp_rollout, mask), "grad_norm": grad_norm,
            "router_agreement": grpo.router_agreement(routes, run.rollout.routes, mask),
            "entropy": (entropy.sum() / mask.sum()).item(), "clip_fraction": clip_fraction,
            "train_tok_s": int(mask.sum()) / (time.perf_counter() - start)}


def grpo_step(run):
    """One step. Returns a row of metrics.csv."""
    s, start = run.s, time.perf_counter()
    step, R = run.step + 1, s.prompts * s.group
    # ----- sync and rollout: `group` answers to each problem, in the recipe's precision -----
    run.rollout.sync()
    synced = time.perf_counter()
    problems = run.problems("train", f"step {step}", s.prompts)
    prompts = [run.prompt(problem) for problem in problems]
    ids, mask, logp = run.rollout.generate(prompts, s.group, s.max_new_tokens, s.temperature,
                                           (s.seed << 32) + step * R)             # (R, T) each
    generated = time.perf_counter()
    # ----- reward: 1 for the right number after the last ####, else 0 -----
    graded = [run.grade(ids[r][mask[r]].tolist(), problems[r // s.group]) for r in range(R)]
    rewards = torch.tensor([float(reward) for _, reward, _ in graded], device=ids.device)
    adv = grpo.advantages(rewards.view(s.prompts, s.group))                       # (P, G)
    # ----- update: one step of AdamW on exactly the sampled ids -----
    prompts = [p for p in prompts for _ in range(s.group)]                        # R of them
    row = update(run, prompts, ids, mask, logp, adv.flatten())
    # ----- log -----
    # (Of the process, on a CPU: Linux counts in KB, macOS in bytes.)
    memory = torch.cuda.max_memory_allocated() if s.device == "cuda" else \
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 ** (sys.platform != "darwin"))
    row.update(step=step, reward=rewards.mean().item(), answer_tokens=int(mask.sum()) / R,
               zero_std_groups=(adv == 0).all(1).float().mean().item(),
               truncated=sum(cut for _, _, cut in graded) / R, peak_gb=memory / 1e9,
               sync_s=synced - start, rollout_tok_s=int(mask.sum()) / (generated - synced),
               step_s=time.perf_counter() - start)
    run.step = step
    much = [f"  {k} is above 0.8!" for k in ("truncated", "zero_std_groups") if row[k] > 0.8]
    tqdm.write(f"step {step:3d}  " + " ".join([f"{k} {row[k]:<6.4g}" for k in SHOWN] + much))
    return row


def main(argv=None):
    sys.stdout.reconfigure(errors="replace")    # a model may write what a terminal cannot
    s, saved = settings(argv)
    if s.export:
        return export_run(saved, Path(s.export))
    out = Path(s.out)
    if not saved and any((out / name).exists() for name in ("checkpoint.pt", "metrics.csv")):
        raise ValueError(f"{out} already holds a run: --resume {out}, or choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    if s.steps or not saved:                # also fails now if the folder cannot be written
        save_file(out / "config.json", lambda path: path.write_text(json.dumps(vars(s), indent=1)))
    # A fixed number, so that sums go in the same order everywhere.
    torch.set_num_threads(min(s.threads, os.cpu_count()) or torch.get_num_threads())
    run, stopping = Run(s, saved), []
    for name, text in (
            ("device", torch.cuda.get_device_name() if s.device == "cuda" else "CPU"
             + ("" if torch.cuda.is_available() else ", because PyTorch sees no GPU")),
            ("threads", torch.get_num_threads()),
            ("data", f"{s.data}: {len(run.pool)} GSM8K problems, given fresh numbers, and "
             f"{len(run.official)} official ones" if run.pool else "home-made problems, offline"),
            ("model", f"{s.init or s.preset}: {run.model.size() / 1e6:.2f}M parameters, "
             f"{run.tokenizer.n_vocab} tokens, computing in {run.model.dtype}"),
            ("memory", run.memory),
            ("recipe", "{}: rollout {}, trainer's QAT {}".format(s.recipe, *qat.RECIPES[s.recipe])),
            ("path", "NVFP4 {}, because {}; FP8 emulated".format(*kernel_path(s.device))),
            ("run", f"{out}, after warm-up step {run.sft_step} and GRPO step {run.step}")):
        print(f"{name:8} {text}")

    def stop(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stopping.append(True)
        tqdm.write("stopping: this step is finished and saved first; Ctrl-C again stops at once")
    signal.signal(signal.SIGINT, stop)

    evaluating = saved and s.steps == 0     # nothing is trained then, and nothing written
    if run.sft_step < s.sft_steps and not evaluating:
        warm_up(run, stopping)
    run.model.set_qat(qat.RECIPES[s.recipe][1])
    held_out = run.problems("test", "held out", s.eval_problems)
    if not run.rollout.energy:                      # RAC's first blocks are chosen on some prompts
        run.rollout.sync([run.prompt(p) for p in run.problems("train", "calibration", 32)])
    if evaluating:
        return evaluate(run, held_out, True, examples=5)
    if not run.rows and not stopping:
        run.log({"step": 0, **evaluate(run, held_out, True)})
        run.save()
    for step in tqdm(range(run.step, s.steps), desc="GRPO", disable=None):
        if stopping:
            break
        row = grpo_step(run)
        last = run.step == s.steps
        if last or run.step % s.eval_every == 0:
            row.update(evaluate(run, held_out, last))
        run.log(row)
        if last or stopping or run.step % s.save_every == 0:
            run.save()
    if stopping:
        sys.exit(f"stopped and saved: go on with python train.py --resume {run.out}")
    print(f"done: see {run.out}/curves.png and metrics.csv")


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as error:
        sys.exit(f"error: {error} Halve --prompts or --group; the last checkpoint stands.")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped at once; the last checkpoint, if there is one, stands (see --resume)")
