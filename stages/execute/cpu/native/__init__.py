"""Programs in the CPU library (kernels/cpu/), and the memory of their weights."""
