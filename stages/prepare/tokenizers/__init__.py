"""Tokenizers and what goes with them: their checks, chat templates, tokens that end a reply."""
