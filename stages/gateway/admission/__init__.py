"""What may be open at once, and what it uses.

admission.py     limits of sequences, tokens and bytes
open_bytes.py    the bytes that a request keeps in all processes
preemption.py    makes room when output grows beyond the limit
usage.py         what a request uses of its API key's limits
waiting_room.py  requests that wait before they are open
"""
