"""Finds the API of a path. Nothing else reads it from a path."""

from pipeline.http_server.apis.anthropic import AnthropicFamily
from pipeline.http_server.apis.ollama import OllamaFamily
from pipeline.http_server.apis.openai import ApiFamily
from pipeline.http_server.apis.responses import ResponsesFamily

OPENAI = ApiFamily()
_OTHERS = (AnthropicFamily(), OllamaFamily(), ResponsesFamily())
FAMILIES = (OPENAI, *_OTHERS)


def family_of(path: str) -> ApiFamily:
    """The API that a path belongs to, whether the path has a route or not; OpenAI's if it is of no other."""
    return next((one for one in _OTHERS if path == one.path or path.startswith(f"{one.path}/")), OPENAI)
