"""`pipeline check-model`: whether a checkpoint has the logits and the greedy text here that it has in transformers.

cases.py     what is compared: prompts, and the ways in which a server may come to compute them
judge.py     what difference is allowed, and what was found
options.py   what can be asked
command.py   the command: prepare, compute, compare, report
"""
