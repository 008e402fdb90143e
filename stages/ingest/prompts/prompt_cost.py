"""What it costs to encode a request, known before it is encoded: it decides how long others wait."""

from pipeline.runtime.messages import ChatPrompt, IdsPrompt, Submit, TextPrompt
from pipeline.stages.ingest.templates import conversation

WORD_CHARS = 40
"""The cost of tokenizing a short word, in characters of a long text."""

ALLOWED_IDS_PER_CHAR = 64
"""The same for allowed ids, of which there may be as many as the vocabulary has, for each of many prompts."""


def cost_chars(submit: Submit) -> int:
    """About the cost of encoding a request, in characters of a long text."""
    prompt = submit.prompt
    size = 0 if isinstance(prompt, IdsPrompt) else num_chars(prompt)
    words = submit.options.bad_words
    num_allowed = len(submit.options.allowed_ids) // 4
    size += len(submit.options.prediction) + num_allowed // ALLOWED_IDS_PER_CHAR
    return size + sum(map(len, words)) + WORD_CHARS * len(words)


def num_chars(prompt: ChatPrompt | TextPrompt) -> int:
    """About how long a prompt is, without its template."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) + len(prompt.pair or "")
    return conversation.num_chars(prompt)
