"""Sends generated and mutated requests to a real server; see __main__.py."""
