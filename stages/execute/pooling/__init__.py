"""Vectors and scores of whole texts, from the hidden states of their tokens."""
