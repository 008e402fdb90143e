"""What proposes ids on a GPU."""
