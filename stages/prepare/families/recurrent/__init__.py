"""Models with recurrent layers: how to read their config.json, and the names of their tensors."""
