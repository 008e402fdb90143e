"""What every HTTP server of the project has in common: the rules of its listeners, and how it reads bodies.

    client ──► listener.py: limits of heads, deadlines, number of connections
                  └─► rules.py: an API key, or else an allowed Host and Origin; JSON only; CORS
                         └─► a route ──► bodies/: limits of size, time and memory

listener.py         accepts connections; can't be made without rules
rules.py            the rules of one listener
sockets/            connections: accepted, read in turns, and ended if they are idle or slow
access/             API keys and what they may use; `Host`, `Origin` and the content type; CORS
bodies/             reads and parses bodies, within limits
ends.py             closes connections where the end of a message is unclear
expect.py           answers to `Expect: 100-continue`
errors.py           errors; error_responses.py gives them the shape of the path's API (apis/)
rejection_log.py    log lines of refused requests
request_ids.py      the request ids that clients choose
server_header.py    the `Server` header

The gateway and the ingress of `pipeline deploy` use it. Another HTTP server must too.
"""
