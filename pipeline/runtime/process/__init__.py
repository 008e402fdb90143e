"""What every process of a server has: its black box, heaps, usage, and how it is watched and debugged."""
