"""Fields of a chat request, and what they are called in the Messages API."""

FIELDS = {
    "continue_final_message": "messages",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}


def own_field(name: str) -> str:
    """The path of a chat request's field as this API names it."""
    return FIELDS.get(name, name.replace(".function.parameters", ".input_schema"))
