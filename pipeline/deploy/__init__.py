"""Several replicas, each a whole server, behind one address.

    client ⇄ ingress ──lease──► replica set: chooses by predicted time to first token (pipeline/routing)
                │                    │
                └──relays streams────┴──► replica's gateway        a dead replica's streams continue at another one

prompts.py          what the router must know of a request's body: keys of its prefixes, and sizes
replicas.py         replica sets: which replicas there are, their load, who gets a request
health_checks.py    probes replicas, so that a dead or hung one loses its requests
proxy/              one request: lease, relay, and again at another replica if the first one fails
ingress.py          the HTTP server: routes, /health, /metrics, drain
exposition.py       the metrics of the ingress, with those of the replicas
run.py              an ingress in front of servers that run already
ray/                replicas and ingress as a Ray Serve application (needs the extra `ray`)
"""
