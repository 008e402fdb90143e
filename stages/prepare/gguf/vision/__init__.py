"""Reads vision towers from .gguf files with a projector, which stand beside that of the language model."""
