"""Attention over KV blocks, in torch, and what stands before it: rotary embedding, layout of keys and values."""
