"""The route of llama.cpp for editors."""

from pipeline.stages.gateway.apis.infill.parsing import INFILL_UNSUPPORTED_FIELDS, InfillBody, parse_infill
from pipeline.stages.gateway.apis.infill.reply import InfillReply
from pipeline.stages.gateway.http.route import Route

ROUTES = (
    Route(
        "POST",
        "/infill",
        "infill",
        "The text between a prefix and a suffix, as in llama.cpp.",
        InfillBody,
        INFILL_UNSUPPORTED_FIELDS,
        InfillReply,
        InfillReply,
        opens_request=True,
        tag="Text",
        parse=parse_infill,
        example={"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 8, "temperature": 0},
        ends_with_done=False,
    ),
)
