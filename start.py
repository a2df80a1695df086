"""How a run starts: its flags, files, data, prompt and model, and whether all that fits.

A run is a folder. config.json holds its settings, checkpoint.pt all that `--resume` needs.

With `--init` the model is somebody else's. Its chat template writes the prompt, as `transformers`
would: one message of the user, the generation prompt, no thinking (a thinking answer does not fit
into 256 tokens). A base model has no template and gets the plain prompt. Both are asked for the
last line that earns a reward. (Weights and tokenizers of such checkpoints: see checkpoint.py.)
"""
import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import jinja2                       # comes with torch, as huggingface_hub does with datasets
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

import gsm8k
import qat
from checkpoint import load_weights, read_config, read_json, tokenizer_from_hf
from moe import PRESETS, Config, MoETransformer

REQUEST = "\nCalculate step by step. Write the result into a last line of its own, as #### N."
MICRO_TOKENS = {"cpu": 4096, "cuda": 65536}        # tokens of one forward and backward pass
QUANTIZE = 27                                      # bytes a value at the peak of nvfp4.quantize


# --- Settings, a flag each: defaults with the presets cpu and gpu, choices or lowest value --------
SETTINGS = {
    "recipe":         ("quads", "quads", list(qat.RECIPES), "precision of both sides"),
    "preset":         ("cpu", "gpu", list(PRESETS), "size of a new model, by default by device"),
    "init":           ("", "", None, "folder or Hub id of a Qwen3-MoE checkpoint to start from"),
    "export":         ("", "", None, "new folder for the model of --resume, in BF16 and in NVFP4"),
    "data":           ("builtin", "hub", None, "builtin, hub (GSM8K, Hugging Face) or a folder"),
    "seed":           (0, 0, 0, "of the weights, the problems and the samples"),
    "device":         ("cpu", "cuda", ["cpu", "cuda"], "by default cuda if there is one"),
    "threads":        (2, 0, 0, "CPU threads, at most what there is; 0: PyTorch's own choice"),
    "out":            ("", "", None, "folder of the run, by default runs/RECIPE-seedN"),
    "sft_steps":      (700, 6000, 0, "supervised steps before GRPO"),
    "sft_batch":      (16, 64, 1, "demonstrations a warm-up step"),
    "sft_lr":         (3e-3, 1e-3, 0, "learning rate of the warm-up; falls linearly to a tenth"),
    "sloppy":         (0.7, 0.0, 0, "chance that a demonstration is careless; 0 on GSM8K"),
    "steps":          (50, 100, 0, "GRPO steps in all; 0 stops after an evaluation"),
    "prompts":        (32, 64, 1, "problems a step"),
    "group":          (8, 16, 2, "answers to each problem"),
    "lr":             (3e-4, 3e-5, 0, "learning rate of GRPO"),
    "temperature":    (1.0, 1.0, 1e-3, "of the sampled answers"),
    "max_new_tokens": (64, 256, 1, "longest answer, a cut one earns 0; 256 on GSM8K"),
    "rac_ratio":      (0.5, 0.5, 0, "share of the blocks that get RAC's second pass"),
    "rac_coverage":   (0.0, 0.0, 0, "if not 0: the blocks with this share of the residual instead"),
    "correction":     ("none", "none", ["none", "tis", "mask"], "importance weights for the gap"),
    "outliers":       (0, 0, 0, "some channels so many times larger, as large models have; 0: off"),
    "outlier_blocks": (4, 16, 1, "of the 16-blocks of an expert's input, so many hold one"),
    "clip_high":      (0.2, 0.2, 0, "the ratio is clipped to 0.8 .. 1 + this"),
    "eval_every":     (10, 20, 1, "steps between evaluations"),
    "eval_problems":  (256, 512, 2, "held-out problems an evaluation"),
    "save_every":     (1, 10, 1, "steps between checkpoints"),
}
MAY_CHANGE = "steps eval_every eval_problems save_every device threads export".split()    # --resume
MAY_CHANGE_IF_0_STEPS = ["recipe", "rac_ratio", "rac_coverage", "max_new_tokens", "data",
                         "outliers", "outlier_blocks"]


def settings(argv):
    """Flags -> (settings, checkpoint or None). Raises ValueError where they make no sense."""
    parser = argparse.ArgumentParser(description="GRPO with an NVFP4 rollout", allow_abbrev=False)
    for name, (cpu, gpu, limit, text) in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(cpu),
                            choices=limit if isinstance(limit, list) else None,
                            help=f"{text} ({cpu})" if cpu == gpu else f"{text} ({cpu}, gpu: {gpu})")
    parser.add_argument("--resume", help="folder of a run to go on with; --steps 0 evaluates it")
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    if given.get("data", "hub") not in ("builtin", "hub"):
        given["data"] = str(Path(given["data"]).resolve())
    if given.get("init"):
        given["init"] = find(given["init"])
    resume, saved = given.pop("resume", None), None
    if resume is not None:
        saved = load_checkpoint(Path(resume) / "checkpoint.pt")
        own = {**{k: v[0] for k, v in SETTINGS.items()}, **saved["settings"], "out": resume}
        s = {**own, **given}
        free = MAY_CHANGE + MAY_CHANGE_IF_0_STEPS * (s["steps"] == 0)
        for k in [k for k in given if k not in free and s[k] != own[k]]:
            raise ValueError(f"the run in {resume} has {k} = {own[k]}, not {s[k]}: leave the flag "
                             "out, or start a new run (--steps 0 evaluates this one with another "
                             f"{', '.join(MAY_CHANGE_IF_0_STEPS)}).")
    else:
        device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        preset = given.get("preset") or ("gpu" if device == "cuda" else "cpu")
        s = {k: v[preset == "gpu"] for k, v in SETTINGS.items()}
        s.update(device=device, data="hub" if device == "cuda" else "builtin")
        home_made = given.get("data", s["data"]) == "builtin"
        s.update(sloppy=0.7 if home_made else 0.0, max_new_tokens=64 if home_made else 256)
        if given.get("init"):           # a trained model: no warm-up, and small steps
            s.update(sft_steps=0, lr=1e-6, max_new_tokens=256)
        s.update(given)
        if s["init"] and s["sft_steps"]:
            raise ValueError("--init takes a trained model, without warm-up: drop --sft-steps.")
        s["out"] = s["out"] or f"runs/{s['recipe']}-seed{s['seed']}"
    if s["export"]:
        if saved is None:
            raise ValueError("--export writes the model of a run: add --resume RUN.")
        if Path(s["export"]).exists():
            raise ValueError(f"--export {s['export']} is already there: name a new folder.")
        if s["outliers"]:
            raise ValueError("a run with --outliers is a test, and its model is not exported: the "
                             "exported NVFP4 weights would not be those of the rollout.")
    for k, (_, _, limit, _) in SETTINGS.items():
        if isinstance(limit, (int, float)) and not limit <= s[k] < 1e9:
            raise ValueError(f"{k} = {s[k]} is out of range: from {limit} to below 1e9.")
    if s["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch sees no GPU here: use --device cpu.")
    return argparse.Namespace(**s), saved


# --- Its files -----------------------------------------------------------------------------------

def save_file(path, save):
    """Let save(temporary path) write a file, then rename it: a crash leaves the old one intact."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        save(temporary)
    except RuntimeError as error:                # torch.save's way to say that the disk is full
        raise OSError(f"{path} cannot be written: {error}") from error
    os.replace(temporary, path)


SAVED = {"settings", "config", "sft_step", "step", "rows", "tokenizer", "energy", "model",
         "optimizer"}                              # what Run.save writes


def load_checkpoint(path):
    """A run's checkpoint.pt as the dict that train.py wrote, on the CPU.

    Raises ValueError, one sentence, for a missing, truncated or foreign file.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}: --resume takes the folder of a run.")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:      # a dozen types, depending on where a file was cut
        raise ValueError(f"{path} cannot be read ({type(e).__name__}): it is truncated or no "
                         "checkpoint. Take a copy of it, or start a new run.") from e
    if not (isinstance(saved, dict) and saved.get("format") == "quads-1" and SAVED <= saved.keys()):
        raise ValueError(f"{path} was not written by this program: start a new run.")
    return saved


# --- Where it comes from -------------------------------------------------------------------------

def find(name):
    """The folder of a checkpoint: itself, or the Hub's by that name, from the cache if offline."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja",
                                                       "*.txt"])
    except Exception as error:                     # of a dozen types
        raise ValueError(f"--init {name}: there is no such folder, and the Hugging Face Hub gives "
                         f"no such model ({type(error).__name__}): check the name, or the network."
                         ) from error


def data(s):
    """Training rows to be given fresh numbers (None: home-made problems), GSM8K's test rows, and
    the rows of both kinds that a tokenizer is trained on."""
    if s.data == "builtin":
        return None, [], gsm8k.load("train", "builtin")
    source = None if s.data == "hub" else s.data
    pool = gsm8k.load("train", source)
    return pool, gsm8k.load("test", source), pool


# --- The prompt ----------------------------------------------------------------------------------

def chat_prompt(folder, tokenizer):
    """A function from a user's message to the ids of the prompt that its chat template makes of it;
    None without a template. Raises ValueError, one sentence, if the template does not work."""
    settings, path = Path(folder) / "tokenizer_config.json", Path(folder) / "chat_template.jinja"
    names = read_json(settings) if settings.exists() else {}
    text = path.read_text(encoding="utf-8") if path.exists() else names.get("chat_template")
    if text is None:
        return None
    # A template is a stranger's program: it runs in a sandbox.
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False,
                                                                          **how})

    def raise_exception(message):
        raise jinja2.TemplateError(message)
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in names.items()
              if k.endswith("_token")}             # a template may write {{ bos_token }}

    def ask(message):
        rendered = template.render(messages=[{"role": "user", "content": message}], **tokens,
                                   raise_exception=raise_exception, add_generation_prompt=True,
                                   enable_thinking=False)
        return tokenizer.encode(rendered, allowed_special="all")
    try:
        template = sandbox.from_string(text)
        ask("?")
    except (jinja2.TemplateError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a chat template that does not work here ({error!r}).") \
            from error
    return ask


def begin(s, saved, rows):
    """Of a run with settings s: its Config, its tokenizer, and a function from a problem to the ids
    of its prompt. saved: the run's checkpoint, or None. rows: what a new tokenizer is made from."""
    def plain(problem):
        return tokenizer.encode_ordinary(gsm8k.prompt(problem["question"]))
    if s.init:                                     # a resumed run reads its tokenizer there, too
        config, tokenizer = read_config(s.init), tokenizer_from_hf(s.init)
        ask = chat_prompt(s.init, tokenizer)
        ask = ask or (lambda message: tokenizer.encode_ordinary(gsm8k.prompt(message)))
        return config, tokenizer, lambda problem: ask(problem["question"] + REQUEST)
    if saved:
        tokenizer = gsm8k.tokenizer_from_json(saved["tokenizer"])
        return Config(**saved["config"]), tokenizer, plain
    texts = [gsm8k.prompt(row["question"]) + row["answer"] for row in rows]
    tokenizer = gsm8k.train_tokenizer(texts, PRESETS[s.preset].vocab_size)
    n = tokenizer.n_vocab                          # the embedding may have more rows than that
    return replace(PRESETS[s.preset], real_vocab=n, end_id=n - 1), tokenizer, plain


# --- Whether it fits -----------------------------------------------------------------------------

def micro_tokens(s, config):
    """Tokens of one forward and backward pass, at most 2**30 logits: in a pretrained model, whose
    vocabulary is large, these are 4 GB, several times over."""
    return min(MICRO_TOKENS[s.device], 2**30 // config.vocab_size)


def available(device):
    """Bytes that the device has: free on a GPU, in all on a CPU."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory(s, config, longest):
    """Bytes of a run, from sizes alone: {what is there all the time}, {what is there by turns}.
    longest: tokens of the longest sequence. The latter are estimates; PyTorch's own is not in."""
    c, R, wide = config, s.prompts * s.group, 2 if s.device == "cuda" else 4  # bytes of a value
    stack = 2 * c.experts * c.expert_width * c.d_model            # values of gate_up in a layer
    experts = 1.5 * c.layers * stack                              # with down
    # (By hand: a model on the meta device has no memory either, but takes PyTorch much longer.)
    total = experts + c.d_model * (c.vocab_size * (2 - c.tied) + 1) + c.layers * (
        c.d_model * (2 * (c.heads + c.kv_heads) * c.head_dim + c.experts + 2) + 2 * c.head_dim)
    stored = {"nvfp4": 0.5625, "fp8": 1}.get(qat.RECIPES[s.recipe][0].split("+")[0], wide)
    cache = 2 * c.layers * longest * c.kv_heads * c.head_dim * wide           # of a sequence
    solved = min(s.eval_problems, 256)                            # sequences at once in evaluate()
    always = {
        "fp32 weights": 4 * total, "AdamW's moments": (4 if s.init else 8) * total,
        # (evaluate() has a second rollout, in BF16, but no gradients, which take more.)
        "gradients": 4 * total, "rollout": stored * experts + wide * (total - experts),
        "cache and routes": cache * max(R, solved)
        + 16 * R * s.max_new_tokens * c.layers * c.active}

    # What a block keeps for its backward pass, as counted in PyTorch (a test counts again).
    tokens = min(max(micro_tokens(s, c), longest), R * longest)
    block = tokens * ((20 + wide) * c.d_model + (8 + 2 * wide) * (c.heads + c.kv_heads)
                      * c.head_dim + wide * c.active * (2 * c.d_model + 4 * c.expert_width))
    block += 1.5 * stack * wide                                   # the weights on the grid
    # With recomputation all blocks keep their inputs, and one is at work; else all of all.
    blocks = c.layers * tokens * wide * c.d_model + block if s.init else c.layers * block
    logits = 4 * c.vocab_size                                     # of a token
    return always, {
        "a pass": blocks + block + 5 * logits * tokens * s.max_new_tokens / longest
        + QUANTIZE * stack, "sampling": 9 * logits * R, "evaluation's cache": cache * solved}


def fits(s, config, tokenizer, prompt, rows):
    """What a run needs, as text. Raises ValueError, one sentence, where a row does not fit into the
    context, or the run not into the device: before anything large is there."""
    longest = 0                                                   # tokens of a sequence
    for row in rows:
        answer = len(tokenizer.encode_ordinary(row["answer"]))
        need = len(prompt(row)) + max(s.max_new_tokens, answer) + 32          # numbers may grow
        if need > config.max_seq_len:
            raise ValueError(f"{row['question'][:60]!r}... needs {need} tokens and the context has "
                             f"{config.max_seq_len}: remove it, or lower --max-new-tokens.")
        longest = max(longest, need)
    always, in_turn = memory(s, config, longest)
    need, have = sum(always.values()) + max(in_turn.values()), available(s.device)
    always, in_turn = (", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items())
                       for parts in (always, in_turn))
    text = f"about {need / 1e9:.2f} of {have / 1e9:.1f} GB: {always}; by turns {in_turn}"
    if need > have:
        raise ValueError(f"the run does not fit, it needs {text}: lower --prompts, --group or "
                         "--max-new-tokens, or take a smaller model.")
    return text


def build(s, config, saved):
    """The model of a run: with random weights, or those of the checkpoint s.init if it is new."""
    torch.manual_seed(s.seed)
    with torch.device(s.device if s.init else "cpu"):     # a large one must not need host memory
        model = MoETransformer(config, torch.bfloat16 if s.device == "cuda" else torch.float32,
                               recompute=bool(s.init)).to(s.device)
    model.set_outliers(s.outliers, s.outlier_blocks)
    if s.init and not saved:
        load_weights(s.init, model)
    return model
