"""Ingest's side of images: the process that decodes them, and the cache of what it has decoded."""
