"""The executor on a CPU: a step is computed when its message arrives."""
