"""What the stages share: memory, sockets, keys."""
