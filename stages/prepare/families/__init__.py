"""The architectures, a file for each family: how to read its config.json, and the names of its tensors."""
