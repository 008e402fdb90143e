"""Texts of a mean number of tokens, cut from the text that `check-model --fidelity` measures with."""

import random
from pathlib import Path

from tokenizers import Tokenizer

SOURCE = Path(__file__).resolve().parents[2] / "pipeline" / "cli" / "check" / "fidelity_text.txt"
SPREAD = 0.6
"""Lengths are between (1 - SPREAD) and (1 + SPREAD) times the mean: texts that people have differ in length."""


class Texts:
    """`num` different texts, of `mean` tokens each with the special ones, or a word less."""

    def __init__(self, tokenizer_file: Path, mean: int, num: int) -> None:
        lengths = random.Random(0)
        tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        words = SOURCE.read_text("utf-8").split()
        self.texts: list[str] = []
        self.num_tokens: list[int] = []
        begin = 0
        while len(self.texts) < num:
            length = round(mean * lengths.uniform(1 - SPREAD, 1 + SPREAD))
            text, count = "", 0
            for end in range(begin + 1, begin + length + 1):
                longer = " ".join(words[i % len(words)] for i in range(begin, end))
                found = len(tokenizer.encode(longer).ids)
                if found > length:
                    break
                text, count = longer, found
            self.texts.append(text)
            self.num_tokens.append(count)
            begin += max(1, len(text.split()) - 1)
