"""Samples ids from logits, in torch: logits processors, noise, logprobs."""
