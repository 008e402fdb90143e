"""`pipeline profile`: where a stage spends its time, compared with the limits of this machine.

The stage's own code (`stages/<name>/profile.py`) is measured in this process, without the other stages. This package
has the options, the results as plain numbers, and their output.

The floor of an op is the least time that it can take: the larger of (bytes it must move) / (bytes per second that the
threads read from memory) and (operations) / (operations per second of their kind, between registers). Both rates are
measured on this machine, before and after the steps, and the better reading of each counts. A step has two floors:

- ops in turn: the sum of its ops' floors. Memory and arithmetic overlap within an op but not between two ops, which is
  how a step is computed.
- overlapped: all its bytes against all its operations, as if they overlapped over the whole step. It is never larger,
  and no program can beat it.

On a GPU the bytes per second are those of copies in its memory, and ops are `products`, `attention` and the `rest`.

The share of a floor is floor / time. An op whose data are in a cache may be above 100 %, because its bytes are counted
as if they came from memory.
"""
