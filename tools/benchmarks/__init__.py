"""Parts of `tools/scheduling_benchmarks.py` and `tools/soak/`: a server of their own, loads, comparisons."""
