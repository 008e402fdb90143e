"""The GPU kernels, in Triton. They are imported only if `execute.device` is "cuda", or by tests.

A whole step must be captured as one CUDA graph, so all kernels follow these rules:

- A function takes tensors at fixed addresses and launches kernels. It allocates nothing and never waits for the GPU.
- Its grid depends only on shapes. Kernels read on the GPU which rows have ended and how long each row is.
- Padding and ended rows have no effect: their tokens write no keys or values, their samples nothing.
- Numbers that change between steps are `do_not_specialize`, those of the model `tl.constexpr`: each kernel has few
  variants, and none is compiled while serving.

Without a GPU, TRITON_INTERPRET=1 runs the same kernels slowly on the CPU. Constexpr flags from
`kernels/triton/launch.py` replace what the interpreter lacks (matmuls in bfloat16).
"""

from pipeline.kernels.triton import launch as launch  # patches the interpreter before any kernel runs
