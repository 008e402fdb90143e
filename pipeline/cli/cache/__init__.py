"""What the cache on disk holds, and its removal: prepared models, unpacked wheels and compiled kernels."""
