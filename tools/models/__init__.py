"""Makes and fetches models, and the references that tests compare with."""
