"""Encoders, and what makes embeddings, scores and labels of the hidden states of any model."""
