"""Texts that the output never has, as runs of ids. Pure."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from pipeline.runtime.rust_panics import panics_as_errors

MAX_CHARS = 65_536
"""Of all of them: each is looked for behind every id."""


class BadWord(Exception):
    """A text can't be kept out of the output; the words are for the client."""


def as_ids(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """One to three runs of ids for each word: as a text begins with it, as it stands behind a space, and as it was
    given, where it begins with other white space than one blank.

    This is stricter than vLLM (SamplingParams.update_from_tokenizer), which leaves out the second form where it has
    another number of ids, and so lets " Athens" pass where "Athens" is two ids and " Athens" is one. Left out is only
    what ends with another form, as where the tokenizer writes a space as an id of its own: that one finds it.
    Words that are spelt with other ids, as in the middle of others, are not found. Raises BadWord.
    """
    if sum(map(len, words)) > MAX_CHARS:
        raise BadWord(f"'bad_words' has more than {MAX_CHARS} characters")
    bare = [word.lstrip() for word in words]
    if not all(words):
        raise BadWord(f"'bad_words[{words.index('')}]' is empty: it would be in every text")
    texts = bare + [" " + word for word in bare] + list(words)
    try:
        with panics_as_errors():
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises nothing more precise
        raise BadWord(f"'bad_words' can't be tokenized: {error}") from error
    runs: list[list[int]] = []
    for place in range(len(words)):
        begun, *others = (list(form.ids) for form in encoded[place :: len(words)])
        if not begun:
            raise BadWord(f"'bad_words[{place}]' has no token of its own")
        found = [begun]
        for other in others:
            if other and not any(other[-len(run) :] == run for run in found):
                found.append(other)
        runs += found
    if any(not 0 <= token_id < vocab_size for run in runs for token_id in run):
        raise BadWord("'bad_words' has a text with tokens that the model does not have")
    return runs
