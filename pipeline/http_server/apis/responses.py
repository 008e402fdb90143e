"""OpenAI's Responses API: its errors are those of OpenAI's other routes, except within a stream."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.http_server.apis.openai import ApiFamily


class ResponsesFamily(ApiFamily):
    """/v1/responses"""

    path = "/v1/responses"
    stores_replies = True

    def lost_stream(self, fields: Mapping[str, Any]) -> bytes:
        data = {"type": "error", "code": fields["code"], "message": fields["message"], "param": None}
        return b"event: error\ndata: " + json.dumps(data).encode() + b"\n\n"
