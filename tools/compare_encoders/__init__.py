"""Compares embeddings of Pipeline with sentence-transformers, fastembed and llama.cpp on this machine: see `--help`.

engines.py    the engines: their environment, files and commands
offline.py    sentence-transformers and fastembed in a process of their own, which prints its CPU time
fastembed_server.py   a plain FastAPI server around fastembed
texts.py      the texts, of a given number of tokens
clients.py    clients of a server with the OpenAI API, and the CPU time of a server's processes
"""
