"""The client protocol: all messages between a client and a gateway's ZeroMQ endpoint, one union per direction.

docs/protocol.md documents it for clients in other languages. tools/export_protocol/ generates the schema and the test
vectors from these types. The protocol has a version of its own. It shares no struct with the messages between stages,
because those may change and these may not.

A message is one ZeroMQ frame with one MessagePack array: the message's tag, then its fields in order. Fields are
appended, never reordered or removed. A reader ignores additional fields at the end, and uses defaults for missing ones.

What a client asks is a map in it: `Request`, whose fields are those of the bodies over HTTP.
"""

from pipeline.client.protocol.conversation import (
    ContentPart,
    CustomCall,
    FunctionCall,
    ImageUrl,
    MessageParam,
    ToolCallParam,
)
from pipeline.client.protocol.generation import JsonSchemaFormat, ResponseFormat, StructuredOutputsParam
from pipeline.client.protocol.parts import Failure, Output, PackedIds, RequestId, WireMessage
from pipeline.client.protocol.request import (
    MAX_SALT_CHARS,
    MAX_TIMEOUT_S,
    Prediction,
    PredictionPart,
    Request,
    json_text,
)
from pipeline.client.protocol.to_client import (
    Accepted,
    Delta,
    Error,
    Failed,
    Finished,
    Pong,
    ServerMessage,
    SleepState,
    Welcome,
)
from pipeline.client.protocol.to_server import (
    Abort,
    AskSleep,
    Bye,
    ClientMessage,
    Credit,
    Generate,
    Hello,
    Ping,
    SetSleep,
)

__all__ = [
    "MAX_CLIENT_CHARS",
    "MAX_CREDITS",
    "MAX_NAME_CHARS",
    "MAX_SALT_CHARS",
    "MAX_TIMEOUT_S",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "AskSleep",
    "Bye",
    "ClientMessage",
    "ContentPart",
    "Credit",
    "CustomCall",
    "Delta",
    "Error",
    "Failed",
    "Failure",
    "Finished",
    "FunctionCall",
    "Generate",
    "Hello",
    "ImageUrl",
    "JsonSchemaFormat",
    "MessageParam",
    "Output",
    "PackedIds",
    "Ping",
    "Pong",
    "Prediction",
    "PredictionPart",
    "Request",
    "RequestId",
    "ResponseFormat",
    "ServerMessage",
    "SetSleep",
    "SleepState",
    "StructuredOutputsParam",
    "ToolCallParam",
    "Welcome",
    "WireMessage",
    "json_text",
]

PROTOCOL_VERSION = 2

MAX_CREDITS = 1024
"""Maximum number of deltas that a client can grant ahead; larger values are reduced to this."""
MAX_CLIENT_CHARS = 200
"""Maximum length of a client's name."""
MAX_NAME_CHARS = 256
"""Maximum length of a request's name."""
