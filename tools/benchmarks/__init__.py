"""What `tools/scheduling_benchmarks.py` and `tools/soak/` are made of: a server of their own, loads, comparisons."""
