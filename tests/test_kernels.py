"""Tests of the Triton kernels of nvfp4.py and rac.py: python -m pytest tests/test_kernels.py

Without a GPU they run in Triton's interpreter (conftest.py), on a few small shapes, and are also
compiled for four GPUs that need not be there (compile_kernels.py). With a GPU they run compiled.
"Fault" in a docstring: a defect that a public NVFP4 implementation once shipped.
"""
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import moe  # noqa: E402
import nvfp4  # noqa: E402
import rac  # noqa: E402
from nvfp4 import NVFP4, block_values, dequantize, quantize  # noqa: E402

torch.set_num_threads(1)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PATHS = ["emulated", "native"] if GPU and torch.cuda.get_device_capability()[0] >= 10 else \
    ["emulated"]
# Compute capability: bytes of shared memory that one program can have.
TARGETS = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU: Triton's interpreter has no PTX")
NO_TRITON = "Triton is not installed, so there are no kernels to test"
PAD = 1 << 16             # bytes on either side of what a kernel may touch


def shapes():
    """(E, experts of a token, N, K) of every product in the presets and in Qwen3-30B-A3B."""
    for c in moe.PRESETS.values():
        yield c.experts, c.active, 2 * c.expert_width, c.d_model
        yield c.experts, c.active, c.d_model, c.expert_width
    yield from ((128, 8, 1536, 2048), (128, 8, 2048, 768))


def tiles_in_use(native, memory):
    """What tile_sizes says for them, at any number of tokens up to 8192."""
    return {nvfp4.tile_sizes(tokens * active, E, N, native, memory)
            for E, active, N, _ in shapes() for tokens in range(1, 8193)}


TILES = sorted(set.union(*(tiles_in_use(False, memory) for memory in TARGETS.values())))


def surrounded(t):
    """The same tensor between PAD bytes of 0xFF: a NaN in every type, a scale byte that is none."""
    memory = torch.full((t.nbytes + 2 * PAD,), 0xFF, dtype=torch.uint8, device=t.device)
    inside = memory[PAD:PAD + t.nbytes].view(t.dtype).view(t.shape)
    inside.copy_(t)
    return inside


@pytest.fixture
def kernels(monkeypatch, request):
    """The kernels do the work; what they are to fill holds 0xFF first, and nothing beside it may
    change. Gives the list of those memories."""
    if nvfp4.triton is None:
        pytest.skip(NO_TRITON)
    memories, empty = [], torch.empty

    def poisoned(*size, **options):
        t = surrounded(empty(*size, **options))
        t.view(-1).view(torch.uint8).fill_(0xFF)
        memories.append(t)
        return t

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setenv("NVFP4_PATH", getattr(request, "param", "emulated"))
    nvfp4.kernel_path.cache_clear()
    yield memories
    nvfp4.kernel_path.cache_clear()
    for t in memories:
        around = empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        assert (around[:PAD] == 0xFF).all() and (around[len(around) - PAD:] == 0xFF).all()


on_each_path = pytest.mark.parametrize("kernels", PATHS, indirect=True)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*blocks):
    return torch.tensor(blocks, dtype=torch.long)


def assert_same(a, b):
    """The same bytes, on whatever device they are."""
    for t, other in zip(a, b):
        assert t.shape == other.shape and t.dtype == other.dtype
        t, other = (part.cpu().flatten().view(torch.uint8) for part in (t, other))
        assert torch.equal(t, other)


def worst_row(y, exact):
    return ((y.cpu().double() - exact).norm(dim=1) / exact.norm(dim=1)).nan_to_num(0).max().item()


# --- The quantizer -------------------------------------------------------------------------------

def difficult_rows(K, dtype):
    """(11, K): every kind of row that once broke a quantizer."""
    generator = torch.Generator().manual_seed(K)
    rows = torch.randn(11, K, generator=generator).clamp(-3, 3)
    rows *= torch.tensor([7, 5.25, 1, 1, 1e-30, 1e-37, 1, 1, 1, 1, 1])[:, None] / rows.abs().amax(
        1, keepdim=True)                                      # (faults 2 and 19: 7 and 5.25)
    rows[2] = 0
    rows[3].view(-1, 16)[::2] = 0
    rows[6] *= min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    # s_global is 1 in the next two. Block scales 448 and 1: ties of codes ...
    rows[7] = torch.randint(-24, 25, (K,), generator=generator) / 4
    rows[7].view(-1, 16)[:, 0] = 6
    rows[7].view(-1, 16)[::2] *= 448
    # ... and ties of block scales, normal and subnormal ones.
    ties = torch.tensor([17, 19, 25 / 64, 2**-6, 3 * 2**-6, 7 * 2**-6, 15 * 2**-6]) / 16
    rows[8].view(-1, 16)[:] *= 6 * ties.repeat(K)[:K // 16, None] / 7
    rows[8].view(-1, 16)[:, 3] = 6 * ties.repeat(K)[:K // 16]
    rows[8, 0] = 2688
    rows[9, ::3], rows[9, -1] = -0.0, -100                    # fault 16: amax without abs
    rows[10] = (11 * rows[10]).exp() * rows[10].sign()        # small blocks: scale bytes 0x00..0x07
    if dtype == torch.bfloat16 and not GPU:                   # the interpreter misreads subnormals
        rows[rows.abs() < 2.0**-126] = 0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("K, blocks", [(16, ()), (16, (0,)), (48, (1,)), (144, (0, 1, 4, 7, 8)),
                                       (272, range(17)), (768, range(1, 48, 2))])
def test_quantizer_bytes(kernels, K, blocks, dtype):
    """Both passes and the GEMM's operand, bit for bit those of the plain functions."""
    x, blocks = difficult_rows(K, dtype), ids(*blocks)
    q, r, _, operand = rac.compensate_kernels(x.to(DEVICE), blocks.to(DEVICE), False, True)
    q_ref, r_ref, _ = rac.compensate_ref(x, blocks)
    assert_same(q, q_ref)
    assert_same(r, r_ref)
    assert_same([operand], [nvfp4.fold(q_ref, r_ref, blocks)])


@pytest.mark.parametrize("blocks", [(), (1, 4, 7), range(9)])
def test_places_that_coverage_left_over(kernels, blocks):
    """K/16 fills the list of chosen blocks up. It adds nothing: scale 0, and the same operand."""
    x, S = randn(7, 144).bfloat16().to(DEVICE), len(blocks)
    filled = ids(*blocks, *[9] * (9 - S)).to(DEVICE)
    want = rac.compensate_kernels(x, ids(*blocks).to(DEVICE), True, True)
    q, r, energy, operand = rac.compensate_kernels(x, filled, True, True)
    assert_same((*q, energy, operand), (*want[0], *want[2:]))
    assert_same((r.codes[:, :8 * S].contiguous(), r.scales[:, :S].contiguous()), want[1][:2])
    assert r.scales.shape == (7, 9) and (r.scales[:, S:].float() == 0).all()
    w, counts = quantize(randn(2, 48, 144).to(DEVICE)), torch.tensor([3, 4], device=DEVICE)
    y, full = (rac.compensated_grouped_matmul(x, w, counts, chosen)[0]
               for chosen in (ids(*blocks).to(DEVICE), filled))
    assert (y - full).norm() < 1e-6 * y.norm()


def test_quantizer_at_every_number_of_rows(kernels):
    """Faults 6 and 18: padding, or an output that stays unwritten, at some M."""
    for M in range(1, 131) if GPU else (1, 2, 17, 33, 130):
        x = randn(M, 32, seed=M)
        q, r, _ = rac.compensate(x.to(DEVICE), ids(1).to(DEVICE))
        assert_same((*q, *r), (*(ref := rac.compensate_ref(x, ids(1)))[0], *ref[1]))


def test_quantizer_of_strided_rows(kernels):
    """Fault 9: contiguous memory assumed."""
    x, blocks = randn(6, 144).bfloat16(), ids(0, 2)
    for view in (x[:, :64], x[::2], x[:, :4].repeat(8, 1).t(), x[:1].expand(3, 144), x[:, 1:49]):
        q, r, _, operand = rac.compensate_kernels(view.to(DEVICE), blocks.to(DEVICE), True, True)
        q_ref, r_ref, _ = rac.compensate_ref(view.contiguous(), blocks)
        assert_same((*q, *r, operand), (*q_ref, *r_ref, nvfp4.fold(q_ref, r_ref, blocks)))


@pytest.mark.parametrize("blocks", [(), (0, 2, 5)])
def test_energy(kernels, blocks):
    """Of the whole residual, whatever blocks are chosen, and only if asked for."""
    x, blocks = randn(7, 144) * randn(7, 144, seed=1).exp(), ids(*blocks)
    energy, none = (rac.compensate_kernels(x.to(DEVICE), blocks.to(DEVICE), measure, False)[2]
                    for measure in (True, False))
    torch.testing.assert_close(energy.cpu(), rac.compensate_ref(x, blocks)[2], rtol=1e-6, atol=0)
    assert none is None


def test_poison_stays_in_its_row(kernels):
    """The kernels do not look for NaN or infinity: such a row may not pass for a finite one."""
    x, blocks, counts = randn(6, 48), ids(0, 2).to(DEVICE), torch.tensor([4, 2], device=DEVICE)
    w = quantize(randn(2, 24, 48).to(DEVICE))
    bad = x.clone()
    bad[1, 20], bad[3, 47], bad[4, 0] = float("nan"), float("inf"), -float("inf")
    (clean, _), (y, _) = (rac.compensated_grouped_matmul(t.to(DEVICE), w, counts, blocks)
                          for t in (x, bad))
    q, r, _ = rac.compensate(bad.to(DEVICE), blocks)
    assert not dequantize(q)[[1, 3, 4]].isfinite().any() and not y[[1, 3, 4]].isfinite().any()
    q_ref, r_ref, _ = rac.compensate_ref(x[[0, 2, 5]], blocks.cpu())
    assert_same([t[[0, 2, 5]] for t in (*q, *r)], (*q_ref, *r_ref))
    assert torch.equal(y[[0, 2, 5]], clean[[0, 2, 5]])


def test_shapes_at_the_edge(kernels):
    """K that is no multiple of 16 is refused with words; no rows give empty tensors."""
    for K in (0, 15, 40):
        with pytest.raises(ValueError, match=f"K = {K} "):
            rac.compensate(torch.zeros(2, K, device=DEVICE), ids().to(DEVICE))
    x, w = torch.zeros(0, 48, device=DEVICE), quantize(randn(2, 24, 48).to(DEVICE))
    for blocks in (ids().to(DEVICE), ids(0, 2).to(DEVICE)):
        q, r, energy = rac.compensate(x, blocks)
        q_ref, r_ref, _ = rac.compensate_ref(x.cpu(), blocks.cpu())
        assert_same((*q, *r, energy), (*q_ref, *r_ref, torch.zeros(3)))
        y, _ = rac.compensated_grouped_matmul(x, w, torch.zeros(2, device=DEVICE).int(), blocks)
        assert y.shape == (0, 24)


# --- The schedule --------------------------------------------------------------------------------

@pytest.mark.parametrize("tokens", [16, 64])
def test_schedule(kernels, monkeypatch, tokens):
    """Every row in one tile, in order; what is left over says so (else a program runs wild)."""
    def full(*size, **options):
        return torch.full(*size, 0x7F7F7F7F, **options)       # (0xFF in each byte is "no tile")

    monkeypatch.setattr(torch, "empty", full)
    for E in (1, 2, 3, 8, 100):
        for share in range(5):
            generator = torch.Generator().manual_seed(8 * E + share)
            counts = torch.randint(3 * tokens, (E,), generator=generator)
            counts *= torch.rand(E, generator=generator) < share / 4
            expected, first = [], 0
            for e, count in enumerate(counts.tolist()):
                end = first + count
                expected += [[e, m, end] for m in range(first, end, tokens)]
                first = end
            for M in (first, first + 2 * tokens):             # as many as promised, and fewer
                tiles = nvfp4.schedule(counts.to(DEVICE), M, tokens).tolist()
                assert tiles[:len(expected)] == expected
                assert all(tile[0] == -1 for tile in tiles[len(expected):])


# --- The product ---------------------------------------------------------------------------------

def experts(E, N, K):
    """Fault 3: their global scales are all unlike; the last but one is zero."""
    size = 10.0 ** torch.arange(-2, 2 * E - 2, 2)
    size[E - 2] = 0
    return quantize(randn(E, N, K, seed=1) * size[:, None, None])


def use_tile(monkeypatch, tiles):
    """A tile of the emulation (a native product has its own ones), if the GPU ever uses it."""
    if GPU and tiles not in tiles_in_use(False, torch.cuda.get_device_properties(
            DEVICE).shared_memory_per_block_optin):
        pytest.skip("this tile needs more shared memory than this GPU has")
    if nvfp4.kernel_path(DEVICE)[0] == "emulated":
        monkeypatch.setattr(nvfp4, "tile_sizes", lambda *_: tiles)


def check_product(counts, N, K, blocks, dtype=torch.float32):
    """Against float64, row by row; what may not be read lies beside 0xFF (fault 10)."""
    M, w, native = sum(counts), experts(len(counts), N, K), nvfp4.kernel_path(DEVICE)[0] == "native"
    x = randn(M, K) * 10.0 ** (torch.arange(M)[:, None] % 5)
    x, r, _ = rac.compensate_ref(x, blocks)
    a, second = (block_values(q).unflatten(-1, (-1, 16)) for q in (x, r))
    a = a.index_add(1, blocks, second).flatten(1)
    a = (a if native else a.half()).double() * x.global_scale.double()
    exact = torch.cat([p @ w_e.T for p, w_e in zip(a.split(counts), dequantize(w).double())])
    x, r, w = (NVFP4(*(surrounded(t.to(DEVICE)) for t in q)) for q in (x, r, w))
    blocks = surrounded(blocks.to(DEVICE))
    y = nvfp4.grouped_matmul(x, w, torch.tensor(counts, device=DEVICE), dtype, r, blocks,
                             None if native else surrounded(nvfp4.fold(x, r, blocks)))
    assert y.dtype == dtype and y.shape == (M, N) and y.isfinite().all()
    assert not y.cpu()[exact.norm(dim=1) == 0].any()          # (the interpreter cuts bf16 bits off)
    assert worst_row(y, exact) <= ((2.5e-3 if GPU else 5e-3) if dtype == torch.bfloat16 else
                                   1e-4 if native else 1e-6)


@on_each_path
@pytest.mark.parametrize("K, N", [(16, 144), (48, 24), (80, 80), (96, 144), (144, 24), (272, 80)])
def test_product(kernels, K, N):
    """Tails of K and N; experts without rows at the start and in the middle (fault 8)."""
    some = ids(*range(0, K // 16, 2))
    check_product([0, 3, 0, 5], N, K, ids())
    check_product([0, 3, 0, 5], N, K, some)
    check_product([0, 3, 0, 5], N, K, some, torch.bfloat16)


@on_each_path
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_product_with_every_tile(kernels, monkeypatch, tiles):
    """Few rows and more rows than a tile, no rows at both ends, all rows to one expert."""
    use_tile(monkeypatch, tiles)
    T = tiles[1]
    for counts in ([0, T + 1, 3, 0, 0], [0, 0, 0, 0, 2 * T + 5], [T, T - 1, 1, 2, 2 * T]):
        check_product(counts, 144, 144, ids(0, 3, 8))


@on_each_path
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_code_under_every_scale_byte(kernels, monkeypatch, tiles):
    """Fault 12: subnormal scales decoded as normal numbers. Fault 1: nibbles swapped. X is one-hot
    and all other factors are 1, so that Y is W, exactly."""
    use_tile(monkeypatch, tiles)
    byte = torch.arange(0x7F, dtype=torch.uint8)
    scales = torch.stack([byte, byte.flip(0), byte.roll(5)], 1).view(torch.float8_e4m3fn)
    codes = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))
                         for i in range(3 * 0x7F)]).view(0x7F, 48).to(torch.uint8)
    w = NVFP4(codes[:, ::2] | codes[:, 1::2] << 4, scales, torch.tensor(1.0))
    x = quantize(torch.eye(48), global_scale=torch.tensor(1.0))
    x = NVFP4(x.codes, x.scales, torch.ones(48, 1))
    exact = block_values(w).T @ torch.eye(0x7F)
    factor = block_values(x).amax(1, keepdim=True)            # 1 up to the rounding of 1/6
    y = nvfp4.matmul(*(NVFP4(*(t.to(DEVICE) for t in q)) for q in (x, w)))
    assert torch.equal(y.cpu(), exact * factor)


def test_weights_beyond_32_bit_offsets(kernels, monkeypatch):
    """Fault 20. (The memory is never touched but for the last expert, so that it costs nothing.)"""
    E, N, K, M = 2**11 + 1, 64, 2**18, 3
    if GPU and torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    last, x = quantize(randn(1, N, K)), quantize(randn(M, K, seed=1), row_scaled=True)

    def large(part):
        size = E * part.nbytes
        if GPU:
            memory = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        else:
            memory = torch.frombuffer(mmap.mmap(-1, size, flags=0x4022), dtype=torch.uint8)
        memory = memory.view(part.dtype).view(E, *part.shape[1:])
        memory[-1] = part[0]
        return memory

    w = NVFP4(large(last.codes), large(last.scales),
              last.global_scale.expand(E, 1, 1).contiguous().to(DEVICE))
    if not GPU:                                               # deep steps: the interpreter is slow
        monkeypatch.setattr(nvfp4, "tile_sizes", lambda *_: (64, 16, 256, 4, 3))
    counts = torch.zeros(E, dtype=torch.long, device=DEVICE)
    counts[-1] = M
    y = nvfp4.grouped_matmul(NVFP4(*(t.to(DEVICE) for t in x)), w, counts)
    exact = dequantize(x).double() @ dequantize(last)[0].double().T
    assert worst_row(y, exact) <= (1e-4 if GPU else 1e-6)     # (a GPU adds up 2^18 terms in fp32)


@needs_gpu
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_ptx_and_plain_unpacking_agree(kernels, monkeypatch, tiles):
    """What the interpreter checks is the plain arithmetic, what runs is the PTX."""
    use_tile(monkeypatch, tiles)
    w = quantize((randn(3, 144, 272) * randn(3, 144, 272, seed=1).exp()).to(DEVICE))
    x, counts = quantize(randn(20, 272).to(DEVICE), True), torch.tensor([9, 0, 11], device=DEVICE)
    y = nvfp4.grouped_matmul_kernels(x, w, counts, torch.float32, None, None, None, False)
    monkeypatch.setattr(nvfp4, "unpack_ptx", lambda: "")
    plain = nvfp4.grouped_matmul_kernels(x, w, counts, torch.float32, None, None, None, False)
    assert torch.equal(y, plain)


@on_each_path
def test_operands_may_be_strided_or_share_a_scale(kernels):
    """Pointers walk: every operand is taken as a view, and x once with one scale for all rows."""
    def spaced(t):
        return t.repeat_interleave(2, 0)[::2]

    x, w, blocks = randn(8, 144).to(DEVICE), experts(4, 80, 144), ids(1, 2, 4, 8).to(DEVICE)
    w, counts = NVFP4(*(t.to(DEVICE) for t in w)), torch.tensor([5, 0, 0, 3], device=DEVICE)
    q, r, _ = rac.compensate_ref(x, blocks)
    for q in (q, quantize(x)):
        ref = nvfp4.grouped_matmul_ref(q, w, counts, torch.float32, r, blocks)
        views = [NVFP4(*(spaced(t) if t.ndim else t for t in p)) for p in (q, w, r)]
        y = nvfp4.grouped_matmul(*views[:2], spaced(counts), residual=views[2],
                                 blocks=spaced(blocks))
        assert worst_row(y, ref.cpu().double()) <= 2e-4
        on_cpu = nvfp4.grouped_matmul(*views[:2], counts.cpu())
        ref = nvfp4.grouped_matmul_ref(q, w, counts, torch.float32)
        assert worst_row(on_cpu, ref.cpu().double()) <= 2e-4
    q, r, _ = rac.compensate(x, spaced(blocks))
    assert_same((*q, *r), [t for p in rac.compensate_ref(x, blocks)[:2] for t in p])


# --- The public functions ------------------------------------------------------------------------

@on_each_path
def test_public_functions_equal_plain_pytorch(kernels, monkeypatch):
    """Quantizer, schedule and product together, for experts and for a single matrix."""
    x, w = randn(9, 144).bfloat16().to(DEVICE), experts(4, 80, 144)
    w, counts = NVFP4(*(t.to(DEVICE) for t in w)), torch.tensor([5, 0, 0, 4], device=DEVICE)
    blocks, one = ids(1, 2, 4, 8).to(DEVICE), NVFP4(*(t[0] for t in w))

    def run():
        y, energy = rac.compensated_grouped_matmul(x, w, counts, blocks)
        low, none = rac.compensated_grouped_matmul(x, w, counts, blocks, torch.bfloat16, False)
        return y, rac.compensated_matmul(x, one, blocks), low, none, energy

    *got, none, energy = run()
    monkeypatch.setenv("NVFP4_PATH", "torch")
    nvfp4.kernel_path.cache_clear()
    *expected, _, energy_ref = run()
    for y, ref, tolerance in zip(got, expected, (2e-4, 2e-4, 5e-3)):
        assert y.dtype == ref.dtype and worst_row(y, ref.cpu().double()) <= tolerance
    assert none is None
    torch.testing.assert_close(energy, energy_ref, rtol=1e-6, atol=0)


@pytest.fixture
def path_of(monkeypatch):
    """kernel_path as it would answer elsewhere; there is no GPU and no Triton behind it."""
    class Torch:                                              # a GPU's tensors lie on the CPU
        def __getattr__(self, name):
            if name in ("randn", "arange", "tensor"):
                return lambda *args, **_: getattr(torch, name)(*args)
            return (lambda _: torch.Generator()) if name == "Generator" else getattr(torch, name)

    def answer(device, forced="", triton=True, interpret=False, capability=9, error=0.0):
        def product(*args):                                   # the last one: native?
            if args[-1] and isinstance(error, Exception):
                raise error
            return torch.ones(1) + args[-1] * error

        fake = Torch()
        fake.cuda = SimpleNamespace(get_device_capability=lambda *_: (capability, 0))
        knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=interpret))
        monkeypatch.setattr(nvfp4, "torch", fake)
        monkeypatch.setattr(nvfp4, "triton", SimpleNamespace(knobs=knobs) if triton else None)
        monkeypatch.setattr(nvfp4, "grouped_matmul_kernels", product)
        monkeypatch.setenv("NVFP4_PATH", forced)
        nvfp4.kernel_path.cache_clear()
        return nvfp4.kernel_path(device)[0]

    yield answer
    nvfp4.kernel_path.cache_clear()


def test_kernel_path_by_itself(path_of):
    """The fastest path that is right: the CPU never waits for an interpreter by accident."""
    assert path_of("cpu", interpret=True) == path_of("cuda", triton=False) == "torch"
    assert path_of("cuda") == path_of("cuda", capability=8) == "emulated"
    assert path_of("cuda", capability=10) == path_of("cuda", capability=12) == "native"
    for wrong in (0.5, float("nan"), RuntimeError("no")):
        assert path_of("cuda", capability=10, error=wrong) == "emulated"


def test_kernel_path_forced(path_of):
    for device in ("cpu", "cuda"):
        assert path_of(device, "torch", triton=False) == path_of(device, "torch") == "torch"
    assert path_of("cpu", "emulated", interpret=True) == "emulated"
    assert path_of("cuda", "emulated", capability=10) == "emulated"
    assert path_of("cuda", "native", capability=10) == "native"
    for reason, *how in (("'fast': use native, emulated or torch", "cpu", "fast"),
                         ("'emulated'.*torch, because Triton is not", "cpu", "emulated", False),
                         ("'native'.*torch, because Triton is not", "cuda", "native", False),
                         ("'emulated'.*torch, because there is no GPU", "cpu", "emulated"),
                         ("'native'.*emulated, because .* no FP4 units", "cuda", "native"),
                         ("'native'.*emulated, because", "cpu", "native", True, True),
                         ("differs by 5e-01", "cuda", "native", True, False, 10, 0.5)):
        with pytest.raises(ValueError, match=reason):
            path_of(*how)


# --- Compiled for GPUs that are not here ---------------------------------------------------------

@pytest.mark.skipif(nvfp4.triton is None, reason=NO_TRITON)
def test_kernels_compile_for_every_gpu():
    """Every tile and row length in use. Native: both products in FP4 units, nothing unpacked.
    Everywhere: shared memory suffices, divisions are exact, no fused multiply-adds in a residual.
    """
    jobs = {}
    for cc, memory in TARGETS.items():
        for K in {max(512, K) for *_, K in shapes()}:         # (the short ones: the same kernel)
            jobs |= {f"{cc} compensate {K} {how}": None for how in ("0 plain", f"{K // 32} fold")}
        for path in ("emulated", "native")[:1 + (cc >= 100)]:
            for tile in tiles_in_use(path == "native", memory):
                jobs[f"{cc} {' '.join(map(str, tile))} {path}"] = tile
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONUNBUFFERED"] = "1"        # as in CI: two children's lines were mixed there, once
    run = subprocess.run([sys.executable, "tests/compile_kernels.py", *jobs], cwd=ROOT, env=env,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    made = {entry["job"]: entry for entry in map(json.loads, run.stdout.splitlines())}
    assert made.keys() == jobs.keys()
    wrong = []
    for job, tile in jobs.items():
        one, cc = made[job], int(job.split()[0])
        right = one["shared"] <= TARGETS[cc]
        if tile is None:
            right &= one["fma"] == one["inexact_div"] == 0
        elif job.endswith("emulated"):
            right &= one["mma"] > 0 == one["fp4"] and one["unpack"] > 0
        else:
            rows, tokens, depth, warps, _ = tile              # instructions of one product:
            product = depth // 4 * (rows // 128 if cc == 100 else rows * tokens // 128 // warps)
            right &= one["fp4"] == one["mma"] == 2 * product
            right &= one["unpack"] == one["stack"] == 0                       # no spills
        wrong += [] if right else [one]
    assert not wrong
