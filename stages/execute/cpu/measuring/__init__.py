"""`pipeline profile execute` and `pipeline check-model` on a CPU."""
