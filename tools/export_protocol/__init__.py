"""Writes what is published of the client wire, from the types in pipeline/client/protocol/."""
