"""Vision towers: pixels to rows of embeddings of the language model."""
