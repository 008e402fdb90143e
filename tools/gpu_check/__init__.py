"""Everything that has to be checked on a GPU, in one command: see `--help`.

options.py    the command line, and the sections with their time budgets
parent.py     starts a process for each section, one after the other, and ends one that takes too long
child.py      runs a section: its items in order, each recorded when it starts and when it ends
readings.py   what items find, how it is stored, and what follows from it
report.py     the table, Markdown and JSON
gpu.py        timers, graphs and pinned memory, and their stand-ins if kernels are interpreted
shapes.py     the models that are measured, and the bytes of their steps
models.py     random weights of them, in folders or straight on the GPU; a tokenizer
runners.py    executors without a server around them; their steps come from stages/execute/measuring/planned.py

kernels/      kernels against float64; checking.py has the expected values, made_steps.py the batches
machine/      rates and latencies of the machine itself
speed/        steps of the executor (warm_up.py compiles what they launch), the kernels of a step by a profiler
              (breakdown.py), and times of candidates for a GEMM (tune.py; tune_compile.py compiles them)
servers/      whole models against the CPU executor (texts.py), a server and its clients (http.py), and transformers
              in the same run (peers.py)
"""
