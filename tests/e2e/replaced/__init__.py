"""Servers that others replace, and the signals that end them."""
