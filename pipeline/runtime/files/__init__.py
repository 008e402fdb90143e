"""Files that others may read, write or name."""
