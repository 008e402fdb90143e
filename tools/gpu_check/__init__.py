"""Everything that has to be seen on a GPU, in one command: see `--help`.

options.py    what a person may ask for, and the sections with their times
parent.py     starts a process for each section, one after the other, and ends one that takes too long
child.py      a section: its items in order, each of them noted as it begins and as it ends
readings.py   what items find, how it is kept, and what follows from it
report.py     the table, Markdown and JSON
gpu.py        timers, graphs and pinned memory; and what stands for them where kernels are interpreted
shapes.py     the models that are measured, and the bytes of their steps
models.py     random weights of them, in folders or straight on the GPU; a tokenizer
runners.py    executors without a server around them; steps for them are stages/execute/measuring/planned.py

machine.py    rates and latencies of the machine itself
kernels*.py   kernels against float64; checking.py says what right is, made_steps.py has batches for them
texts.py      whole models against the CPU executor
speed.py      steps of the executor; warm_up.py compiles what they launch
breakdown.py  the kernels of a step, by a profiler
over_http.py  a server and its clients
peers.py      transformers in the same run
tune.py       times of products' candidates; tune_compile.py compiles them
"""
