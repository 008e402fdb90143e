"""The client protocol: all messages between a client and a gateway's ZeroMQ endpoint, one union per direction.

docs/protocol.md documents it for clients in other languages. tools/export_protocol.py generates the schema and the test
vectors from these types. The protocol has a version of its own. It shares no struct with the messages between stages,
because those may change and these may not.

A message is one ZeroMQ frame with one MessagePack array: the message's tag, then its fields in order. Fields are
appended, never reordered or removed. A reader ignores additional fields at the end, and uses defaults for missing ones.
"""

from pipeline.client.protocol.parts import (
    ChatMessage,
    ChatPrompt,
    Failure,
    JsonText,
    Output,
    PackedIds,
    Params,
    Prompt,
    RequestId,
    SamplingDefaults,
    StructuredOutputs,
    TextPrompt,
    TokensPrompt,
    ToolCall,
    WireMessage,
)
from pipeline.client.protocol.to_client import Accepted, Delta, Error, Failed, Finished, Pong, ServerMessage, Welcome
from pipeline.client.protocol.to_server import Abort, Bye, ClientMessage, Credit, Generate, Hello, Ping

__all__ = [
    "MAX_CLIENT_CHARS",
    "MAX_CREDITS",
    "MAX_NAME_CHARS",
    "MAX_SALT_CHARS",
    "MAX_TIMEOUT_S",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "Bye",
    "ChatMessage",
    "ChatPrompt",
    "ClientMessage",
    "Credit",
    "Delta",
    "Error",
    "Failed",
    "Failure",
    "Finished",
    "Generate",
    "Hello",
    "JsonText",
    "Output",
    "PackedIds",
    "Params",
    "Ping",
    "Pong",
    "Prompt",
    "RequestId",
    "SamplingDefaults",
    "ServerMessage",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "Welcome",
    "WireMessage",
]

PROTOCOL_VERSION = 1

MAX_CREDITS = 1024
"""Maximum number of deltas that a client can grant ahead; larger values are reduced to this."""
MAX_CLIENT_CHARS = 200
"""Maximum length of a client's name."""
MAX_NAME_CHARS = 256
"""Maximum length of a request's name."""
MAX_SALT_CHARS = 1024
"""Maximum length of a cache salt."""
MAX_TIMEOUT_S = 1_000_000
"""Maximum timeout of a request: 11 days."""
