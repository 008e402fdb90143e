"""The executor on a GPU: rows live in GPU memory, and steps are launched before the previous step's ids are known."""
