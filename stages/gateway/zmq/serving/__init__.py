"""What the server knows of the model that a connection is for, and what it logs."""
