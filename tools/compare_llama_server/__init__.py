"""Compares Pipeline with llama.cpp's own server on the same .gguf files.

variants.py    the files: kinds of vocabularies, keys, special tokens, templates, heads, formats of weights
small_file.py  writes such a file, with a small model whose next tokens are known
inputs.py      texts and chats
servers.py     starts both servers and asks them
compare.py     everything that is compared for a file
rules.py       differences on purpose, by name, with the reason of each
__main__.py    the command
"""
