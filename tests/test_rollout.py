"""Tests of rollout.py: python -m pytest tests/test_rollout.py (seconds, one CPU thread).

"Fault" in a docstring: a defect that a public trainer or engine once shipped.
"""
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import grpo  # noqa: E402
import nvfp4  # noqa: E402
import qat  # noqa: E402
import rac  # noqa: E402
import rollout as module  # noqa: E402
from moe import PRESETS, Config, MoETransformer  # noqa: E402
from rollout import Rollout, sample, sequence_logp, uniform  # noqa: E402

torch.set_num_threads(1)
RECIPES = ["bf16", "fp8", "nvfp4", "rac"]                  # one for each precision of the rollout
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [3, 1, 4, 1]]


def tiny(dtype=torch.float32, seed=0, **changes):
    """A small model whose logits differ, and whose answers end after about six tokens."""
    sizes = dict(vocab_size=16, real_vocab=12, end_id=11, d_model=64, layers=2, heads=4, kv_heads=2,
                 head_dim=16, experts=4, active=2, expert_width=64, max_seq_len=32)
    torch.manual_seed(seed)
    model = MoETransformer(Config(**(sizes | changes)), dtype)
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.dim() > 1:
            p.copy_(1.5 * torch.randn(p.shape, generator=generator) * p.shape[-1]**-0.5)


def synced(model, recipe="bf16", *args):
    rollout = Rollout(model, recipe, *args)
    rollout.sync(PROMPTS)
    return rollout


def repeat(prompts, group):
    return [p for p in prompts for _ in range(group)]


def state(rollout):
    """All tensors that a sync writes, by name."""
    tensors = {f"{key} {i}": t for key, ts in rollout.weights.items() for i, t in enumerate(ts)}
    return tensors | {f"{key} blocks": t for key, t in rollout.blocks.items()} \
        | dict(rollout.model.named_parameters())


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(t.view(torch.uint8), b[k].view(torch.uint8)) for k, t in a.items())


def copies(tensors):
    return {name: t.clone() for name, t in tensors.items()}


# --- The numbers are those of the trainer ----------------------------------------------------

@torch.no_grad()
def naive(model, prompt, answer, temperature):
    """log-probs of an answer, one forward pass for each prefix: no cache, no padding, no slices."""
    result = []
    for t, token in enumerate(answer):
        logits = model(torch.tensor([prompt + answer[:t]]))[0, -1, :model.config.real_vocab]
        result.append((logits / temperature).log_softmax(-1)[token].item())
    return torch.tensor(result)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("new_tokens", [1, 20])
def test_sampler_equals_trainer_equals_prefix_loop(temperature, new_tokens):
    """Faults: trainer without temperature (trl 3029), sampler without (trl 4159), off by one (trl
    3681), positions under padding (unsloth 3795), and answers of one token or of full length."""
    model = tiny()
    rollout = synced(model)
    ids, mask, logp = rollout.generate(PROMPTS, 4, new_tokens, temperature, seed=3)
    assert ids.shape == mask.shape == logp.shape == (12, new_tokens) and logp.dtype == torch.float32
    assert new_tokens == 1 or mask.sum(1).max() == 20 and mask.sum(1).unique().numel() > 3
    prompts = repeat(PROMPTS, 4)
    trainer, entropy, routes = sequence_logp(model, prompts, ids, mask, temperature)
    assert (trainer - logp).abs().max() < 1e-4
    assert grpo.router_agreement(routes, rollout.routes, mask) == 1
    other = sequence_logp(model, prompts, ids, mask, 1.3)[0]
    assert (other - logp)[mask].abs().mean() > 1e-2                # temperature does something
    for row, prompt in enumerate(prompts):
        n = int(mask[row].sum())
        expected = naive(model, prompt, ids[row, :n].tolist(), temperature)
        assert (logp[row, :n] - expected).abs().max() < 1e-4
        one = slice(row, row + 1)
        alone = sequence_logp(model, [prompt], ids[one], mask[one], temperature)
        assert (alone[0] - trainer[one]).abs().max() < 1e-4
        assert (alone[1] - entropy[one]).abs().max() < 1e-4 and torch.equal(alone[2], routes[one])
    # Fault: batch-dependent numbers (verl 6280). No weights changed: every ratio is 1.
    assert ((trainer - logp).exp() - 1).abs().max() < 1e-4


def test_entropy_and_gradient_of_sequence_logp():
    """The gradient reaches the end token (trl 4970) and nothing behind it."""
    model, ids = tiny(), torch.tensor([[5, 11, 11, 11], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    logp, entropy, _ = sequence_logp(model, PROMPTS[:2], ids, mask, 0.7)
    assert not entropy.requires_grad and (logp[0, 2:] == 0).all() and (entropy[0, 2:] == 0).all()
    all_logp = (model(torch.tensor([PROMPTS[0] + [5]]))[0, -1, :12] / 0.7).log_softmax(-1)
    assert abs(entropy[0, 1] + (all_logp.exp() * all_logp).sum()) < 1e-5
    expected, = torch.autograd.grad(all_logp[11], model.norm)
    actual, = torch.autograd.grad(logp[0, 1], model.norm)
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_micro_batches():
    """Each row once, none dropped (nanochat 758), within the limit, and `last` at the end."""
    mask = torch.arange(20) < torch.tensor([3, 20, 1, 0, 7, 7, 15, 2, 9])[:, None]
    prompts, last = [[1] * (1 + b % 4) for b in range(9)], torch.arange(9) % 3 == 0
    width = mask.sum(1) + torch.tensor([len(p) for p in prompts])
    for limit in (1, 25, 60, 10**6):
        parts = list(module.micro_batches(prompts, mask, limit, last))
        rows = torch.cat([rows for rows, _ in parts])
        assert sorted(rows.tolist()) == list(range(9)) and last[rows[-3:]].all()
        for rows, T in parts:
            assert len(rows) == 1 or len(rows) * width[rows].max() <= limit
            assert T == mask[rows].sum(1).max()
        assert len(parts) == {1: 9, 10**6: 1}.get(limit, len(parts))


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy_equals_uncached(recipe):
    """Each next token is the likeliest of a fresh pass through the sampler's own model."""
    rollout = synced(tiny(), recipe)
    ids, mask, logp = rollout.generate(PROMPTS, 1, 12, 0, seed=0)
    for row, prompt in enumerate(PROMPTS):
        for t in range(int(mask[row].sum())):
            scores = rollout.model(torch.tensor([prompt + ids[row, :t].tolist()]))[0, -1, :12]
            scores = scores.log_softmax(-1)
            # 4 bits: the last bit of a sum may move an activation to the next code.
            tolerance = 1e-4 if recipe == "bf16" else 0.3
            assert scores.max() - scores[ids[row, t]] < tolerance
            assert abs(logp[row, t] - scores.max()) < tolerance


# --- What comes back -------------------------------------------------------------------------

def test_mask_ids_and_logp_behind_the_end():
    ids, mask, logp = synced(tiny()).generate(PROMPTS, 8, 20, 1.0, seed=0)
    lengths = mask.sum(1).tolist()
    assert min(lengths) < 20 and 20 in lengths
    for row, n in enumerate(lengths):
        assert mask[row, :n].all() and not mask[row, n:].any()
        assert n == 20 or ids[row, n - 1] == 11
        assert (ids[row, :n - 1] != 11).all() and (ids[row, n:] == 11).all()
        assert (logp[row, :n] < 0).all() and (logp[row, n:] == 0).all()
    for prompt in range(3):                                        # no two answers of a group alike
        assert len({tuple(row.tolist()) for row in ids[8 * prompt:8 * prompt + 8]}) > 5


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_an_answer_depends_on_its_seed_only(recipe):
    rollout = synced(tiny(), recipe)
    full = rollout.generate(PROMPTS, 4, 16, 1.0, seed=2**33 + 5)
    for row, prompt in enumerate(repeat(PROMPTS, 4)):
        ids, _, logp = rollout.generate([prompt], 1, 16, 1.0, seed=2**33 + 5 + row)
        assert ids[0, 0] == full[0][row, 0]
        if recipe == "bf16":       # 4 bits: the last bit of a sum may move a code, then a token
            assert torch.equal(ids[0], full[0][row])
            assert (logp[0] - full[2][row]).abs().max() < 1e-4
    group = rollout.generate(PROMPTS[1:2], 4, 16, 1.0, seed=2**33 + 5 + 4)[0]
    assert torch.equal(group[:, 0], full[0][4:8, 0])


def test_finished_rows_leave_the_batch(monkeypatch):
    sizes, results = {}, {}
    for share in (0, 0.75, 1.0):
        monkeypatch.setattr(module, "SHRINK_AT", share)
        rollout, calls = synced(tiny()), []
        forward = rollout.model.forward
        rollout.model.forward = lambda ids, *args: calls.append(len(ids)) or forward(ids, *args)
        results[share] = (*rollout.generate(PROMPTS, 8, 20, 1.0, seed=1), rollout.routes)
        sizes[share] = calls
    mask = results[0][1]
    running = [3] + [int(mask[:, t].sum()) for t in range(1, 20)]  # prompts once, then what runs
    assert sizes[0] == [3] + [24] * 19 and sizes[1.0] == running
    assert running[-1] < sizes[0.75][-1] * 1.34 and sizes[0.75][-1] < 24
    for share in (0.75, 1.0):
        for a, b in zip(results[0], results[share]):
            assert torch.allclose(a.float(), b.float(), atol=1e-5)
    row, n = min(enumerate(mask.sum(1).tolist()), key=lambda pair: pair[1])
    rollout.generate(PROMPTS[row // 8:][:1], 1, 20, 1.0, seed=1 + row)         # all done: no call
    assert len(calls) - len(running) == n < 20


def test_cache_is_reused_and_its_trash_unread():
    """Faults: unfilled slots were read (unsloth 7428); maximum length off by one."""
    model = tiny()
    fresh = synced(model).generate([[8], [3, 1]], 2, 10, 1.0, seed=7)
    rollout = synced(model)
    rollout.generate([[5] * 20] * 4, 3, 12, 1.0, seed=0)           # longer, and more rows
    pointers = [t.data_ptr() for pair in rollout.cache for t in pair]
    for pair in rollout.cache:
        for tensor in pair:
            tensor.fill_(1e4)
    again = rollout.generate([[8], [3, 1]], 2, 10, 1.0, seed=7)
    assert pointers == [t.data_ptr() for pair in rollout.cache for t in pair]
    assert torch.equal(again[0], fresh[0]) and (again[2] - fresh[2]).abs().max() < 1e-5
    ids, mask, logp = rollout.generate([[5] * 20, [1]], 4, 12, 1.0, seed=1)    # 20 + 12 = 32
    assert mask[:4].sum(1).max() == 12
    trainer = sequence_logp(model, repeat([[5] * 20, [1]], 4), ids, mask, 1.0)[0]
    assert (trainer - logp).abs().max() < 1e-4
    with pytest.raises(ValueError, match="prompt 1 .* 21 tokens"):
        rollout.generate([[1], [5] * 21], 4, 12, 1.0, seed=1)


def test_padded_vocabulary_is_never_sampled():
    """Fault: embedding rows that stand for no token were drawn and could not be decoded."""
    model = tiny()
    model.embedding.data[12:] = 0
    baseline = synced(model).generate(PROMPTS, 4, 10, 1.0, seed=0)
    untied = tiny(tied=False)
    untied.load_state_dict(model.state_dict() | {"head": model.embedding.data.clone()})
    untied.head.data[12:] = 1e3 * torch.randn(4, 64)
    for temperature in (1.0, 0):
        ids, mask, logp = synced(untied).generate(PROMPTS, 4, 10, temperature, seed=0)
        assert ids.max() < 12
        assert temperature == 0 or torch.equal(ids, baseline[0])
        trainer = sequence_logp(untied, repeat(PROMPTS, 4), ids, mask, temperature)[0]
        assert (trainer - logp).abs().max() < 1e-4


# --- Chance ----------------------------------------------------------------------------------

def chi_square(counts, expected):
    """Deviations above the mean, in standard deviations of the statistic."""
    n = len(expected) - 1
    return ((((counts - expected)**2 / expected).sum() - n) / (2 * n)**0.5).item()


def test_sample_follows_the_probabilities(monkeypatch):
    logits = torch.tensor([-torch.inf, 1.0, 0.0, -3.0, -torch.inf, 2.0, -1.0, -torch.inf])
    for temperature in (1.0, 0.7):
        logp = (logits / temperature).log_softmax(-1)
        drawn = torch.cat([sample(logp.expand(4000, 8), 1.0, torch.arange(4000) + 10**12, t)
                           for t in range(5)]).bincount(minlength=8)
        assert (drawn[logp.isinf()] == 0).all()                    # zero probability: never
        real = ~logp.isinf()
        assert chi_square(drawn[real], 20000 * logp.exp()[real]) < 5
    assert sample(logp[None], 0, torch.tensor([0]), 0) == 5
    ends = torch.tensor([0, 1 - 2**-32], dtype=torch.float64)      # what `uniform` may give at most
    monkeypatch.setattr(module, "uniform", lambda seeds, t: ends)
    assert sample(logp.expand(2, 8), 1.0, torch.arange(2), 0).tolist() == [1, 6]


@pytest.mark.parametrize("what", ["rows", "steps", "batches"])
def test_uniform(what):
    """Uniform over rows, steps and the upper half of the seed, and neighbours are independent."""
    n = 4096
    u = {"rows": lambda: uniform(torch.arange(n) + 77, 5),
         "steps": lambda: torch.cat([uniform(torch.tensor([0]), t) for t in range(n)]),
         "batches": lambda: uniform((torch.arange(n) << 32) + 9, 0)}[what]()
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1 and u.unique().numel() == n
    assert chi_square((u * 64).long().bincount(minlength=64), torch.full((64,), n / 64)) < 5
    pairs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()
    assert chi_square(pairs.bincount(minlength=64), torch.full((64,), (n - 1) / 64)) < 5


def test_the_default_seed_is_not_special():
    """Row 0 of a run with seed 0: a first number of exactly 0 would always draw token 0."""
    assert all(1e-4 < uniform(torch.tensor([0]), t) < 1 - 1e-4 for t in range(3))


# --- Sync ------------------------------------------------------------------------------------

def test_sync_takes_over_new_weights_in_place():
    """Faults: stale weights (trl 5312), freed weights (vllm 48312), stale scales (sglang 18085)."""
    for recipe in RECIPES:
        model = tiny()
        rollout = synced(model, recipe)
        before = {name: (t.data_ptr(), t.clone()) for name, t in state(rollout).items()}
        for step in range(3):
            ids, mask, logp = rollout.generate(PROMPTS, 4, 10, 1.0, seed=step)
            args = repeat(PROMPTS, 4), ids, mask, 1.0
            if recipe == "bf16":
                assert (sequence_logp(model, *args)[0] - logp).abs().max() < 1e-4
            randomize(model, seed=step + 1)                        # a large step: now they differ,
            assert (sequence_logp(model, *args)[0] - logp).abs().max() > 0.5
            rollout.sync()                                         # and agree again after a sync
        assert before.keys() == state(rollout).keys()
        for name, t in state(rollout).items():
            assert t.data_ptr() == before[name][0], name
        assert sum(not torch.equal(t.float(), before[name][1].float())
                   for name, t in state(rollout).items()) > 10


@pytest.mark.parametrize("recipe", RECIPES)
def test_load_a_b_a_equals_a(recipe):
    """Whatever was in the sampler before leaves no trace, calibration included."""
    model = tiny()
    rollout = synced(model, recipe, 0.25)
    fresh, energy = copies(state(rollout)), copies(rollout.energy)
    randomize(model, 1)
    rollout.sync(PROMPTS)
    rollout.generate(PROMPTS, 2, 8, 1.0, seed=0)
    assert not same(state(rollout), fresh)
    randomize(model, 0)
    rollout.sync(PROMPTS)
    assert same(energy, rollout.energy) and same(state(rollout), fresh)
    a, b = (r.generate(PROMPTS, 2, 8, 1.0, seed=0) for r in (rollout, synced(model, recipe, 0.25)))
    assert all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainers_weights_are_the_rollouts(dtype):
    """W4A16 sees the rollout's codes bit for bit, after 1 and after 20 updates."""
    model = tiny(dtype)
    model.set_qat("w4a16")
    rollout = synced(model, "quads")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, mask, _ = rollout.generate(PROMPTS, 2, 8, 1.0, seed=0)
    old = copies(state(rollout))
    for step in range(1, 21):
        optimizer.zero_grad()
        sequence_logp(model, repeat(PROMPTS, 2), ids, mask, 1.0)[0].sum().backward()
        optimizer.step()
        if step in (1, 20):
            rollout.sync()
            for (layer, name), w in rollout.weights.items():
                values, s = qat.operand(getattr(model.blocks[layer].moe, name), dtype=dtype)
                assert torch.equal(values, nvfp4.block_values(nvfp4.NVFP4(*w), dtype))
                assert torch.equal(s, w[2]) and not torch.equal(w[0], old[f"{layer, name} 0"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_outliers_reach_the_rollout(recipe):
    """BF16 does not see them, NVFP4 does; RAC's blocks find them; both sides round one weight."""
    model = tiny()
    before = synced(model, recipe).generate(PROMPTS, 2, 8, 1.0, seed=0)
    model.set_outliers(64, 2)                                      # channels 0 and 32 of 64
    rollout = synced(model, recipe)
    after = rollout.generate(PROMPTS, 2, 8, 1.0, seed=0)
    same = all(torch.equal(a, b) for a, b in zip(before, after))
    assert same == (recipe == "bf16")
    for (layer, name), w in rollout.weights.items():
        if recipe in ("nvfp4", "rac"):
            values, s = qat.operand(model.blocks[layer].moe.weight(name))
            assert torch.equal(values, nvfp4.block_values(nvfp4.NVFP4(*w), values.dtype))
            assert torch.equal(s, w[2])
        if recipe == "rac":
            assert rollout.blocks[layer, name].tolist() == [0, 2]


def test_every_expert_keeps_its_own_scale():
    """Fault: gate's scale was used for up (vllm 54974), or one expert's for all."""
    model = tiny()
    for block in model.blocks:
        w = block.moe.gate_up.data
        w *= torch.tensor([0.01, 1.0, 100.0, 1.0])[:, None, None]
        w[:, 64:] = 1.25 * w[:, :64]
    packed, fp8 = synced(model, "nvfp4").weights, synced(model, "fp8").weights
    for layer, block in enumerate(model.blocks):
        for e, w in enumerate(block.moe.gate_up.data):
            mine = nvfp4.NVFP4(*(t[e] for t in packed[layer, "gate_up"]))
            assert torch.equal(mine.codes, nvfp4.quantize(w).codes)
            codes, scales = fp8[layer, "gate_up"]
            for values in (nvfp4.dequantize(mine), codes[e].float() * scales[e]):
                for half in (slice(64), slice(64, 128)):           # gate, up
                    assert (values[half] - w[half]).norm() < 0.12 * w[half].norm()


def test_sync_refuses_nan_and_overwrites_nothing():
    model = tiny()
    rollout = synced(model, "quads")
    before = copies(state(rollout))
    randomize(model, 1)
    model.blocks[1].moe.down.data[2, 5, 7] = torch.nan
    with pytest.raises(ValueError, match="blocks.1.moe.down"):
        rollout.sync()
    assert same(before, state(rollout))


def test_a_rollout_copies_no_expert_in_fp32(monkeypatch):
    """They are nearly all of a model, and a copy of a large one would not fit beside it."""
    model, copied = tiny(), []
    clone = torch.Tensor.__deepcopy__
    monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", lambda p, memo: copied.append(
        p.shape) or torch.nn.Parameter(clone(p.data, memo), p.requires_grad))
    rollout = Rollout(model, "bf16")
    assert model.embedding.shape in copied and model.blocks[0].moe.down.shape not in copied
    assert all(p.requires_grad for p in model.parameters())        # the trainer's stay as they are
    assert not any(p.requires_grad for p in rollout.model.parameters())
    assert not hasattr(rollout.model.blocks[0].moe, "down") and hasattr(model.blocks[0].moe, "down")


def test_errors_say_what_to_do():
    model = tiny()
    with pytest.raises(ValueError, match="unknown recipe 'fp4'.*quads"):
        Rollout(model, "fp4")
    for ratio in (-0.1, 1.1):
        with pytest.raises(ValueError, match="--rac-ratio, --rac-coverage"):
            Rollout(model, "quads", ratio)
    with pytest.raises(RuntimeError, match="sync"):
        Rollout(model, "bf16").generate(PROMPTS, 1, 4, 1.0, 0)
    with pytest.raises(ValueError, match="calibration_ids"):
        Rollout(model, "quads").sync()
    rollout = synced(model)
    with pytest.raises(ValueError, match="prompt 1 "):
        rollout.generate([[1], []], 1, 4, 1.0, 0)
    for numbers in ((0, 4, 1.0), (1, 0, 1.0), (1, 4, -1.0)):
        with pytest.raises(ValueError, match="temperature >= 0, group >= 1"):
            rollout.generate(PROMPTS, *numbers, 0)
    assert rollout.generate([], 4, 6, 1.0, 0)[0].shape == (0, 6)


def test_coverage_chooses_anew_in_the_same_memory():
    """Fault it guards against: a captured graph that reads a list of another length."""
    model = tiny()
    rollout = Rollout(model, "quads", rac_coverage=0.6)
    rollout.sync(PROMPTS)
    pointers, counts = {k: b.data_ptr() for k, b in rollout.blocks.items()}, set()
    for step in range(3):
        rollout.generate(PROMPTS, 4, 10, 1.0, seed=step)
        randomize(model, seed=step + 1)
        rollout.sync()
        for key, blocks in rollout.blocks.items():
            energy, KB = rollout.energy[key], len(rollout.energy[key])
            held = energy[blocks[blocks < KB]].sum() / energy.sum()
            assert blocks.data_ptr() == pointers[key] and len(blocks) == KB and held >= 0.6
            counts.add(int((blocks < KB).sum()))
    assert max(counts) < 4 and min(counts) > 0


def test_a_failed_calibration_leaves_no_half_synced_rollout():
    """Else `quads` would go on as plain NVFP4 without a word."""
    rollout = Rollout(tiny(), "quads")
    with pytest.raises(ValueError):
        rollout.sync([[1] * 40])                                   # longer than the context
    assert rollout.measuring is None
    with pytest.raises(RuntimeError):
        rollout.generate(PROMPTS, 1, 4, 1.0, 0)


# --- NVFP4 and RAC ---------------------------------------------------------------------------

@pytest.mark.parametrize("recipe", RECIPES)
def test_a_token_does_not_depend_on_its_batch(recipe):
    """Fault: one scale for the batch (vllm 49060): a row of 1e6 would erase the others."""
    rollout = synced(tiny(), recipe)
    blocks = copies(rollout.blocks)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[5] *= 1e6
    for name in ("gate_up", "down"):
        together = rollout.product(1, x, name, torch.tensor([3, 0, 3, 0]))
        for row in range(6):
            counts = torch.tensor([row < 3, 0, row >= 3, 0]).long()
            alone = rollout.product(1, x[row:row + 1], name, counts)[0]
            # 1e-5: another order of summation. Another code would be 1e-2.
            assert (alone - together[row]).norm() < 1e-5 * alone.norm()
    rollout.generate(PROMPTS, 2, 6, 1.0, seed=0)
    assert same(blocks, rollout.blocks)                            # fixed until the next sync


def test_each_matrix_has_its_own_blocks():
    """The product is that of rac.reconstruct, with the selection of this layer and this matrix."""
    rollout = synced(tiny(), "rac", 0.25)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for i, ((layer, name), w) in enumerate(rollout.weights.items()):
        rollout.blocks[layer, name].fill_(i)
        y = rollout.product(layer, x, name, torch.tensor([0, 5, 0, 0])).double()
        exact = nvfp4.dequantize(nvfp4.NVFP4(*w)).double()[1]
        for block in range(4):
            expected = rac.reconstruct(x, torch.tensor([block])).double() @ exact.T
            assert ((y - expected).norm() < 1e-5 * y.norm()) == (block == i)


def test_rac_measures_the_last_rollout():
    model = tiny()
    rollout = synced(model, "quads", 0.25)
    assert all(len(b) == 1 for b in rollout.blocks.values()) and len(rollout.blocks) == 4
    before = copies(rollout.energy)
    rollout.generate(PROMPTS, 2, 8, 1.0, seed=0, measure=False)    # an evaluation
    assert same(before, rollout.energy)
    energies = []
    for _ in range(2):                                             # replaced, not added up
        ids, mask, _ = rollout.generate(PROMPTS, 2, 8, 1.0, seed=0)
        energies.append(copies(rollout.energy))
        sequence_logp(rollout.model, repeat(PROMPTS, 2), ids, mask, 1.0)       # is only scored
        assert same(energies[-1], rollout.energy)
    assert same(*energies) and not same(before, energies[0])
    rollout.energy[1, "down"][2] = 1e9                             # the next sync follows it
    rollout.sync()
    assert rollout.blocks[1, "down"].tolist() == [2]
    resumed = Rollout(model, "quads", 0.25)                        # as train.py --resume does
    resumed.energy = copies(rollout.energy)
    resumed.sync()
    assert same(state(resumed), state(rollout))


def test_fp8_quantizer_by_hand():
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()   # 0 .. 448
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    x[1], x[2], x[3], x[4, 3] = 0, x[2] * 1e-6, x[3] * 1e30, -50
    codes, scales = module.fp8_quantize(x)
    assert scales.shape == (7, 1) and scales[1] == 1 and (codes[1].float() == 0).all()
    for row in (0, 2, 3, 4, 5, 6):
        assert scales[row] == x[row].abs().max() / 448
        v = x[row] / scales[row]
        nearest = (v.abs()[:, None] - grid).abs().min(1).values    # distance, (48,)
        assert torch.equal((v - codes[row].float()).abs(), nearest)
    w = torch.randn(3, 8, 48) * torch.tensor([0.01, 1, 100])[:, None, None]
    w_codes, w_scales = module.fp8_quantize(w)
    y = module.fp8_grouped_matmul(x, w_codes, w_scales, torch.tensor([3, 0, 4]))
    a, b = codes.double() * scales, w_codes.double() * w_scales    # what they stand for
    expected = torch.cat([a[:3] @ b[0].T, a[3:] @ b[2].T])
    assert ((y - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all()


def test_the_gap_shrinks_as_the_paper_says():
    """naive > QAT > RAC at 12.5% > 25% > .. > 100%: mean of three random models."""
    import bench
    total = {}
    for seed in range(3):
        rng = random.Random(seed)
        prompts = [[rng.randrange(512) for _ in range(rng.randint(16, 48))] for _ in range(8)]
        for pair, row in bench.gaps(bench.random_model(seed), prompts, 16, seed, group=2).items():
            total[pair] = total.get(pair, 0) + row["gap_mean"] / 3
    order = [total["nvfp4", "none"], total["nvfp4", "w4a16"],
             *(total[f"nvfp4 + rac {r}%", "w4a16"] for r in ("12.5", "25", "50", "75", "100"))]
    assert all(a > 1.01 * b for a, b in zip(order, order[1:])), order
    assert total["bf16", "none"] < 1e-5 < total["fp8", "none"] < total["nvfp4", "none"]


def test_two_threads_give_the_same_gradient_bits_every_time():
    """RL.md 4.23: else a resumed run could not equal an uninterrupted one on two cores."""
    threads, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = MoETransformer(PRESETS["cpu"])
    model.set_qat("w4a16")
    prompts = torch.randint(0, 500, (64, 40), generator=generator).tolist()
    ids = torch.randint(0, 500, (64, 40), generator=generator)
    weights, gradients = torch.linspace(-1, 1, 64)[:, None], []
    torch.set_num_threads(2)
    try:
        for _ in range(4):
            model.zero_grad()
            logp, _, _ = sequence_logp(model, prompts, ids, torch.ones(64, 40).bool(), 1.0)
            (logp * weights).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    finally:
        torch.set_num_threads(threads)
    for other in gradients[1:]:
        assert all(map(torch.equal, gradients[0], other))
