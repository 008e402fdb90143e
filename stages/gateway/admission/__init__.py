"""What may be open at once, and what it uses.

admission.py        limits of sequences, tokens and bytes
media_admission.py  those of requests with images, beside which texts find room
end_rates.py        when there will be room
open_bytes.py       the bytes that a request keeps in all processes
shares.py           what one API key may have of the limits
preemption.py       makes room when output grows beyond the limit
unread.py           makes room where clients don't read
usage.py            what a request uses of its API key's limits
waiting_room.py     requests that wait before they are open
"""
