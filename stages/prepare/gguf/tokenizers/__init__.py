"""The vocabulary of a .gguf file as a tokenizer.json."""
