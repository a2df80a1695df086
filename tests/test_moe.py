"""Tests of moe.py: python -m pytest tests/test_moe.py (seconds, one CPU thread, no download).

"Fault" in a docstring: a defect that a public trainer or engine once shipped.
"""
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import moe  # noqa: E402
from moe import PRESETS, Config, MoETransformer  # noqa: E402

torch.set_num_threads(1)
MODES = ["none", "w4a16", "w4a4"]


def tiny(dtype=torch.float32, **changes):
    """A small model whose weights are large enough that its logits differ."""
    sizes = dict(vocab_size=64, real_vocab=64, end_id=63, d_model=32, layers=2, heads=4, kv_heads=2,
                 head_dim=16, experts=4, active=2, expert_width=48, max_seq_len=24)
    torch.manual_seed(0)
    model = MoETransformer(Config(**(sizes | changes)), dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1     # norms must matter too
                    else 2 * torch.randn_like(p) * p.shape[-1]**-0.5)
    return model


def layer(mode="none", **changes):
    layer = tiny(**changes).blocks[0].moe
    layer.qat_mode = mode
    return layer


def some_ids(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


def gradients(layer, run, x):
    """Output and gradients (of x, router, gate_up, down) of a random projection of run(x)."""
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = run(x)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    (y * direction.to(y.dtype)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def close(a, b, tolerance=1e-5):
    return (a - b).norm() <= tolerance * b.norm()


# --- The experts -----------------------------------------------------------------------------

@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("active", [1, 2, 3])
def test_grouped_equals_loop(mode, active):
    m, x = layer(mode, active=active), torch.randn(37, 32)
    assert close(m(x), layer("none", active=active)(x)) == (mode == "none")     # it does something
    results = zip(gradients(m, m, x), gradients(m, m.loop_ref, x))
    for name, (fast, slow) in zip(("y", "x", "router", "gate_up", "down"), results):
        if name == "router" and active == 1:                  # its weight is p / p = 1, always
            assert max(fast.norm(), slow.norm()) < 1e-3
        else:
            assert slow.norm() > 1 and close(fast, slow), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_to_one_expert(mode, dtype):
    """Fault: experts without a token made NaN gradients (MSLK 158). Theirs are exactly 0."""
    m = layer(mode, active=1)
    x = torch.randn(9, 32).abs()
    m.router.data.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0])[:, None].expand(4, 32))
    for run in (m, m.loop_ref):
        results = gradients(m, run, x.to(dtype))
        assert (m.chosen == 2).all()
        assert all(r.isfinite().all() for r in results)
        for grad in (m.gate_up.grad, m.down.grad):
            assert (grad[[0, 1, 3]] == 0).all() and grad[2].norm() > 0


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens(mode):
    m = layer(mode)
    y, *grads = gradients(m, m, torch.zeros(0, 32))
    assert y.shape == (0, 32) and all((g == 0).all() for g in grads)
    assert m.balance == 0


def test_router_is_fp32_and_its_ties_go_to_the_lower_expert():
    """Fault: bf16 router ties chose other experts in another batch (AstrAI 57)."""
    m = layer()
    m.router.data.zero_()
    m.router.data[:, 0] = torch.tensor([1.0, 10.0, 10.0001, 10.0])    # the three are one in bf16
    x = torch.randn(33, 32, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1
    for dtype in (torch.float32, torch.bfloat16):
        for S in (1, 2, 7, 33):
            weights, chosen = m.route(x[:S].to(dtype))
            assert weights.dtype == torch.float32 and close(weights.sum(1), torch.ones(S))
            assert chosen.tolist() == [[2, 1]] * S
    m.router.data.normal_()
    m.router.data[2] = m.router.data[0]                               # exact ties, any input
    batch, alone = m.route(x)[1], torch.cat([m.route(row)[1] for row in x.split(1)])
    assert torch.equal(batch, alone) and (batch == 0).any()
    for ids in batch.tolist():
        assert 2 not in ids or 0 in ids and ids.index(0) < ids.index(2)


# --- Outliers --------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strength, blocks", [(64, 1), (64, 2), (32, 2)])
def test_outliers_leave_the_function_bit_for_bit(dtype, strength, blocks):
    """Logits and gradients, if the strength is a power of two; what NVFP4 makes of it differs."""
    model, ids, inputs = tiny(dtype), some_ids(3, 20), {}

    def results(mode):
        model.set_qat(mode)
        model.zero_grad(set_to_none=True)
        logits = model(ids)
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters())]

    plain, rounded = results("none"), results("w4a16")
    product = model.blocks[0].moe.product
    model.blocks[0].moe.product = lambda x, name, counts: inputs.setdefault(name, []).append(
        x.detach().float()) or product(x, name, counts)
    results("none")
    model.set_outliers(strength, blocks)
    assert all(torch.equal(a, b) for a, b in zip(plain, results("none")))
    assert not close(results("w4a16")[0], rounded[0], 1e-3)
    # One channel in each of so many blocks: `blocks` of 2 before gate_up, the same share of 3.
    for name, count in (("gate_up", blocks), ("down", {1: 2, 2: 3}[blocks])):
        before, after = inputs[name][:2]
        channels = (after != before).any(0).nonzero()[:, 0]
        assert torch.equal(after[:, channels], strength * before[:, channels])
        assert len(channels) == count and len(set((channels // 16).tolist())) == count
    model.set_outliers(0, blocks)                             # and out again
    assert all(torch.equal(a, b) for a, b in zip(rounded, results("w4a16")))


def test_outliers_that_make_no_sense():
    for wrong in ((64, 3), (64, 0), (0.5, 1), (float("nan"), 1)):
        with pytest.raises(ValueError, match=f"--outliers {wrong[0]} .*1 to 2 blocks"):
            tiny().set_outliers(*wrong)


# --- The load-balancing loss -----------------------------------------------------------------

def test_load_balancing_loss():
    even = torch.full((8, 4), 0.25)
    balanced = torch.arange(16).remainder(4).view(8, 2)
    assert moe.load_balancing_loss(even, balanced).item() == 1
    all_on_one = torch.tensor([[1.0, 0, 0, 0]]).expand(8, 4)
    assert moe.load_balancing_loss(all_on_one, torch.zeros(8, 1).long()).item() == 4
    probs, chosen = torch.rand(5, 4), torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1], [2, 1]])
    by_hand = 4 * sum((chosen == e).sum() / 10 * probs[:, e].mean() for e in range(4))
    assert close(moe.load_balancing_loss(probs, chosen), by_hand)


def test_load_balancing_loss_reaches_the_router():
    """Fault: the auxiliary loss had no path to the router (Automodel 1408)."""
    model, ids = tiny(), some_ids(3, 10)
    valid = torch.arange(10) < torch.tensor([10, 4, 7])[:, None]

    def router_gradient(ids, valid, weight):
        model.zero_grad(set_to_none=True)
        model(ids, valid=valid)
        (weight * model.balance_loss()).backward()
        return model.balance_loss().item(), [b.moe.router.grad.clone() for b in model.blocks]

    loss, once = router_gradient(ids, valid, 1.0)
    assert all(g.norm() > 0 for g in once)
    assert all(close(g, 3 * h) for g, h in zip(router_gradient(ids, valid, 3.0)[1], once))
    other = torch.where(valid, ids, 5)                                # other padding, and more
    other, wide = torch.nn.functional.pad(other, (0, 6)), torch.nn.functional.pad(valid, (0, 6))
    loss_padded, padded = router_gradient(other, wide, 1.0)
    assert loss_padded == pytest.approx(loss, rel=1e-5)
    assert all(close(g, h) for g, h in zip(padded, once))
    assert router_gradient(ids, None, 1.0)[0] != pytest.approx(loss, rel=1e-3)


# --- The model -------------------------------------------------------------------------------

def qwen3_moe_ref(model, ids):
    """Qwen3-MoE written again, token by token, float64: ids (T,) -> logits (T, V)."""
    c = model.config
    p = {name: value.detach().double() for name, value in model.named_parameters()}

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def rope(x, t):                                                   # (heads, head_dim), int
        half = c.head_dim // 2
        angle = t * c.rope_theta ** (-2 * torch.arange(half, dtype=torch.float64) / c.head_dim)
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half).double(), angle)
        return torch.cat([z.real, z.imag], -1)

    x = p["embedding"][ids]                                           # (T, D)
    for i in range(c.layers):
        w = {name.split(".", 2)[2]: v for name, v in p.items() if name.startswith(f"blocks.{i}.")}
        keys, values, rows = [], [], []
        for t, h in enumerate(norm(x, w["attention_norm"])):          # (D,)
            q, k, v = ((w[f"attention.w{n}"] @ h).view(-1, c.head_dim) for n in "qkv")
            keys.append(rope(norm(k, w["attention.k_norm"]), t))
            values.append(v)
            q, out = rope(norm(q, w["attention.q_norm"]), t), []
            for head in range(c.heads):
                g = head // (c.heads // c.kv_heads)
                score = torch.stack([q[head] @ k[g] for k in keys]) / math.sqrt(c.head_dim)
                weight = score.exp() / score.exp().sum()              # (t + 1,)
                out.append(sum(a * v[g] for a, v in zip(weight, values)))
            rows.append(w["attention.wo"] @ torch.cat(out))
        x, rows = x + torch.stack(rows), []
        for h in norm(x, w["moe_norm"]):                              # (D,)
            probability = (w["moe.router"] @ h).exp()
            probability = probability / probability.sum()
            best = sorted(range(c.experts), key=lambda e: -probability[e])[:c.active]
            y = 0
            for e in best:
                gate, up = (w["moe.gate_up"][e] @ h).split(c.expert_width)
                y = y + probability[e] / sum(probability[b] for b in best) * (
                    w["moe.down"][e] @ (gate / (1 + (-gate).exp()) * up))
            rows.append(y)
        x = x + torch.stack(rows)
    return norm(x, p["norm"]) @ p["embedding" if c.tied else "head"].T


@pytest.mark.parametrize("tied", [True, False])
def test_the_architecture_is_qwen3_moe(tied):
    model, ids = tiny(tied=tied, heads=6, experts=5), some_ids(2, 13)
    logits = model(ids)
    assert logits.shape == (2, 13, 64) and logits.dtype == torch.float32 and logits.std() > 0.5
    for row, expected in zip(logits, (qwen3_moe_ref(model, row) for row in ids)):
        assert close(row, expected)
    assert ("head" in model.state_dict()) != tied


@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_nothing(mode):
    """Outputs and gradients of real tokens, whatever the padding holds, and `select` is a slice."""
    model, ids = tiny(), some_ids(3, 12)
    model.set_qat(mode)
    valid = torch.arange(12) < torch.tensor([12, 5, 1])[:, None]
    grads = []
    for variant in ("alone", "batch", "other padding", "selected"):
        model.zero_grad(set_to_none=True)
        if variant == "alone":
            logits = torch.cat([model(row[ok][None])[0] for row, ok in zip(ids, valid)])
        elif variant == "selected":
            logits = model(ids, valid=valid, select=valid)
            part = valid & (torch.arange(12) > 2)
            assert close(model(ids, valid=valid, select=part), model(ids, valid=valid)[part])
        else:
            logits = model(ids if variant == "batch" else ids.where(valid, 7), valid=valid)[valid]
        assert variant == "alone" or model.routes().shape == (18, 2, 2)
        logits.square().sum().backward()
        grads.append([logits.detach()] + [p.grad for p in model.parameters()])
    for other in grads[1:]:
        # Under w4a4 the last bit of a sum may push an activation over a rounding tie.
        assert all(close(a, b, 0.2 if mode == "w4a4" else 1e-4) for a, b in zip(other, grads[0]))


def test_cached_forward_equals_uncached():
    """Prefill of 4, 6 and 1 tokens, then one at a time; unused slots hold 1e4 (unsloth 7428)."""
    model, ids, start = tiny(), some_ids(3, 24), torch.tensor([4, 6, 1])
    full = model(ids)                                                 # (3, 24, V)
    cache = [(torch.full((3, 2, 24, 16), 1e4), torch.full((3, 2, 24, 16), 1e4)) for _ in range(2)]
    with torch.no_grad():
        position = torch.arange(6).expand(3, 6)
        logits = model(ids[:, :6], position, position < start[:, None], cache=cache)
        for row, n in enumerate(start):
            assert close(logits[row, :n], full[row, :n])
        for t in range(18):
            at = start[:, None] + t                                   # (3, 1)
            logits = model(ids.gather(1, at), at, cache=cache)[:, 0]
            assert close(logits, full[torch.arange(3), at[:, 0]])


def test_context_overflow_raises():
    model = tiny()
    assert model(some_ids(1, 24)).isfinite().all()
    with pytest.raises(ValueError, match="25 tokens .* 24"):
        model(some_ids(1, 25))


def test_bf16_stays_close():
    """Masters stay fp32, logits too; only the computation is bf16."""
    exact, model, ids = tiny(), tiny(torch.bfloat16), some_ids(4, 20)
    logits = model(ids)
    logits.square().mean().backward()
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).float().mean() > 0.5         # not rounded after all
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    log_ratio = logits.log_softmax(-1) - exact(ids).log_softmax(-1)   # a flipped expert is rare
    assert 1e-4 < log_ratio.abs().median() < 0.1


@pytest.mark.parametrize("mode", MODES)
def test_recomputed_blocks_give_the_same_gradient_bits(mode):
    """Statistics stay those of the forward pass, whatever the second run of a block sets."""
    model, ids = tiny(), some_ids(3, 20)
    model.set_qat(mode)
    valid = torch.arange(20) < torch.tensor([20, 7, 13])[:, None]                 # (B, T)
    results, runs = [], []
    for block in model.blocks:
        block.moe.register_forward_pre_hook(lambda *_: runs.append(1))
    for model.recompute in (False, True):
        model.zero_grad()
        logits = model(ids, valid=valid)
        balance, routes = model.balance_loss(), model.routes()
        kept = [(block.moe.chosen, block.moe.balance) for block in model.blocks]
        (logits[valid].square().mean() + 0.01 * balance).backward()
        for block, (chosen, loss) in zip(model.blocks, kept):
            assert block.moe.chosen is chosen and block.moe.balance is loss
        results.append([logits, balance, routes, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert len(runs) == 2 + 4 and model.size() == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(ids, valid=valid), results[0][0])


def test_recomputed_blocks_keep_little_for_the_backward_pass():
    """Bytes that autograd holds between forward and backward."""
    kept = []
    for recompute in (False, True):
        model, seen = tiny(layers=4), {}
        model.recompute = recompute

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(some_ids(3, 20)).sum()
        kept.append(sum(storage.nbytes() for storage in seen.values()))
    assert kept[1] < 0.4 * kept[0]


def test_presets_have_the_stated_sizes():
    for name, low, high in (("cpu", 0.5e6, 0.6e6), ("gpu", 80e6, 85e6)):
        with torch.device("meta"):
            total = sum(p.numel() for p in MoETransformer(PRESETS[name]).parameters())
        assert low < total < high
        c = PRESETS[name]
        assert c.end_id < c.real_vocab <= c.vocab_size and c.heads % c.kv_heads == 0
        assert c.d_model % 16 == c.expert_width % 16 == 0             # blocks of NVFP4
