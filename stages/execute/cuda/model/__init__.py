"""A model on a GPU: its weights in device memory, and the kernel launches of a forward pass."""
