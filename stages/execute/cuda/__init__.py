"""The executor on a GPU: rows live there, steps are launched before the last one's ids are known."""
