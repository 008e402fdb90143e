"""Memory and barriers of the processes that compute a model together on CPUs."""
