"""Queues of work that are fair to API keys, and threads that do it."""
