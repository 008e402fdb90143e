"""Example bodies of the routes, for the API description and its page. Tests send them."""

from typing import Any

_CHAT = {"messages": [{"role": "user", "content": "What is the capital of Greece?"}]}
_MODEL: dict[str, Any] = {"model": "{model}"}

BODIES: dict[str, dict[str, Any]] = {
    "chat_completions": _MODEL | _CHAT | {"temperature": 0, "max_tokens": 8},
    "create_response": _MODEL | {"input": "What is the capital of Greece?", "temperature": 0, "max_output_tokens": 8},
    "completions": _MODEL | {"prompt": "One, two, three,", "max_tokens": 3, "temperature": 0},
    "messages": _MODEL | _CHAT | {"max_tokens": 8, "temperature": 0},
    "count_tokens": _MODEL | _CHAT,
    "embeddings": _MODEL | {"input": ["a text", "and another"]},
    "ollama_chat": _MODEL | _CHAT | {"options": {"temperature": 0, "num_predict": 8}, "stream": False},
    "ollama_generate": _MODEL
    | {
        "prompt": "What is the capital of Greece?",
        "options": {"temperature": 0, "num_predict": 8},
        "stream": False,
    },
    "ollama_embed": _MODEL | {"input": ["a text", "and another"]},
    "ollama_embeddings": _MODEL | {"prompt": "a text"},
    "ollama_show": _MODEL,
    "infill": {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 8, "temperature": 0},
    "invocations": _MODEL | {"input": ["a text", "and another"]},
    "render_chat": _MODEL | _CHAT,
    "render_completion": _MODEL | {"prompt": "One, two, three,"},
    "generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "temperature": 0}},
    "tokenize": _MODEL | {"prompt": "Hello there", "return_token_strs": True},
    "detokenize": _MODEL | {"tokens": [1, 2, 3]},
    "abort_requests": {"request_ids": ["greece-1"]},
    "load_lora_adapter": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "unload_lora_adapter": {"lora_name": "sql"},
}


def example_of(handler: str, model: str) -> dict[str, Any] | None:
    """The example body of a route, by its handler; None if it has none."""
    body = BODIES.get(handler)
    return body and {name: model if value == "{model}" else value for name, value in body.items()}
