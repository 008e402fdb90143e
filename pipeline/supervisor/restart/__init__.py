"""What follows the end of a process: restarts, wanted or not."""
