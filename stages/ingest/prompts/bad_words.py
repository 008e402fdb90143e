"""Converts `bad_words` to runs of token ids. Pure."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from pipeline.runtime.process.rust_panics import panics_as_errors

MAX_CHARS = 65_536
"""Of all words together: every step searches for each of them."""
MAX_IDS = 32_768
"""Of all forms of all words: each sequence has them in its message to the executor, and on a GPU in the memory that all
share. Rare characters have several ids each. A thousand common words have less than ten thousand."""


class BadWord(Exception):
    """A word can't be excluded; the message is for the client."""


def as_ids(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Encode each word as one to three runs of ids: at the start of a text, after a space, and as given if it
    starts with other white space than one blank.

    This is stricter than vLLM (SamplingParams.update_from_tokenizer), which omits the second form if it has another
    number of ids, and so allows " Athens" if "Athens" is two ids and " Athens" is one. Here a form is omitted only if
    it ends with another form, which matches it too (some tokenizers write a space as an id of its own). A word that is
    spelled with other ids, as inside another word, is not excluded. Raises BadWord.
    """
    if sum(map(len, words)) > MAX_CHARS:
        raise BadWord(f"'bad_words' has more than {MAX_CHARS} characters")
    bare = [word.lstrip() for word in words]
    if not all(words):
        raise BadWord(f"'bad_words[{words.index('')}]' is empty: every text contains it")
    texts = bare + [" " + word for word in bare] + list(words)
    try:
        with panics_as_errors():
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more precise
        raise BadWord(f"'bad_words' can't be tokenized: {error}") from error
    runs: list[list[int]] = []
    for index in range(len(words)):
        begun, *others = (list(form.ids) for form in encoded[index :: len(words)])
        if not begun:
            raise BadWord(f"'bad_words[{index}]' has no tokens")
        found = [begun]
        for other in others:
            if other and not any(other[-len(run) :] == run for run in found):
                found.append(other)
        runs += found
    if (num := sum(map(len, runs))) > MAX_IDS:
        raise BadWord(f"'bad_words' has {num} token ids in all forms, and the limit is {MAX_IDS}")
    if any(not 0 <= token_id < vocab_size for run in runs for token_id in run):
        raise BadWord("'bad_words' has a text with token ids outside the model's vocabulary")
    return runs
