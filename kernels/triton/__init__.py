"""The GPU's kernels, in Triton. A module here is imported only where `execute.device` is "cuda", or to be tested.

What all of them keep to, so that a whole step can be recorded as one CUDA graph:

- A function takes tensors that stay where they are and launches; it allocates nothing and never waits for the GPU.
- Its grid depends on shapes alone. What is only known on the GPU (who has ended, how long each row is) it reads there.
- Rows of padding and rows that have ended are harmless: their tokens write no keys or values, their samples nothing.
- Numbers that change from step to step are `do_not_specialize`, those of the model `tl.constexpr`: each kernel is
  compiled for few variants, and none of them while serving.

Without a GPU, TRITON_INTERPRET=1 runs the same kernels on the CPU, slowly; what the interpreter lacks (products of
bfloat16) stands behind constexpr flags that come from `kernels/triton/launch.py`.
"""

from pipeline.kernels.triton import launch as launch  # mends the interpreter before any kernel is run
