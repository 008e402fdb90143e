"""The models of speculative decoding."""
