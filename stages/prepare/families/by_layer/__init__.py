"""Families whose layers differ in more than their windows."""
