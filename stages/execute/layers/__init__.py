"""The layers of a model, loaded from its weights."""
