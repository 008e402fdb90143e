"""What `tools/soak.py` is made of.

asks.py      what a client may ask for, drawn at random
endings.py   each sequence of an answer ends exactly once
clients.py   one request over HTTP or ZeroMQ, and what became of it
probes.py    a few fixed requests whose ids never change
after.py     what has to be true of a server that has nothing to do any more
"""
