"""`pipeline check-model`: compares a checkpoint's logits and greedy outputs here with those of transformers.

cases.py     the compared data: prompts, and the ways in which a server may compute them
judge.py     the allowed differences, and the findings
options.py   the options
command.py   the command: prepare, compute, compare, report

With --fidelity it measures how far the CPU's kernels are from the same weights in float32:

chunks.py           cuts a text's tokens, and names the positions that count
divergence.py       top-1 agreement and KL divergence
fidelity.py         reads the text, prepares, measures, makes the table
fidelity_text.txt   the text
"""
