"""What proposes ids on a CPU."""
