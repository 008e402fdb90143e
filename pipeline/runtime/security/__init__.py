"""API keys, TLS, and who is at the other end of a socket."""
