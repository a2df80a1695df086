"""Tests of checkpoint.py: python -m pytest tests/test_checkpoint.py (seconds, no download). Those
against transformers, compressed-tensors and tokenizers are skipped where these are missing."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="checkpoint.py needs safetensors")
from safetensors.torch import load as load_bytes, load_file, save, save_file  # noqa: E402

import gsm8k  # noqa: E402
from checkpoint import (PARTS, export, load_weights, places, read_config,  # noqa: E402
                        tokenizer_from_hf, tokenizer_to_hf)
from moe import Config, MoETransformer  # noqa: E402
from nvfp4 import dequantize, quantize  # noqa: E402
from rollout import Rollout  # noqa: E402

HERE = Path(__file__).parent
ROWS = [json.loads(line) for line in open(HERE / "gsm8k_sample.jsonl", encoding="utf-8")]
SENTENCES = [s for row in ROWS for text in row.values() for s in text.split(". ")]
ODD = ["", " ", "👩‍🚀🚀 emoji🙂!", "汉字と仮名 한국어", "\t\ttabs\t and\n\n \r\nlines  ", "1234567890" * 5,
       "3.14159e-10 ½ ²", "<|im_start|>user\n7<|im_end|><|end|>x<think>", "cafe\u0301 naïve",
       "don't WE'LL I'M", "\x00\x1f\u200b\ufeff", "ﬁ ſ's", "a" * 40]
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+")
ENCODING = gsm8k.train_tokenizer(SENTENCES, 300)
IDS = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(1))     # (B, T)


def oracle(name):
    return pytest.importorskip(name, reason=f"{name} is what this test compares with")


def scramble(model):
    """Weights large enough that logits differ; norms must matter too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1
                    else 2 * torch.randn_like(p) * p.shape[-1]**-0.5)
    return model


def tiny(tied=False):
    return scramble(MoETransformer(Config(
        vocab_size=300, real_vocab=300, end_id=299, d_model=64, layers=2, heads=4, kv_heads=2,
        head_dim=16, experts=4, active=2, expert_width=32, max_seq_len=64, tied=tied)))


def load(folder):
    model = MoETransformer(read_config(folder))
    load_weights(folder, model)
    return model


def stored(folder):
    return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}


@pytest.fixture
def folder(tmp_path):
    export(tiny(), ENCODING, tmp_path / "good", "bf16")
    return tmp_path / "good"


def reference(folder, tied=False, dtype=torch.float32, **save):
    """A checkpoint that transformers writes."""
    transformers = oracle("transformers")
    scramble(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, vocab_size=300,
        norm_topk_prob=True, tie_word_embeddings=tied, eos_token_id=[299, 5], rope_theta=1e6,
        max_position_embeddings=64))).to(dtype).save_pretrained(folder, **save)


def logits(folder):
    model = oracle("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(IDS).logits


# --- Weights --------------------------------------------------------------------------------------

@pytest.mark.parametrize("tied,dtype,save", [
    (False, torch.float32, {}), (True, torch.float32, {"max_shard_size": "40KB"}),
    (False, torch.bfloat16, {"max_shard_size": "40KB"}), (True, torch.float16, {})])
def test_logits_of_a_transformers_checkpoint(tmp_path, tied, dtype, save):
    reference(source := tmp_path / "a", tied, dtype, **save)
    assert len([*source.glob("*.safetensors")]) > 3 or not save
    model, want = load(source), logits(source)
    assert model.config.end_id == 299 and (model.head is None) == tied
    cache = [(torch.zeros(3, 2, 64, 16), torch.zeros(3, 2, 64, 16)) for _ in range(2)]
    with torch.no_grad():
        batch = model(IDS)
        first = model(IDS[:, :11], torch.arange(11).expand(3, -1), cache=cache)
        steps = [model(IDS[:, t:t + 1], torch.full((3, 1), t), cache=cache) for t in range(11, 20)]
    assert want.std() > 0.5
    torch.testing.assert_close(batch, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat([first, *steps], 1), want, atol=1e-4, rtol=1e-4)
    export(model, ENCODING, tmp_path / "b", "bf16")                # and back, bit for bit
    before, after = stored(source), stored(tmp_path / "b")
    assert before.keys() == after.keys() and not list(tmp_path.glob("*.tmp"))
    assert all(torch.equal(v.bfloat16(), after[k]) for k, v in before.items())


@pytest.mark.parametrize("tied", [False, True])
def test_our_export_in_transformers_and_back(tmp_path, tied):
    export(model := tiny(tied), ENCODING, tmp_path / "a", "bf16")
    assert (again := load(tmp_path / "a")).config == model.config
    assert all(torch.equal(p.bfloat16(), q) for p, q in zip(model.parameters(), again.parameters()))
    with torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "a"), again(IDS), atol=1e-4, rtol=1e-4)
    auto = oracle("transformers").AutoTokenizer.from_pretrained(tmp_path / "a")
    assert auto.eos_token_id == 299 and auto("3 + 4 = 7").input_ids == ENCODING.encode("3 + 4 = 7")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_beside_the_model_is_little(tmp_path):
    """Mapped pages of one large file do not pile up: at most 1.2 times the weights in all."""
    model = MoETransformer(config := Config(d_model=512, layers=4, experts=32, expert_width=256))
    file = tmp_path / "model.safetensors"
    save_file({k: p.clone() for part in places(model) for k, p in part.items()}, file)
    code = (f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); from checkpoint import *; "
            f"from moe import MoETransformer; model = MoETransformer({config!r})\n"
            "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
            f"\nbefore = peak(); load_weights({str(tmp_path)!r}, model); print(peak() - before)")
    added = 1024 * int(subprocess.check_output([sys.executable, "-c", code], text=True))
    size = sum(4 * p.numel() for p in model.parameters())
    assert size > 200e6 and added < 0.2 * size


def test_nvfp4_export_is_what_compressed_tensors_decodes(tmp_path):
    oracle("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.utils import match_name
    model = tiny()
    for w in (w.data for block in model.blocks for w in (block.moe.gate_up, block.moe.down)):
        w[1], w[2] = 0, 1e-3 * w[2]
    export(model, ENCODING, tmp_path / "a", "nvfp4")
    rest = stored(tmp_path / "a")
    config = QuantizationConfig.model_validate(
        json.loads((tmp_path / "a/config.json").read_text())["quantization_config"])
    scheme, preset = config.config_groups["group_0"], preset_name_to_scheme("NVFP4", ["Linear"])
    for side in ("weights", "input_activations"):
        for key in ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic"):
            assert getattr(getattr(scheme, side), key) == getattr(getattr(preset, side), key)
    for i, e in [(i, e) for i in range(2) for e in range(4)]:
        gate_up, down = (dequantize(quantize(w), torch.bfloat16)[e] for w in (
            model.blocks[i].moe.gate_up, model.blocks[i].moe.down))       # (2F, D), (D, F)
        for part, want in zip(("gate", "up", "down"), (*gate_up.split(32), down)):
            prefix = f"model.layers.{i}.mlp.experts.{e}.{part}_proj."
            own = {k.removeprefix(prefix): rest.pop(k) for k in [*rest] if k.startswith(prefix)}
            assert own["input_global_scale"].shape == own["weight_global_scale"].shape == (1,)
            assert 10 < own["input_global_scale"] < 1e6
            got = NVFP4PackedCompressor.decompress(own, scheme)["weight"]
            assert got.dtype == torch.bfloat16 and torch.equal(got, want)
            assert got.isfinite().all() and (e == 1) == (want == 0).all()
    linear = [k.removesuffix(".weight") for k in rest if "proj" in k or "gate" in k]
    assert len(linear) == 10 and all(any(match_name(k, p) for p in config.ignore) for k in linear)
    assert not any(match_name(prefix[:-1], p) for p in config.ignore)
    assert all(v.dtype == torch.bfloat16 for v in rest.values())


@pytest.mark.parametrize("recipe", ["nvfp4", "quads"])
def test_nvfp4_export_is_what_a_rollout_multiplies(tmp_path, recipe):
    rollout = Rollout(model := tiny(), recipe)
    rollout.sync(IDS.tolist())
    export(model, ENCODING, tmp_path / "a", "nvfp4")
    files = stored(tmp_path / "a")
    for (layer, stack), q in rollout.weights.items():
        for e, part in [(e, part) for e in range(4) for part in PARTS[stack]]:
            name = f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight_"
            rows = slice(32, 64) if part == "up" else slice(32 if part == "gate" else None)
            assert torch.equal(files[name + "packed"], q.codes[e, rows])
            assert torch.equal(files[name + "scale"].view(torch.uint8),
                               q.scales[e, rows].view(torch.uint8))
            assert files[name + "global_scale"] == 1 / q.global_scale[e]
    assert len(rollout.weights) == 4


# --- Tokenizer ------------------------------------------------------------------------------------

def trained(folder, nfc):
    """Writes a tokenizer.json like Qwen's, trained by the library."""
    tokenizers = oracle("tokenizers")
    from tokenizers import normalizers, pre_tokenizers, trainers
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.normalizer = normalizers.NFC() if nfc else None
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.train_from_iterator(SENTENCES, trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>", "<|im_start|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_special_tokens(["<|im_end|>"])
    t.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    t.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("source", ["trained", "trained, no NFC", "exported", "both"])
def test_ids_are_those_of_the_library(folder, source):
    encoding = ENCODING
    if source != "exported":
        trained(folder, nfc="no NFC" not in source)
        encoding = tokenizer_from_hf(folder)
        assert encoding.n_vocab == 602
    if source == "both":
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_to_hf(encoding)))
    t = oracle("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    again = tokenizer_from_hf(folder)
    for text in SENTENCES + ODD + ["".join(SENTENCES)]:
        ids = encoding.encode(text, allowed_special="all")
        assert ids == t.encode(text).ids == again.encode(text, allowed_special="all"), text
    assert encoding.decode(encoding.encode_ordinary("<|end|>naïve 汉 🚀")) == "<|end|>naïve 汉 🚀"
    assert t.token_to_id("<|end|>") not in encoding.encode_ordinary("<|end|>")


@pytest.mark.skipif("GSM8K" not in os.environ, reason="GSM8K names no folder with test.jsonl")
def test_ids_of_all_questions_of_gsm8k(tmp_path):
    trained(tmp_path, nfc=True)
    encoding = tokenizer_from_hf(tmp_path)
    t = oracle("tokenizers").Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    questions = [row["question"] for row in gsm8k.load("test", os.environ["GSM8K"])]
    assert len(questions) == 1319
    for question in questions:
        assert encoding.encode(question, allowed_special="all") == t.encode(question).ids, question


# --- Bad input: one sentence, which names the file ------------------------------------------------

C, T, S = "config.json", "tokenizer.json", "model-00002-of-00003.safetensors"
HEAD, INDEX, Q = "model-00001-of-00003.safetensors", "model.safetensors.index.json", \
    "model.layers.0.self_attn.q_proj.weight"


def put(keys, value):                              # a change of a JSON file's text
    def change(data):
        whole = inner = json.loads(data)
        *path, last = keys.split("/")
        for key in path:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value
        return json.dumps(whole).encode()
    return change


def tensor(name, new):                             # a change of a safetensors file's bytes
    return lambda data: save({k: v for k, v in (load_bytes(data) | {name: new}).items()
                              if v is not None})


BAD = {f"has {key} = ": (C, put(key, value)) for key, value in {
    "architectures": ["OlmoeForCausalLM"], "norm_topk_prob": None, "attention_bias": True,
    "mlp_only_layers": [0], "decoder_sparse_step": 2, "use_sliding_window": True,
    "hidden_act": "gelu", "quantization_config": {"quant_method": "fp8"}}.items()} | {
    "config.json is missing": (C, None), "config.json is missing or no": (C, lambda data: b"[3"),
    "no eos_token_id": ("generation_config.json", put("eos_token_id", None)),
    f"{S} is truncated": (S, lambda data: data[:-100]), f"{S} is missing": (S, None),
    "model-9.safetensors is missing": (INDEX, put("weight_map/x", "model-9.safetensors")),
    "model.safetensors is missing": (INDEX, None), "lacks one of": (C, put("head_dim", None)),
    "scales its rotary": (C, put("rope_scaling", {"type": "yarn", "factor": 4.0})),
    "does not fit": (C, put("vocab_size", 200)), "lacks 1 tens.*q_proj": (S, tensor(Q, None)),
    "unused, 1 tensors: lm_head.weight": (C, put("tie_word_embeddings", True)),
    "unused, 1 tensors: extra": (S, tensor("extra", torch.ones(2))),
    "lacks 1 tensors: lm_head.weight": (HEAD, tensor("lm_head.weight", None)),
    f"has {Q} as F8_E4M3": (S, tensor(Q, torch.ones(64, 64).to(torch.float8_e4m3fn))),
    f"has {Q} as .32, 64., not .64, 64.": (S, tensor(Q, torch.ones(32, 64))),
    "is no byte-level BPE": (T, put("model/type", "Unigram")),
    "other than NFC": (T, put("normalizer", {"type": "Lowercase"})),
    "adds tokens": (T, put("post_processor", {"type": "TemplateProcessing"})),
    "does not cut a text": (T, put("pre_tokenizer", {"type": "Metaspace"})),
    "not cover all": (T, put("pre_tokenizer/pretokenizers/0/pattern", {"Regex": "[a-z]+"})),
    "tokens that take spaces": (T, put("added_tokens/0/lstrip", True)),
    "not made of all bytes": (T, put("model/vocab/\u2581the", 299)),
    "ids with gaps": (T, put("added_tokens/0/id", 400)),
    "merges in another order": (T, put("model/merges", ["Ġ t", "q q"]))}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_sentence(folder, message):
    name, change = BAD[message]
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if change:
        (folder / name).write_bytes(change(data))
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_bad_folders(tmp_path, folder):
    for bad in (tmp_path / "none", HERE / "gsm8k_sample.jsonl"):
        with pytest.raises(ValueError, match="config.json is missing"):
            read_config(bad)
    export(tiny(), folder, tmp_path / "copy", "bf16")
    for name in (T, "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_text() == (tmp_path / "copy" / name).read_text()
    (tmp_path / "copy" / T).unlink()
    for message, source, target, precision in (
            ("is already there", ENCODING, "good", "bf16"), ("not bf16", ENCODING, "new", "fp8"),
            ("of 300", gsm8k.train_tokenizer(SENTENCES, 299), "new", "bf16"),
            ("tokenizer.json is missing", tmp_path / "copy", "new", "bf16")):
        with pytest.raises(ValueError, match=message):
            export(tiny(), source, tmp_path / target, precision)
    assert not (tmp_path / "new").exists() and load(tmp_path / "copy").config.real_vocab == 300
