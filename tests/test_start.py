"""Tests of start.py: python -m pytest tests/test_start.py (seconds, no download). Those against
transformers are skipped where it is missing."""
import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="checkpoint.py needs safetensors")

import gsm8k  # noqa: E402
import start  # noqa: E402
from checkpoint import export, tokenizer_from_hf  # noqa: E402
from moe import PRESETS, Config, MoETransformer  # noqa: E402
from rollout import Rollout  # noqa: E402

HERE = Path(__file__).parent
ROWS = [json.loads(line) for line in open(HERE / "gsm8k_sample.jsonl", encoding="utf-8")]
ENCODING = gsm8k.train_tokenizer([row["question"] for row in ROWS], 300)
# Turns, tools, a default system turn and a thinking switch, in the manner of Qwen's template.
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- if messages[0].role != 'user' and messages[0].role != 'system' %}
    {{- raise_exception('a chat starts with the user') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
<|im_end|>
{% endfor %}
    {% if add_generation_prompt %}
<|im_start|>assistant
        {%- if enable_thinking is defined and enable_thinking is false %}
            {{- '\\n<think>\\n\\n</think>\\n\\n' }}
        {%- else %}
            {{- '\\n' }}
        {%- endif %}
    {% endif %}
{{- eos_token }}"""
LIKE = {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with the special tokens of a chat."""
    config = Config(vocab_size=320, real_vocab=300, end_id=299, d_model=64, layers=2, heads=4,
                    kv_heads=2, head_dim=16, experts=4, active=2, expert_width=32, tied=False)
    export(MoETransformer(config), ENCODING, tmp_path / "good", "bf16")
    path = tmp_path / "good" / "tokenizer.json"
    t = json.loads(path.read_text())
    t["added_tokens"] += [{**t["added_tokens"][0], "id": 300 + i, "content": token}
                          for i, token in enumerate(["<|im_start|>", "<|im_end|>", "<think>",
                                                     "</think>"])]
    path.write_text(json.dumps(t))
    return tmp_path / "good"


def arguments(**changes):
    return argparse.Namespace(**{
        "device": "cpu", "recipe": "quads", "init": "", "preset": "cpu", "prompts": 6, "group": 4,
        "eval_problems": 8, "max_new_tokens": 16, "seed": 0, "outliers": 0,
        "outlier_blocks": 1} | changes)


# --- The prompt -----------------------------------------------------------------------------------

@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_prompt_is_the_one_of_transformers(folder, place):
    transformers = pytest.importorskip("transformers", reason="is what this test compares with")
    settings = LIKE | ({"chat_template": TEMPLATE} if place.endswith("json") else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if place.endswith("jinja"):
        (folder / place).write_text(TEMPLATE)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    config, tokenizer, prompt = start.begin(arguments(init=str(folder)), None, [])
    assert (config.vocab_size, config.real_vocab, tokenizer.n_vocab) == (320, 304, 304)
    for row in ROWS + [{"question": "Tom's <|im_end|> {{ 7 }} <b>&</b> 汉 🚀 \n\n  ?"}]:
        want = auto.apply_chat_template(
            [{"role": "user", "content": row["question"] + start.REQUEST}], tokenize=True,
            return_dict=False, add_generation_prompt=True, enable_thinking=False)
        assert prompt(row) == want
    text = tokenizer.decode(prompt(ROWS[0]))
    assert text.startswith("<|im_start|>user\n" + ROWS[0]["question"] + start.REQUEST)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n<|im_end|>")
    assert "####" in text and text.count("<|im_start|>") == 2


def test_tojson_and_loops_are_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers", reason="is what this test compares with")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m | tojson(indent=1) }}{{ m|tojson }}{% break %}{% endfor %}")
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    ask = start.chat_prompt(folder, tokenizer_from_hf(folder))
    for text in ("<b>'&'</b>", "汉 🚀"):
        assert ask(text) == auto.apply_chat_template([{"role": "user", "content": text}],
                                                     tokenize=True, return_dict=False)


def test_a_base_model_gets_the_plain_prompt_with_the_same_request(folder):
    _, tokenizer, prompt = start.begin(arguments(init=str(folder)), None, [])
    assert tokenizer.decode(prompt({"question": "<|im_end|> 1 + 1?"})) == \
        gsm8k.prompt("<|im_end|> 1 + 1?" + start.REQUEST)
    assert 301 not in prompt({"question": "<|im_end|>"})      # no template, no special tokens


@pytest.mark.parametrize("template, words", [
    ("{% if %}", "TemplateSyntaxError"), ("{{ raise_exception('no users') }}", "no users"),
    ("{{ messages[3].content }}", "UndefinedError"), ("{{ messages + 1 }}", "TypeError"),
    ("{{ messages.clear() }}", "SecurityError"), ([{"name": "default"}], "chat template")])
def test_a_template_that_does_not_work_is_one_sentence(folder, template, words):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=words) as error:
        start.begin(arguments(init=str(folder)), None, [])
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


# --- Where a checkpoint is ------------------------------------------------------------------------

@pytest.mark.parametrize("where", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_network_the_cache_answers_or_one_sentence(tmp_path, where):
    kept = tmp_path / "hub" / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    code = ("import sys, start\nfor name in sys.argv[1:]:\n try: print(start.find(name))\n"
            " except ValueError as error: print(error)")
    names = ["some/model", "no/model", "/no/such/folder", "-"]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=HERE.parent, text=True,
                          capture_output=True, timeout=100,
                          env={**os.environ, "HF_HOME": str(tmp_path), **where})
    first, *others = done.stdout.splitlines()
    assert first == str(kept / "snapshots" / "abc") and len(others) == 3, done.stderr
    for name, line in zip(names[1:], others):
        assert line.startswith(f"--init {name}: there is no such folder, and the Hugging Face Hub ")
    assert start.find(str(tmp_path)) == str(tmp_path.resolve())


# --- What fits ------------------------------------------------------------------------------------

@pytest.mark.parametrize("recipe", ["quads", "fp8", "bf16"])
@pytest.mark.parametrize("init", ["", "x"])
def test_memory_is_what_the_tensors_take(recipe, init):
    config = PRESETS["cpu"]
    s = arguments(recipe=recipe, init=init)
    model = start.build(arguments(), config, None)
    rollout = Rollout(model, recipe)
    rollout.sync([[1, 2, 3]])
    rollout.generate([[5] * 24] * 6, 4, 16, 1.0, 0)

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)
    always, in_turn = start.memory(s, config, 40)
    for other in (config, dataclasses.replace(config, tied=False, kv_heads=4, layers=3)):
        counted = start.memory(s, other, 40)[0]["fp32 weights"]
        assert counted == 4 * MoETransformer(other).size()
    weights, moments, gradients, copied, cache = always.values()
    assert weights == gradients == size(model.parameters())
    optimizer = (start.qat.BF16AdamW if init else torch.optim.AdamW)(
        model.parameters(), 0.0, (0.9, 0.99), weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state = optimizer.moments if init else [
        state[k] for state in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert moments == size(state)
    held = size([*rollout.model.parameters(), *[t for q in rollout.weights.values() for t in q]])
    assert held * 0.98 < copied <= held               # scales of rows are not counted
    kept = size([t for kept in rollout.cache for t in kept])
    assert cache == kept + 2 * size([rollout.routes])
    assert in_turn["evaluation's cache"] == kept * 8 / 24 and in_turn["sampling"] > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_four_more_blocks_keep_what_is_estimated(recompute):
    """What autograd holds for a backward pass, counted."""
    held, estimated = [], []
    for layers in (2, 6):
        model, seen = MoETransformer(Config(vocab_size=64, real_vocab=64, end_id=63, layers=layers,
                                            d_model=256, expert_width=192), recompute=recompute), {}
        model.set_qat("w4a16")
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model(torch.zeros(16, 64, dtype=torch.int64), valid=torch.ones(16, 64).bool())
        held.append(sum(t.nbytes() for at, t in seen.items() if at not in own))
        s = arguments(init="x" if recompute else "", prompts=16, group=1)
        estimated.append(start.memory(s, model.config, 64)[1]["a pass"])
        assert out.isfinite().all() and held[-1] < estimated[-1]
    assert held[1] - held[0] == pytest.approx(estimated[1] - estimated[0], rel=0.02)


@pytest.mark.parametrize("have, words", [(3e6, "the run does not fit, it needs about .* of 0.0 GB"),
                                         (1e12, "")])
def test_too_little_memory_is_one_sentence_before_anything_is_there(monkeypatch, have, words):
    monkeypatch.setattr(start, "available", lambda device: have)
    _, tokenizer, prompt = start.begin(arguments(), None, ROWS)
    config = PRESETS["cpu"]
    if words:
        with pytest.raises(ValueError, match=words + ".*lower --prompts") as error:
            start.fits(arguments(), config, tokenizer, prompt, ROWS)
        assert "\n" not in str(error.value) and "fp32 weights 0.00" in str(error.value)
    else:
        assert "of 1000.0 GB: fp32" in start.fits(arguments(), config, tokenizer, prompt, ROWS)
    assert start.micro_tokens(arguments(), config) == start.MICRO_TOKENS["cpu"]
    large = Config(vocab_size=150_000, real_vocab=512)
    assert start.micro_tokens(arguments(device="cuda"), large) == 2**30 // 150_000


def test_what_is_there_is_the_machines():
    assert 1e8 < start.available("cpu") < 1e14


# --- Files ------------------------------------------------------------------------------------

def test_load_checkpoint_explains_what_is_wrong(tmp_path):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(ValueError, match="there is no .*checkpoint.pt"):
        start.load_checkpoint(path)
    whole = dict.fromkeys(start.SAVED, 0) | {"format": "quads-1", "step": 3,
                                             "w": torch.arange(1000)}
    torch.save(whole, path)
    assert start.load_checkpoint(path)["step"] == 3
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ValueError, match="cannot be read"):
        start.load_checkpoint(path)
    path.write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match="cannot be read"):
        start.load_checkpoint(path)
    lacking = {key: value for key, value in whole.items() if key != "energy"}
    for wrong in ({"model": torch.ones(2)}, whole | {"format": "other"}, torch.ones(3), lacking):
        torch.save(wrong, path)
        with pytest.raises(ValueError, match="not written by this program"):
            start.load_checkpoint(path)

