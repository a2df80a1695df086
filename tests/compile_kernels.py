"""Compile the kernels for a GPU that need not be there, and say what the compiler made of them.

    python tests/compile_kernels.py 120 128 16 16 8 3 native     # GEMM: ROWS TOKENS DEPTH warps
    python tests/compile_kernels.py 90 64 16 16 4 3 emulated     # stages, as tile_sizes gives them
    python tests/compile_kernels.py 90 compensate 2048 32 fold   # K, chosen blocks, fold or plain

The first number is the compute capability. Several jobs: one quoted argument each. Every job
compiles the very launch that the wrapper in nvfp4.py or rac.py makes, in a process of its own
(some tiles make Triton abort), and prints a line of JSON: registers and bytes of stack (spills) of
a thread, bytes of shared memory, and how often the PTX has an instruction.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))
import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import nvfp4  # noqa: E402
import rac  # noqa: E402

TYPES = {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16",
         torch.bfloat16: "*bf16", torch.float32: "*fp32"}
INSTRUCTIONS = {
    "mma": r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.", "fp4": "kind::mxf4nvf4",
    "unpack": r"mul\.rn\.f16x2", "fma": r"fma\.rn\.f32", "inexact_div": r"div\.(?:full|approx)"}


class Launch:
    """In place of a kernel: notes what it is launched with, kernel[grid](*args, **options)."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **options):
        self.args, self.options = args, options


def launch(job):
    """The kernel, the arguments and the options of one job."""
    noted = Launch()
    if job[0] == "compensate":
        kernel, rac.compensate_kernel = rac.compensate_kernel, noted
        x, blocks = torch.zeros(16, int(job[1])).bfloat16(), torch.arange(int(job[2]))
        rac.compensate_kernels(x, blocks, job[3] == "fold", job[3] == "fold")
    else:
        kernel, nvfp4.grouped_matmul_kernel = nvfp4.grouped_matmul_kernel, noted
        nvfp4.schedule = lambda *_: torch.zeros(1, 3, dtype=torch.int32)
        nvfp4.tile_sizes = lambda *_: tuple(map(int, job[:5]))
        x = nvfp4.quantize(torch.zeros(16, 2048), row_scaled=True)
        w = nvfp4.quantize(torch.zeros(1, 256, 2048))
        r = nvfp4.quantize(torch.zeros(16, 528), global_scale=x.global_scale)
        nvfp4.grouped_matmul_kernels(
            x, w, torch.tensor([16]), torch.bfloat16, r, torch.arange(33), None,
            job[5] == "native")
    return kernel, noted.args, noted.options


def compile_job(words):
    kernel, args, options = launch(words[1:])
    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args)):
        constexpr = value is None or kernel.params[i].is_constexpr
        signature[name] = ("constexpr" if constexpr else
                           "i32" if isinstance(value, int) else TYPES[value.dtype])
        if constexpr:
            constants[name] = value
        elif not isinstance(value, int) or value % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    done = triton.compile(ASTSource(kernel, signature, constants, attributes),
                          target=GPUTarget("cuda", int(words[0]), 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
                               check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    counts = {name: len(re.findall(p, done.asm["ptx"])) for name, p in INSTRUCTIONS.items()}
    return {"job": " ".join(words), "registers": int(registers), "stack": int(stack),
            "shared": done.metadata.shared, **counts}


def main(jobs):
    """Two jobs at a time, each in a child; exit status 1 if one fails."""
    running, failed = {}, 0
    for job in [*jobs, None, None]:
        if len(running) == 2 or job is None and running:
            pid, status = os.wait()
            done = running.pop(pid)
            if status:
                failed = 1
                print(f"FAILED: {done} (wait status {status})", file=sys.stderr, flush=True)
        if job is None:
            continue
        pid = os.fork()
        if pid:
            running[pid] = job
            continue
        try:
            # One write a line. (print makes two of it under PYTHONUNBUFFERED, and the children
            # share a pipe: the second half of a line may come after another child's first.)
            os.write(1, f"{json.dumps(compile_job(job.split()))}\n".encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    jobs = sys.argv[1:] if " " in sys.argv[1] else [" ".join(sys.argv[1:])]
    torch.set_num_threads(1)
    sys.exit(main(jobs))
