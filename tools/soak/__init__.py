"""A soak test: random load against a real server for a long time.

requests.py  random requests
endings.py   each sequence of a reply ends exactly once
clients.py   one request over HTTP or ZeroMQ, and its outcome
patience.py  time limits
kills.py     kills stages
probes.py    a few fixed requests whose ids never change
after.py     what must be true of an idle server
"""
