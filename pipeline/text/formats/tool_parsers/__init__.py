"""Tool-call formats: a file for each family of models, with the parser of its replies and their grammar."""
