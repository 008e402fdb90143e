"""Reads request bodies, within limits of size, time, depth and memory."""
