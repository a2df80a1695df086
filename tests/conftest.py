"""Without a GPU, Triton's interpreter runs the kernels on the CPU; it is chosen before the import
of triton. (With a GPU, the same tests run the compiled kernels.)"""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
