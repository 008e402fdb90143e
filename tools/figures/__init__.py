"""What `tools/scheduling_figures.py` and `tools/soak.py` are made of: a server of their own, loads, comparisons."""
