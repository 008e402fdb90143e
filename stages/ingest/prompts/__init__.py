"""Prompts become ids: rendered, tokenized, cut to length and checked."""
