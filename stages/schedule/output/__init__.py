"""Output on its way to detokenize."""
