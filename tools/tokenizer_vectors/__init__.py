"""Token ids by llama.cpp, which the tokenizers of .gguf files are compared with.

vocabularies.py  small vocabularies of each kind, made from texts.py
libllama.py      asks llama.cpp for the special tokens of a vocabulary
llama_cpp.py     compiles tokenize.cpp with llama.cpp and runs it
__main__.py      writes the ids for the tests, and checks the vocabularies that llama.cpp's own tests use
"""
