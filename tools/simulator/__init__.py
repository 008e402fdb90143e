"""The simulator of replicas; see __main__.py."""
