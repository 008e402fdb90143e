"""Chooses a replica, a whole server, for each request. Pure: no clock, no sockets, no tokens.

keys.py         keys of a prompt's prefixes: chained hashes of message bytes or of tokens
key_caches.py   what each replica probably has in its prefix cache: an LRU of keys
policies.py     the decisions: least predicted time to first token, and simpler ones to compare with
router.py       the load of each replica, from the requests that were routed to it

The simulator (tools/simulator) and an ingress in front of replicas use the same code.
"""
