"""Benchmarks against whole servers, which most of them start."""
