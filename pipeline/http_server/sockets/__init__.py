"""Connections: accepted, read in turns, kept, and ended when their clients are slow."""
