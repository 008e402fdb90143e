"""A chat in a terminal with any server that speaks the OpenAI API, or with one of its own.

options ──► command: which server ──► dialogue: read, ask, show ──► 0
                                          │  connection: one answer as it comes (HTTP, server-sent events)
                                          │  conversation: what has been said
                                          └─ screen: what the terminal shows
"""
