"""Relays requests to replicas, and continues the streams of those that are lost.

relay.py            all open requests: reads their bodies, and counts what became of them
relayed_request.py  one request, over all its attempts
client_writer.py    writes the response to the client
upstream.py         a small HTTP/1.1 client that passes a response on as it arrives
forwarding.py       which headers pass from one connection to the other
resumable_stream.py separates a stream's events from its resume points
deadline.py         the end of a request's time, which all its attempts share
relay_counts.py     what became of requests, for the metrics
relay_errors.py     ends of requests that can't be served
"""
