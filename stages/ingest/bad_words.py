"""Texts that the output never has, as runs of ids. Pure."""

from collections.abc import Sequence

from tokenizers import Tokenizer

MAX_CHARS = 65_536
"""Of all of them: each is looked for behind every id."""


class BadWord(Exception):
    """A text can't be kept out of the output; the words are for the client."""


def as_ids(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """One or two runs of ids for each word: as a text begins with it, and as it stands behind a space.

    As vLLM does it (SamplingParams.update_from_tokenizer): spaces that the word begins with don't count, and the second
    form is left out where it begins with the same id as the first (the tokenizer makes no difference, or writes the
    space as an id of its own) or has another number of ids. Words that are spelt with other ids in the middle of others
    are not found. Raises BadWord.
    """
    if sum(map(len, words)) > MAX_CHARS:
        raise BadWord(f"'bad_words' has more than {MAX_CHARS} characters")
    bare = [word.lstrip() for word in words]
    if not all(words):
        raise BadWord(f"'bad_words[{words.index('')}]' is empty: it would be in every text")
    try:
        encoded = tokenizer.encode_batch_fast(bare + [" " + word for word in bare], add_special_tokens=False)
    except Exception as error:  # the library raises nothing more precise
        raise BadWord(f"'bad_words' can't be tokenized: {error}") from error
    runs: list[list[int]] = []
    for place in range(len(words)):
        begun, spaced = list(encoded[place].ids), list(encoded[len(words) + place].ids)
        if not begun:
            raise BadWord(f"'bad_words[{place}]' has no token of its own")
        runs.append(begun)
        if spaced and spaced[0] != begun[0] and len(spaced) == len(begun):
            runs.append(spaced)
    if any(not 0 <= token_id < vocab_size for run in runs for token_id in run):
        raise BadWord("'bad_words' has a text with tokens that the model does not have")
    return runs
