"""Grammars of outputs, by llguidance: reading what a client gave, and the processes of their own that work on them.

A hostile grammar can take the library minutes, gigabytes or the whole process, whatever limits it is given: so no stage
calls it by itself. `ingest` has a checker, `execute` a process that computes masks, and each can be killed at any time.
"""
