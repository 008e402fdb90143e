"""Carries messages and arrays between stages: inboxes, outboxes, rings and arenas."""
