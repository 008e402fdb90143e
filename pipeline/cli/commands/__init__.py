"""The commands: each module declares the options of some of them, and runs them.

What a command needs besides is imported when it runs.
"""
