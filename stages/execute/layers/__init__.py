"""What models are made of. A layer holds its weights and records its calls into a program."""
