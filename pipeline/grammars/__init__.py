"""Grammars for structured outputs, based on llguidance: the conversion of clients' grammars, and worker processes.

A hostile grammar can take the library minutes and gigabytes, or crash the process, despite its limits. So no stage
calls it in its own process. `ingest` has a checker process, `execute` a mask worker; each can be killed at any time.
"""
