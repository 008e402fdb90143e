"""Tensors of a checkpoint: their names, their checks, and the file that they are written to."""
