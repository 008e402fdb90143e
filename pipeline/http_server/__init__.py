"""What every HTTP server of the project has in common: the rules of its listeners, and how it reads bodies.

    client ──► listener.py: limits of heads, deadlines, number of connections
                  └─► rules.py: an API key, or else an allowed Host and Origin; JSON only; CORS
                         └─► a route ──► body_reader.py: limits of size, time and memory

listener.py         accepts connections; can't be made without rules
rules.py            the rules of one listener
connections.py      ends idle connections if there are many
arrivals.py         accepts connections, which begin and make TLS handshakes in turns
receive_turns.py    every read of a connection takes a turn
guard.py            API keys, and the paths that need none
origins.py          `Host`, `Origin` and the content type
cors.py             cross-origin resource sharing
body_reader.py      reads and parses bodies; upload_budget.py, large_body_lock.py and json_depth.py bound the cost
ends.py             closes connections where the end of a message is unclear
expect.py           answers to `Expect: 100-continue`
errors.py           errors; error_responses.py gives them the shape of the path's API (apis/)
refusal_log.py      log lines of refused requests
request_ids.py      the request ids that clients choose
descriptors.py      the limit of open files
server_header.py    the `Server` header

The gateway and the ingress of `pipeline deploy` use it. Another HTTP server must too.
"""
