"""The added tokens of a prepared model, beside its tokenizer.json."""

import json
from pathlib import Path

from pipeline.config.settings import ChatSettings
from pipeline.text.formats import added_tokens
from pipeline.text.formats.chat_formats import ChatFormats

TEXTS = ("<s>", "a\nb", "\u2028", '"', "\\n", "漢字", "", "\x00")


def tokenizer(folder: Path, num: int) -> None:
    tokens = [{"id": i, "content": f"{TEXTS[i % len(TEXTS)]}{i}", "special": i % 2 == 0} for i in range(num)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": {"vocab": {"x": 1}}}))


def test_the_file_has_the_tokens_of_tokenizer_json(tmp_path: Path) -> None:
    assert added_tokens.load(tmp_path) == []
    for num in (0, 1, 20_000):
        tokenizer(tmp_path, num)
        added_tokens.write(tmp_path)
        assert added_tokens.load(tmp_path) == added_tokens.in_tokenizer(tmp_path)
        assert len(added_tokens.load(tmp_path)) == num


def test_it_is_read_in_pieces_of_whole_lines_and_tokenizer_json_is_not_read(tmp_path: Path) -> None:
    """The decoder holds Python's lock, for which the clients of other models would wait: 0.6 s for 700,000 tokens."""
    tokenizer(tmp_path, 50_000)
    added_tokens.write(tmp_path)
    (tmp_path / "tokenizer.json").write_text("no JSON")
    formats = ChatFormats.load(tmp_path, ChatSettings())
    assert len(formats.added) == 50_000 and formats.special_ids == frozenset(range(0, 50_000, 2))
    data = (tmp_path / added_tokens.FILE).read_bytes()
    pieces = list(added_tokens.pieces(data))
    assert b"".join(pieces) == data and all(piece.endswith(b"\n") for piece in pieces)
    assert max(map(len, pieces)) < added_tokens.PIECE_BYTES + 100
