"""A chat in the terminal, with any server that has the OpenAI API or with one that the command starts.

options ──► command: which server ──► dialogue: read, ask, show ──► 0
                                          │  connection: one answer as it comes (HTTP, server-sent events)
                                          │  conversation: what has been said
                                          └─ screen: what the terminal shows
"""
