"""Benchmarks of parts of a server, in one process."""
