"""Images of requests: from a client's encoded bytes to resized pixels and the text that stands for them in a prompt."""
