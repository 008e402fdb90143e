"""What ranks are, on any device: their contexts, and which part of a model each of them computes."""
