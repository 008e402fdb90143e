"""Measures how the work that a client's bytes choose grows with their number.

    python -m tools.scaling_meter [--only TEXT] [--max-bytes N] [--list]

Each case (`case.py`) makes an input of about n bytes and names the function that reads it. The meter doubles n up to
the case's limit. A case fails if its CPU time grows faster than n, if it takes longer than its bound, or if it raises
anything but a refusal. `bodies.py` makes cases for every field of every body, `replies.py` for every format of
replies, `schemas.py` for schemas of tools, `outputs.py` for bad words and resumed streams, and `others.py` has the
rest.
"""
