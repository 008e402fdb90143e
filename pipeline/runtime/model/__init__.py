"""The prepared model, as stages see it."""
