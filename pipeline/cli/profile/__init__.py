"""`pipeline profile`: what a stage spends its time on, beside what this machine could do at best.

What is measured is the stage's own code (`stages/<name>/profile.py`), in this process and without the other stages;
here are the options, the results as plain numbers, and how they are shown.

The floor of an op is the time that it takes at least: the larger of (bytes it must move) / (bytes a second that the
threads read from memory) and (operations) / (operations a second of their kind, between registers). Both rates are
measured on this machine, before the steps and after them, and of each the better one counts. A step has two floors:

- ops in turn: the sum of its ops' floors. Memory and arithmetic overlap within an op but not between two, which is how
  a step is computed.
- all overlapped: all its bytes against all its operations, as if they overlapped over the whole step. Never larger, and
  the one that no program can beat.

On a GPU bytes a second are those of copies in its memory, and ops are `products`, `attention` and the `rest`.

The share of a floor is floor / time. An op whose data lie in a cache may be above 100 %, for its bytes are counted as
if they came from memory.
"""
