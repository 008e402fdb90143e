"""Errors with the field names of POST /v1/responses."""

from pipeline.stages.gateway.parsing.field_names import FieldNames

renamed = FieldNames(
    (
        (r"tools\[(\d+)\]\.function\b", r"tools[\1]"),
        (r"response_format\.json_schema\b", "text.format"),
        (r"response_format\b", "text.format"),
        (r"tool_choice\.function\b", "tool_choice"),
        (r"messages\b", "input"),
        (r"prompt\b", "input"),
        (r"max_tokens\b", "max_output_tokens"),
        (r"reasoning_effort\b", "reasoning.effort"),
    )
).renamed
"""The error with the field's name in this API, also where the message quotes it."""
