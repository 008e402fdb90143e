"""The rows in GPU memory, and what each step sends to them."""
