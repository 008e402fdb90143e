"""The gateway of several models: one process and one listener, with a gateway stage for each model that is loaded."""
