"""Checks and measurements of the GPU executor, in one command: see `--help`.

options.py    the command line, and the sections with their time limits
parent.py     starts the processes of each section, and kills those that exceed a limit
child.py      runs the items of one section
readings.py   the results of items, and their file format
report.py     the results as a table, as Markdown and as JSON
gpu.py        timers, graphs and pinned memory, with substitutes for interpreted kernels
shapes.py     the measured models, and the bytes that their steps read
models.py     random weights for them, in folders or in GPU memory; a tokenizer
runners.py    executors without a server; their steps come from stages/execute/measuring/planned.py

kernels/      kernels against float64; checking.py compares, random_steps.py makes batches
machine/      rates and latencies of the hardware
speed/        executor steps (warm_up.py compiles their kernels), the kernels of a step by a profiler (breakdown.py),
              and GEMM candidates (tune.py; tune_compile.py compiles them)
servers/      whole models against the CPU executor (texts.py, features.py), a server and its clients (http.py),
              transformers (peers.py), and two GPUs (ranks.py)
"""
