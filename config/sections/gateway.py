"""Settings of the gateway."""

from typing import Annotated

from msgspec import Meta

from pipeline.config.sections.base import MAX_BYTES, Frozen, Replicas, Seconds


class GatewaySettings(Frozen, frozen=True):
    """The process that holds client connections."""

    replicas: Replicas = 1
    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    zmq: Annotated[
        str,
        Meta(
            description='Address of the ZeroMQ endpoint: "auto" is ipc://@pipeline/PORT/zmq with the HTTP port, for '
            'processes of this user; or ipc://PATH, ipc://@NAME, tcp://HOST:PORT, or "off".'
        ),
    ] = "auto"
    max_open_sequences: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="Maximum number of open sequences; a request with n counts as n sequences. Requests beyond "
            "the limit get 503 at once. Replicas have equal shares.",
        ),
    ] = 1024
    max_open_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**40,
            description="Maximum number of prompt tokens of all open requests. Requests beyond the limit get 503 at "
            "once, but a single request is accepted whatever its length. Replicas have equal shares.",
        ),
    ] = 1024**2
    max_open_bytes: Annotated[
        int,
        Meta(
            ge=2**20,
            le=MAX_BYTES,
            description="Maximum size of what open requests keep, in bytes, in all processes together: prompts, tools, "
            "options, output, log probabilities and events, also of background responses. Requests beyond the limit "
            "get 503 at once, and one that needs more than three quarters of it alone gets 400. If output grows beyond "
            "it, the largest requests but the oldest wait. Replicas have equal shares.",
        ),
    ] = 256 * 1024**2
    max_open_media_bytes: Annotated[
        int,
        Meta(
            ge=2**20,
            le=MAX_BYTES,
            description="Maximum size of the encoded images that open requests keep, in bytes, in all processes "
            "together. Requests with images beyond the limit get 503 at once, but one is accepted if no other with "
            "images is open. Replicas have equal shares.",
        ),
    ] = 256 * 1024**2
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Maximum time from the arrival of a request to its end, unless the request sets timeout_s. 0 "
            "is unlimited.",
        ),
    ] = 0.0
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Maximum size of a request in bytes: an HTTP body, or a message at the ZeroMQ endpoint.",
        ),
    ] = 4 * 1024**2
    max_media_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Maximum size of an HTTP body in bytes if the model takes images. What is not base64 of images "
            "in it has at most max_body_bytes.",
        ),
    ] = 32 * 1024**2
    max_stored_responses: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="Maximum number of responses that /v1/responses stores in memory; the oldest are dropped. 0 "
            "stores none, like several replicas.",
        ),
    ] = 1024
    max_stored_response_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            le=MAX_BYTES,
            description="Maximum size of stored responses, their conversations and events in bytes; the oldest are "
            "dropped.",
        ),
    ] = 64 * 1024**2
    slow_client_timeout_s: Annotated[
        Seconds,
        Meta(description="Disconnect a client that reads none of its pending data for this long."),
    ] = 60.0
    late_stage_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Answer new requests 503 while a stage that they need has not answered its heartbeat for this "
            "long. 0 lets them wait.",
        ),
    ] = 30.0
    sse_keep_alive_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Send a keep-alive in a stream of server-sent events after this much silence: a comment, or a "
            "ping event in /v1/messages. 0 is off.",
        ),
    ] = 5.0
    per_request_metrics: Annotated[
        bool,
        Meta(
            description="Replies to chats and completions with one choice have vLLM's metrics: times in the queue, to "
            "the first token and between tokens."
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str,
        Meta(
            description="Send a trace of each finished request, with a span for each stage, to the OpenTelemetry "
            'collector at this URL, as "http://127.0.0.1:4318/v1/traces" (OTLP over HTTP; needs the extra "otel"). '
            "Empty: no traces."
        ),
    ] = ""
    api_keys_file: Annotated[
        str,
        Meta(
            description="File of API keys, one per line; lines that begin with # are comments. With this file, or "
            "with PIPELINE_API_KEYS in the environment, clients that use HTTP or tcp:// need one of the "
            "keys. Empty: no file."
        ),
    ] = ""
    allow_unauthenticated: Annotated[
        bool,
        Meta(
            description="Accept clients from other machines without API keys. If this is off, a server without keys "
            "does not start with an address that other machines can reach."
        ),
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host names that clients of a server without API keys, and of the admin listener, may use "
            "(the Host header), besides IP addresses, localhost, gateway.host and gateway.admin_host. Other names get "
            "403. "
            '"*.example.com" is every name below example.com, "*" any name. Ports do not matter.'
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description='Origins whose web pages may use the server, such as "https://chat.example.com": its responses '
            "get CORS headers for them. Without API keys, and at the admin listener, requests from other pages (the "
            'Origin header), except its own, get 403. "*" is any origin.'
        ),
    ] = ()
    allowed_methods: Annotated[
        tuple[str, ...],
        Meta(description='Methods that pages of gateway.allowed_origins may use. "*" is any method.'),
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...],
        Meta(description='Request headers that pages of gateway.allowed_origins may send. "*" is any header.'),
    ] = ("*",)
    allow_credentials: Annotated[
        bool,
        Meta(description="Let browsers send cookies and client certificates for pages of gateway.allowed_origins."),
    ] = False
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts from which images that requests name by https: URLs are fetched, at port 443 of public "
            'addresses. Empty: none are. "*.example.com" is every name below example.com, "*" any name.'
        ),
    ] = ()
    ssl_certfile: Annotated[
        str,
        Meta(
            description="File of the server's certificate and its chain, in PEM format: HTTP becomes HTTPS, except at "
            "the admin listener. Empty is plain HTTP. Read at start."
        ),
    ] = ""
    ssl_keyfile: Annotated[
        str, Meta(description="File of the certificate's private key; empty if gateway.ssl_certfile contains it.")
    ] = ""
    ssl_ca_certs: Annotated[
        str,
        Meta(
            description="File of CA certificates. Clients must then present a certificate that one of these has "
            "signed. Empty asks for none."
        ),
    ] = ""
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="With API keys: let requests of different keys share the prefix cache. If this is off, a key "
            "only reuses what its own requests computed, so that timing reveals nothing about the "
            "prompts of others."
        ),
    ] = False
    page: Annotated[
        bool,
        Meta(
            description="Serve the web page at /: a chat, and a live view of the stages. Its files need no API key; "
            "the requests that it sends do."
        ),
    ] = True
    enable_sleep_mode: Annotated[
        bool,
        Meta(
            description="Let clients put the server to sleep and wake it: POST /sleep and /wake_up. With API keys, any "
            "of them may."
        ),
    ] = False
    admin_host: Annotated[str, Meta(min_length=1, description="Address of the admin listener.")] = "127.0.0.1"
    admin_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65535,
            description="Port of the admin listener, which serves /health, /metrics and /ping without API keys; the "
            "main port then does not serve them. 0 picks a free port. -1 is off: the main port serves them, "
            "also without keys.",
        ),
    ] = -1
