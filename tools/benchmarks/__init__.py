"""Parts of `tools/serving_bench/scheduling.py` and `tools/soak/`: a server of their own, loads, comparisons."""
