"""Real checkpoints in, servable checkpoints out: Hugging Face folders of the Qwen3-MoE family.

    python train.py --init FOLDER                 # read_config, load_weights, tokenizer_from_hf
    python train.py --resume RUN --export FOLDER  # FOLDER/bf16 and FOLDER/nvfp4

There each expert has three matrices, here those of all experts are stacked:

    model.layers.3.mlp.experts.5.gate_proj.weight (F, D)  =  blocks[3].moe.gate_up[5, :F]
                                 up_proj.weight   (F, D)  =                 gate_up[5, F:]
                                 down_proj.weight (D, F)  =                 down[5]

NVFP4 goes out in the layout of compressed-tensors, which vLLM and SGLang read, with the codes and
scales that a rollout computes. Left out: quantized checkpoints in; and OLMoE, whose QK-norm spans
all heads and whose router weights are not renormalised, so that moe.py would need a second kind.
"""
import json
import shutil
import unicodedata
from pathlib import Path

import tiktoken
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import gsm8k
from moe import Config
from nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX, quantize

# --- Names and layout ----------------------------------------------------------------------------

FIELDS = {                                                # config.json's key: our Config's field
    "vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim",
    "num_experts": "experts", "num_experts_per_tok": "active", "rms_norm_eps": "norm_eps",
    "moe_intermediate_size": "expert_width", "max_position_embeddings": "max_seq_len",
    "rope_theta": "rope_theta", "tie_word_embeddings": "tied"}
ASSUMED = {                    # what moe.py takes for granted, and what a missing key would mean
    "architectures": (["Qwen3MoeForCausalLM"], None), "decoder_sparse_step": (1, 1),
    "norm_topk_prob": (True, False), "attention_bias": (False, False), "hidden_act": ("silu",) * 2,
    "use_sliding_window": (False, False), "mlp_only_layers": ([], []),
    "quantization_config": (None, None)}
INDEX = "model.safetensors.index.json"
TOP = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
LAYER = {"input_layernorm": "attention_norm", "post_attention_layernorm": "moe_norm",
         "mlp.gate": "moe.router", **{f"self_attn.{x}_proj": f"attention.w{x}" for x in "qkvo"},
         "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def expert_parts(layer, stack, values):
    """Yields (name, part) of the experts' matrices in a stack: values has E first, rows second."""
    for e in range(len(values)):
        for part, value in zip(PARTS[stack], values[e].chunk(len(PARTS[stack]))):
            yield f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight", value


def places(model):
    """[{name in a checkpoint: (view of) our parameter}]: what is in no layer, then each layer."""
    own = {ours: p.data for ours, p in model.named_parameters()}
    tables = [{f"{name}.weight": own[ours] for name, ours in TOP.items() if ours in own}]
    for i in range(len(model.blocks)):
        tables.append({f"model.layers.{i}.{name}.weight": own[f"blocks.{i}.{ours}"]
                       for name, ours in LAYER.items()})
        for stack in PARTS:
            tables[-1].update(expert_parts(i, stack, own[f"blocks.{i}.moe.{stack}"]))
    return tables


# --- Read ----------------------------------------------------------------------------------------

def need(condition, path, what):
    """Raises ValueError, one sentence that names the file, if the condition does not hold."""
    if not condition:
        raise ValueError(f"{path} {what}.")


def read_json(path):
    """The object in a JSON file. Raises ValueError if the file is missing or holds none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is missing or no JSON ({type(error).__name__}).") from error


def read_config(folder):
    """The Config of a checkpoint; real_vocab counts its tokenizer's entries, if it has one. Raises
    ValueError, one sentence, for whatever moe.py does not compute."""
    path, generation = Path(folder) / "config.json", Path(folder) / "generation_config.json"
    c = read_json(path)
    for key, (value, default) in ASSUMED.items():
        found = default if c.get(key) is None else c[key]
        need(found == value, path, f"has {key} = {found}, and this model is written for {value}")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    need(rope.get("rope_type", rope.get("type", "default")) == "default", path,
         f"scales its rotary positions ({rope}), and this model does not")
    c = {"rope_theta": rope.get("rope_theta"), "num_experts": c.get("num_local_experts"),
         "tie_word_embeddings": False} | c
    need(None not in map(c.get, FIELDS), path, f"lacks one of {', '.join(FIELDS)}")
    end = (c | (read_json(generation) if generation.exists() else {})).get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    need(isinstance(end, int), path, "names no eos_token_id, the token that ends an answer")
    has_one = (Path(folder) / "tokenizer.json").exists()
    n = tokenizer_from_hf(folder).n_vocab if has_one else c["vocab_size"]
    need(end < n <= c["vocab_size"] and c["num_experts_per_tok"] <= c["num_experts"], path,
         f"does not fit together, or to a tokenizer of {n} entries with end token {end}")
    return Config(end_id=end, real_vocab=n, **{ours: c[key] for key, ours in FIELDS.items()})


def load_weights(folder, model):
    """Copies a checkpoint into model, a MoETransformer of its config, a tensor at a time. Raises
    ValueError, one sentence, for a missing or broken file, tensors that are missing or not used,
    wrong shapes, dtypes other than fp32, bf16, fp16; the model may be half filled then."""
    folder, where = Path(folder), {}                      # where: {name of a tensor: its file}
    index = read_json(folder / INDEX) if (folder / INDEX).exists() else {}
    try:
        for path in [folder / file for file in sorted({*index.get("weight_map", {
                "any": "model.safetensors"}).values()})]:
            need(path.is_file(), path, "is missing, so the checkpoint is incomplete")
            with safe_open(path, "pt") as file:
                where |= dict.fromkeys(file.keys(), path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}.") from error
    table = dict(item for part in places(model) for item in part.items())
    for names, what in ((table.keys() - where, "lacks"), (where.keys() - table, "has, unused,")):
        need(not names, folder, f"{what} {len(names)} tensors: " + ", ".join(sorted(names)[:3]))
    for n, (name, path) in enumerate(where.items()):       # file by file
        if n % 64 == 0 or path != opened:                  # Anew now and then: what was read of a
            file, opened = safe_open(path, "pt"), path     # mapped file counts as memory till then.
        part, shape = file.get_slice(name), list(table[name].shape)
        need(part.get_dtype() in ("F32", "BF16", "F16"), path, f"has {name} as "
             f"{part.get_dtype()}, and only F32, BF16 and F16 can be read")
        need(part.get_shape() == shape, path, f"has {name} as {part.get_shape()}, not {shape}")
        table[name].copy_(file.get_tensor(name))


# --- Tokenizer: tokenizer.json <-> tiktoken ------------------------------------------------------

# Byte-level BPE writes each byte as a visible character: itself, or else one from 256 on.
HIDDEN = [*range(33), *range(127, 161), 173]
CHAR = {b: chr(256 + HIDDEN.index(b) if b in HIDDEN else b) for b in range(256)}
BYTE = {char: byte for byte, char in CHAR.items()}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False}        # of an added token


class NFCEncoding(tiktoken.Encoding):              # composes accents first, as Qwen's tokenizer
    def encode(self, text, **options):
        return super().encode(unicodedata.normalize("NFC", text), **options)

    def encode_ordinary(self, text):
        return super().encode_ordinary(unicodedata.normalize("NFC", text))


def tokenizer_from_hf(folder):
    """The byte-level BPE tokenizer of a checkpoint as a tiktoken.Encoding with the same ids: those
    of the `tokenizers` library for `encode(text, allowed_special="all")`; `encode_ordinary` reads
    special tokens as text. Raises ValueError, one sentence, for what an Encoding does not do."""
    path = Path(folder) / "tokenizer.json"
    t = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "added_tokens": [],
         "model": {}} | read_json(path)
    m, odd = t["model"], "dropout continuing_subword_prefix end_of_word_suffix byte_fallback"
    need(m.get("type") == "BPE" and not any(map(m.get, odd.split())), path, "is no byte-level BPE")
    need(t["normalizer"] in (None, {"type": "NFC"}), path, "has a normalizer other than NFC")
    need((t["post_processor"] or LEVEL)["type"] == "ByteLevel", path, "adds tokens to each text")
    split, level, *more = [*(t["pre_tokenizer"] or {}).get("pretokenizers", []), {}, {}]
    need(split == split | SPLIT and "Regex" in split["pattern"] and level == level | LEVEL
         and more == [{}, {}], path, "does not cut a text by one regular expression, into bytes")
    need(all(a == a | PLAIN for a in t["added_tokens"]), path, "has added tokens that take spaces")
    special = {a["content"]: a["id"] for a in t["added_tokens"]}
    tokens = {token: i for token, i in m["vocab"].items() if token not in special}
    need(BYTE.keys() == set().union(*tokens) & tokens.keys() == set().union(*tokens), path,
         "has a vocabulary that is not made of all bytes")
    ranks = {bytes(map(BYTE.get, token)): i for token, i in tokens.items()}
    need(sorted({*ranks.values(), *special.values()}) == [*range(len(ranks) + len(special))], path,
         "has ids with gaps or twice")
    # The library merges in the order of the list, tiktoken in that of the ids, any two parts of a
    # token, and a word that is a token at once: the same in a trained list, where ids rise.
    made = [tokens.get(pair.replace(" ", "") if isinstance(pair, str) else "".join(pair), -1)
            for pair in m["merges"]]
    need(made == sorted(made) and (m.get("ignore_merges") or {*ranks.values()} == {
        *made, *map(tokens.get, BYTE)}), path, "has merges in another order than that of the ids")
    encoding = (NFCEncoding if t["normalizer"] else tiktoken.Encoding)(
        str(path), pat_str=split["pattern"]["Regex"], mergeable_ranks=ranks, special_tokens=special)
    probe = "".join(f"{chr(i)} a" for i in range(0x300))      # tiktoken drops what does not match
    need(encoding.decode(encoding.encode_ordinary(probe)) == probe, path, "does not cover all text")
    return encoding


def tokenizer_to_hf(encoding):
    """tokenizer.json, as a dict, that gives the ids of a tiktoken.Encoding."""
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    text = {token: "".join(map(CHAR.get, token)) for token in sorted(ranks, key=ranks.get)}
    pairs = [(token[:i], token[i:]) for token in text for i in range(1, len(token))]
    level, split = LEVEL | {"trim_offsets": True}, SPLIT | {"pattern": {"Regex": encoding._pat_str}}
    return {
        "version": "1.0", "decoder": level, "post_processor": level,
        "normalizer": {"type": "NFC"} if isinstance(encoding, NFCEncoding) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "added_tokens": [PLAIN | {"id": i, "content": token, "normalized": False, "special": True}
                         for token, i in special.items()],
        "model": {"type": "BPE", "vocab": {t: ranks[token] for token, t in text.items()} | special,
                  "merges": [f"{text[a]} {text[b]}" for a, b in pairs if a in text and b in text],
                  "ignore_merges": True}}


# --- Write ---------------------------------------------------------------------------------------

SCHEME = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK,
          "symmetric": True, "dynamic": False}             # compressed-tensors' scheme NVFP4
QUANTIZATION = {
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
    "format": "nvfp4-pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME,
                                  "input_activations": SCHEME | {"dynamic": "local"}}}}


def activation_peaks(model, encoding):
    """{(layer, "gate_up" or "down"): the largest input of that matrix} on home-made problems.
    (A rollout scales each row of activations, a server all of them by one number.)"""
    peaks, rows = {}, gsm8k.load("train", "builtin")[:16]
    for i, block in enumerate(model.blocks):
        def spy(x, name, counts, layer=i, product=block.moe.product):
            peaks[layer, name] = x.abs().max().item()
            return product(x, name, counts)
        block.moe.product = spy
    text = "".join(gsm8k.prompt(row["question"]) + row["answer"] + "\n\n" for row in rows)
    ids = encoding.encode_ordinary(text)[:model.config.max_seq_len]
    with torch.no_grad():
        model(torch.tensor([ids], device=model.embedding.device))
    for block in model.blocks:
        del block.moe.product
    return peaks


def shards(model, peaks):
    """Yields {name: tensor on the CPU}: what is in no layer, then layer by layer (5 GB at most in
    the largest Qwen3); experts in NVFP4 if there are `peaks`."""
    for i, table in enumerate(places(model), -1):
        shard = {n: p.bfloat16() for n, p in table.items() if not (peaks and ".experts." in n)}
        for stack in PARTS if peaks and i >= 0 else ():
            q, peak = quantize(getattr(model.blocks[i].moe, stack)), peaks[i, stack]
            # The layout holds 1 / s_global, (E, 2 or 1). A reader's s_block / that may differ from
            # s_block * s_global in fp32's last bit: rarely, a value decodes to a bf16 neighbour.
            g = (1 / q.global_scale.flatten())[:, None].repeat(1, len(PARTS[stack]))
            # For twice the peak: E4M3 has range to spare, and what exceeds it is clipped.
            scale = torch.full_like(g, E2M1_MAX * E4M3_MAX / (2 * peak) if peak else 1)
            for field, values in (("weight_packed", q.codes), ("weight_scale", q.scales),
                                  ("weight_global_scale", g), ("input_global_scale", scale)):
                shard |= {name.removesuffix("weight") + field: value
                          for name, value in expert_parts(i, stack, values)}
        yield {name: t.to("cpu", copy=True).contiguous() for name, t in shard.items()}


def export(model, tokenizer, folder, precision):
    """Writes model as the Hugging Face folder `folder`, a new one, which gets its name at the end.
    tokenizer: the checkpoint whose tokenizer files are copied, or a tiktoken.Encoding. precision:
    "bf16" or "nvfp4" (of the experts). Raises ValueError if these do not fit together."""
    c, folder, made = model.config, Path(folder), isinstance(tokenizer, tiktoken.Encoding)
    encoding = tokenizer if made else tokenizer_from_hf(tokenizer)
    need(precision in ("bf16", "nvfp4"), f"precision {precision!r}", "is not bf16 or nvfp4")
    need(encoding.n_vocab == c.real_vocab, f"a tokenizer of {encoding.n_vocab} entries",
         f"does not belong to a model of {c.real_vocab}")
    need(not folder.exists(), folder, "is already there, and nothing is overwritten")
    temporary, weight_map = folder.with_name(folder.name + ".tmp"), {}
    shutil.rmtree(temporary, ignore_errors=True)
    if made:
        temporary.mkdir(parents=True)
    else:
        shutil.copytree(tokenizer, temporary, ignore=lambda _, names: [
            name for name in names if Path(name).suffix not in (".json", ".txt", ".jinja")])
    peaks = activation_peaks(model, encoding) if precision == "nvfp4" else None
    for n, shard in enumerate(shards(model, peaks), 1):
        name = f"model-{n:05d}-of-{len(model.blocks) + 1:05d}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        save_file(shard, temporary / name, {"format": "pt"})
    config = {key: value for key, (value, _) in ASSUMED.items() if value is not None} | {
        key: getattr(c, ours) for key, ours in FIELDS.items()} | {
        "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "eos_token_id": c.end_id}
    config |= {"quantization_config": QUANTIZATION} if peaks else {}
    files = {"config.json": config, INDEX: {"metadata": {}, "weight_map": weight_map}}
    if made:
        files["tokenizer.json"] = tokenizer_to_hf(encoding)
        files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast",
                                          "eos_token": encoding.decode([c.end_id])}
        files["generation_config.json"] = {"eos_token_id": c.end_id, "do_sample": True, "top_k": 0}
    for name, value in files.items():
        (temporary / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.rename(folder)
