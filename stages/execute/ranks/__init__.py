"""What ranks are, on any device: their places, and which part of a model each of them computes."""
