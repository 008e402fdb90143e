"""Runs one stage as a process of its own, between fake neighbours that send it more work than it can do.

harness.py  the process, and the other ends of its sockets and shared memory
loads.py    the load of each stage, and the counting of its output
http.py     HTTP clients that discard what they read
clock.py    resource usage of a process, from the kernel
measure.py  warm-up, measurement, result
result.py   the result as numbers and as a table
"""
