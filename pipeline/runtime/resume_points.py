"""The form of resume points, which a gateway writes into a stream over HTTP and an ingress reads.

A client that sends the header RESUMABLE gets points between the events, as comments of server-sent events:

    : point {"id":"cmpl-…","created":…,"arrival_s":…,"seed":…,"salt":…,"prompt":"…"}     once, with the first events
    : point 0 12 0 AAAAAAEAAAA=      index, characters of the sequence so far, whether it has ended, its new token ids
    : point failed stage_died        the error events that follow, with this code, end the stream
    : point off                      from here on, the stream can't be continued

A point stands behind the events that it describes. To continue a stream, at this server or another one with the same
model and settings, the client sends the same body with all points that it has received in front of it, and the header
RESUME with their number of bytes. It gets the events behind the last point. Events that came without a point behind
them are to be dropped.
"""

RESUMABLE = "X-Pipeline-Resumable"
RESUME = "X-Pipeline-Resume"
PREFIX = b": point "
