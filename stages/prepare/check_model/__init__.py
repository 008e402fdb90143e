"""The transformers side of `pipeline check-model`, and random checkpoints for it."""
