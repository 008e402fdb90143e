"""What became of requests, for the metrics of the ingress."""

import msgspec


class RelayCounts(msgspec.Struct):
    """Since start."""

    num_requests: int = 0
    num_retried: int = 0
    """Attempts that were repeated before anything was passed on."""
    num_resumed: int = 0
    """Streams that were continued at another replica, each time."""
    num_inexact: int = 0
    """Of these, those whose ids may differ from there on: the replica has another back end, or is not
    batch-invariant."""
    num_broken: int = 0
    """Streams that ended with an error because their replica was lost."""
    num_unserved: int = 0
    """Requests that no replica took."""
    num_given_up: int = 0
    """Replies whose clients took the least while all of them kept too much."""
