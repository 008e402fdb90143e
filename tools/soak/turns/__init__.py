"""A soak of three models with room for one, which take turns under open streams."""
