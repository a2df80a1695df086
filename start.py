"""What a run starts from: a new model or somebody else's, how it is asked, and whether it fits.

A checkpoint's own chat template writes the prompt, as `transformers` would: one message of the
user, the generation prompt, no thinking (a thinking answer does not fit into 256 tokens). A base
model has no template and gets the plain prompt. Both are asked for the last line that earns a
reward. Not here: the weights and the tokenizer themselves, see checkpoint.py.
"""
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
    with torch.device("meta"):
        total = MoETransformer(c).size()
    stack = 2 * c.experts * c.expert_width * c.d_model            # values of gate_up in a layer
    experts = 1.5 * c.layers * stack                              # with down
    stored = {"nvfp4": 0.5625, "fp8": 1}.get(qat.RECIPES[s.recipe][0].split("+")[0], wide)
    cache = 2 * c.layers * longest * c.kv_heads * c.head_dim * wide           # of a sequence
    solved = min(s.eval_problems, 256)                            # sequences at once in evaluate()
    always = {
        "fp32 weights": 4 * total, "AdamW's moments": (4 if s.init else 8) * total,
        # evaluate() has no gradients, but a second rollout, which begins as a copy of the weights.
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
    if s.init and not saved:
        load_weights(s.init, model)
    return model
