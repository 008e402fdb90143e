"""Models of the Hugging Face hub: found in the hub's own cache, or downloaded into it."""
