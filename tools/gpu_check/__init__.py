"""Everything that has to be seen on a GPU, in one command: see `--help`.

options.py    what a person may ask for, and the sections with their times
parent.py     starts a process for each section, one after the other, and ends one that takes too long
child.py      a section: its items in order, each of them noted as it begins and as it ends
readings.py   what items find, how it is kept, and what follows from it
report.py     the table, Markdown and JSON
gpu.py        timers, graphs and pinned memory; and what stands for them where kernels are interpreted
shapes.py     the models that are measured, and the bytes of their steps

machine.py    rates of the machine itself
kernels.py    kernels against float64
texts.py      whole models against the CPU executor
speed.py      steps of the executor
over_http.py  a server and its clients
peers.py      transformers in the same run
tune.py       times of a kernel's candidates
"""
