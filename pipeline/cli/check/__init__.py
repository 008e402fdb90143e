"""`pipeline check-model`: compares a checkpoint's logits and greedy outputs here with those of transformers.

cases.py     the compared data: prompts, and the ways in which a server may compute them
judge.py     the allowed differences, and the findings
options.py   the options
command.py   the command: prepare, compute, compare, report
"""
