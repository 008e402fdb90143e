"""What one step computes: its rows, its tokens, its message, and runs of steps with the same rows."""
