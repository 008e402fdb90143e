"""Reads the weights of a model's layers."""
