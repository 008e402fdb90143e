"""What it costs to encode a request, known before it is encoded: it decides how long others wait."""

from pipeline.runtime.messages import ChatPrompt, IdsPrompt, Submit, TextPrompt
from pipeline.stages.ingest.templates import conversation

WORD_BYTES = 40
"""The cost of tokenizing a short word, in bytes of a long text."""

ALLOWED_IDS_PER_BYTE = 64
"""The same for allowed ids, of which there may be as many as the vocabulary has, for each of many prompts."""


def cost_bytes(submit: Submit) -> int:
    """About the cost of encoding a request, in bytes of a long text."""
    prompt = submit.prompt
    size = 0 if isinstance(prompt, IdsPrompt) else num_bytes(prompt)
    words = submit.options.bad_words
    num_allowed = len(submit.options.allowed_ids) // 4
    size += conversation.length(submit.options.prediction) + num_allowed // ALLOWED_IDS_PER_BYTE
    return size + sum(map(conversation.length, words)) + WORD_BYTES * len(words)


def num_bytes(prompt: ChatPrompt | TextPrompt) -> int:
    """About how long a prompt is, without its template."""
    if isinstance(prompt, TextPrompt):
        return sum(map(conversation.length, (prompt.text, prompt.pair or "", prompt.template_kwargs)))
    return conversation.num_bytes(prompt)
