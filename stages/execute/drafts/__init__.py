"""Speculative decoding: what both back ends have in common."""
