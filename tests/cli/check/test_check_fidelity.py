"""`pipeline check-model --fidelity` measures how close the CPU's kernels are to float32."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors

from pipeline.__main__ import main
from pipeline.cli.check.chunks import CHUNK_SIZE, COUNTED, chunks_of
from pipeline.cli.check.divergence import Divergence, kl_divergence
from pipeline.cli.check.fidelity import BUILT_IN, HEADINGS
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.stages.execute.cpu.measuring import fidelity
from pipeline.stages.execute.cpu.measuring.streamed_program import streamed_program
from pipeline.stages.prepare.check_model.text_tokens import encode
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.compiled import link_kernels
from tests.stages.prepare import checkpoints

pytestmark = pytest.mark.usefixtures("check_model_state")

# --- statistics


def logits(*probabilities: float, shift: float = 0.0) -> np.ndarray:
    return (np.log(probabilities) + shift).astype(np.float32)


@pytest.mark.parametrize("shift", [0.0, 50.0, -3.0])
def test_the_divergence_is_that_of_the_distributions(shift: float) -> None:
    reference, ours = logits(0.5, 0.25, 0.25), logits(0.25, 0.5, 0.25, shift=shift)
    assert kl_divergence(reference, ours) == pytest.approx(0.25 * math.log(2), rel=1e-5)
    # From the reference: the other direction of these two differs.
    sure, even = logits(0.9, 0.1), logits(0.5, 0.5, shift=shift)
    assert kl_divergence(sure, even) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)
    assert kl_divergence(even, sure) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), rel=1e-5)


def test_equal_logits_do_not_diverge() -> None:
    row = np.random.default_rng(0).normal(0, 10, 50_000).astype(np.float32)
    assert 0 <= kl_divergence(row, row) < 1e-12
    assert 0 <= kl_divergence(row, row + np.float32(8)) < 1e-6


def test_positions_are_counted_over_several_chunks() -> None:
    found = Divergence()
    reference = np.array([logits(0.5, 0.25, 0.25), logits(0.2, 0.7, 0.1)])
    found.add(reference, np.array([logits(0.25, 0.5, 0.25), logits(0.2, 0.7, 0.1)]))
    found.add(reference[1:], reference[1:])
    summary = found.summary()
    assert (summary.num_positions, summary.top1) == (3, pytest.approx(2 / 3))
    assert summary.top1_error == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2))
    assert summary.mean_kl == pytest.approx(0.25 * math.log(2) / 3, rel=1e-5)
    assert summary.max_kl == pytest.approx(0.25 * math.log(2), rel=1e-5)


def test_the_quantile_is_interpolated() -> None:
    found = Divergence(kl=[i / 100 for i in range(100, -1, -1)], num_same=101)
    summary = found.summary()
    assert (summary.num_positions, summary.top1, summary.top1_error, summary.max_kl) == (101, 1.0, 0.0, 1.0)
    assert (summary.mean_kl, summary.kl_99) == (pytest.approx(0.5), pytest.approx(0.99))
    assert Divergence(kl=[0.0, 1.0], num_same=2).summary().kl_99 == pytest.approx(0.99)


def test_logits_that_are_not_finite_are_infinitely_far() -> None:
    found = Divergence()
    reference = np.array([logits(0.5, 0.5, 1e-3)] * 3)
    ours = reference.copy()
    ours[0, 2], ours[1, 0] = np.nan, np.inf
    found.add(reference, ours)
    summary = found.summary()
    assert (found.num_same, summary.max_kl, summary.mean_kl, summary.kl_99) == (1, math.inf, math.inf, math.inf)


# --- chunks


def test_chunks_do_not_overlap_and_a_shorter_rest_is_left_out() -> None:
    ids = list(range(3 * CHUNK_SIZE + 255))
    assert chunks_of(ids, None, "text") == [ids[:256], ids[256:512], ids[512:768]]
    # As in llama-perplexity, 127 positions of a chunk count: the last of them has a next token in the chunk.
    assert (COUNTED[0], COUNTED[-1], len(COUNTED)) == (128, 254, 127)


def test_a_bos_replaces_the_first_id_of_each_chunk() -> None:
    ids = [7, *range(100, 100 + 2 * CHUNK_SIZE - 1)]
    first, second = chunks_of(ids, 7, "text")
    assert first == ids[:256] and second == [7, *ids[257:]]
    assert ids[256] == 355, "the caller's ids do not change"


def test_less_than_two_chunks_are_an_error() -> None:
    assert len(chunks_of(range(512), None, "text")) == 2
    with pytest.raises(UserError, match=r"--text a\.txt has 511 tokens, but at least 512 are needed: 2 chunks of 256"):
        chunks_of(range(511), None, "--text a.txt")


# --- tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A prepared model whose tokenizer adds a BOS."""
    source = checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny("llama"), add_bos=True)
    return prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")))


def edit_tokenizer(folder: Path, single: str | None) -> None:
    """Replace the template that adds special tokens."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single or "$A", special_tokens=special)
    tokenizer.save(path)


def test_a_text_begins_with_a_bos_only_if_the_tokenizer_adds_one(folder: Path) -> None:
    with_bos, bos_id = encode(folder, "quick fox")
    assert bos_id == 1 and with_bos[0] == 1 and with_bos[1] != 1
    edit_tokenizer(folder, None)
    assert encode(folder, "quick fox") == (with_bos[1:], None)
    edit_tokenizer(folder, "<s> $A </s>")
    assert encode(folder, "quick fox") == (with_bos, 1), "an EOS is left out"
    edit_tokenizer(folder, "$A </s>")
    assert encode(folder, "quick fox") == (with_bos[1:], None)
    assert encode(folder, "") == ([], None)


def test_special_tokens_in_a_text_are_plain_text(folder: Path) -> None:
    ids, _ = encode(folder, "<s>user</s>")
    assert ids.count(1) == 1 and 2 not in ids, "the only BOS is the tokenizer's own"


def test_a_token_that_the_model_lacks_is_an_error(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([f"word{i}" for i in range(400)])
    tokenizer.save(path)
    with pytest.raises(ModelError, match=r"gives the text the token id \d+, but the model's largest is 607"):
        encode(folder, "a word399 b")


# --- the command

TEXT = " ".join(f"{i} quick brown foxes, {i * i} naïve dogs: x = [{i}, 42]\n" for i in range(40))


@pytest.fixture
def cache(tmp_path: Path) -> str:
    """`--set cache_dir=`: a cache of its own, which has the kernels that are compiled already."""
    return f"cache_dir={link_kernels(tmp_path / 'cache')}"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny("qwen2", hidden_size=64), add_bos=True))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return str(path)


def rows_of(out: str) -> dict[str, list[float]]:
    """The table's numbers, by form."""
    lines = out.splitlines()
    (begin,) = (i for i, line in enumerate(lines) if line.startswith(HEADINGS[0]))
    rows = {}
    for line in lines[begin + 2 :]:
        if line.strip():
            *form, positions, top1, error, mean, quantile, largest = line.split()
            values = (positions, top1, error, mean, quantile, largest)
            rows[" ".join(form)] = [float(value) for value in values]
    return rows


def measure(model: str, *more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["check-model", model, "--fidelity", "--set", "execute.num_threads=1", *more])
    out, err = capsys.readouterr()
    return code, out, err


def test_activations_of_12_bits_are_closer_to_float32_than_those_of_8_bits(
    model: str, text: str, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base.kld"
    more = ["--text", text, "--set", cache, "--quantization", "q4_1", "--kl-base", str(base)]
    code, out, err = measure(model, *more, capsys=capsys)
    assert code == 0, out + err
    rows = rows_of(out)
    forms = ["q8_0+q4_1 × int16+int12", "q8_0+q4_1 × int16+int8"]
    assert sorted(rows) == forms
    int12, int8 = (rows[form] for form in forms)
    assert int12[0] == int8[0] and int12[0] % len(COUNTED) == 0 and int12[0] >= 2 * len(COUNTED)
    assert int12[1] >= int8[1] and 10 * int12[3] < int8[3], "top-1 and mean divergence"
    for _, top1, _, mean, quantile, largest in rows.values():
        assert 0.9 < top1 <= 1 and 0 < mean < quantile <= largest < 0.5
    num_chunks = int(int12[0]) // len(COUNTED)
    num_ids = int.from_bytes(base.read_bytes()[12:16], "little")
    assert base.stat().st_size == 20 + num_chunks * (4 * CHUNK_SIZE + len(COUNTED) * 2 * (num_ids + num_ids % 2 + 4))
    assert f"chunk {num_chunks} of {num_chunks}" in err and f"{num_chunks} chunks of 256" in out
    table = out[out.index(HEADINGS[0]) :]
    assert max(len(line) for line in table.splitlines()) <= 80


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_weights_without_4_bits_have_one_row(
    model: str, text: str, cache: str, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = measure(model, "--text", text, "--set", cache, "--kernels", kernels, capsys=capsys)
    assert code == 0, out + err
    ((form, (_, top1, _, mean, *_)),) = rows_of(out).items()
    assert form in ("bf16 × bf16", "bf16 × f32") and 0.9 < top1 <= 1 and mean < 0.01


def test_the_reference_does_not_diverge_from_itself(folder: Path) -> None:
    """Each position is computed again as a row of its own, so that this also checks the positions."""
    random = np.random.default_rng(0).integers(3, 600, (2, CHUNK_SIZE)).tolist()
    settings = Settings()
    runner = fidelity.load(settings, folder, "float32", "torch", make=streamed_program)
    try:
        reference = torch_logits(folder.parent.parent / "tiny", random[1])
        fidelity.logits_of(runner, random[0])
        np.testing.assert_allclose(fidelity.logits_of(runner, random[1]), reference, atol=1e-3)
    finally:
        runner.close()


def torch_logits(source: Path, ids: list[int]) -> np.ndarray:
    """transformers' logits of the positions that count."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([ids])).logits[0, COUNTED.start : COUNTED.stop].numpy()
    return found


def test_the_built_in_text_is_plain_utf_8_of_several_scripts() -> None:
    text = BUILT_IN.read_text("utf-8")
    assert len(text) > 18_000 and "\r" not in text
    for part in ("def find(", '"currency": "EUR"', "Der Zug", "Поезд", "春天", "#include", "3.14159"):
        assert part in text


# --- errors


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--text", "a.txt"], "--text: is the text of --fidelity; add --fidelity"),
        (["--quantization", "q8_0"], "--quantization q8_0: only --fidelity measures other weights than floats"),
        (["--fidelity", "--tokens", "80"], "--tokens 80: has no effect with --fidelity"),
        (["--fidelity", "--seed", "3"], "--seed 3: has no effect with --fidelity"),
        (["--fidelity", "--set", "execute.device=cuda"], "execute.device is 'cuda': --fidelity measures the CPU's"),
        (["--fidelity", "--set", "execute.dtype=float32"], "execute.dtype is 'float32': --fidelity compares with"),
        (["--fidelity", "--quantization", "q9"], "quantization"),
    ],
)
def test_options_that_do_not_fit_are_errors(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "/no/such/folder", *more]) == 2
    assert words in capsys.readouterr().err


def test_a_config_without_weights_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "some/config.json", "--fidelity"]) == 2
    assert "MODEL some/config.json: --fidelity needs a model with weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"caf\xe9", "is not UTF-8 at byte 3"),
        (b"a few words", "tokens, but at least 512 are needed: 2 chunks of 256"),
    ],
)
def test_an_unusable_text_is_an_error_that_names_it(
    model: str, tmp_path: Path, content: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "unusable.txt"
    if content is not None:
        path.write_bytes(content)
    code, out, err = measure(model, "--text", str(path), "--set", f"cache_dir={tmp_path / 'cache'}", capsys=capsys)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"pipeline check-model: error: --text {path}") and words in err


def test_a_context_shorter_than_a_chunk_is_an_error(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoints.save_folder(tmp_path / "short", checkpoints.tiny("llama", max_position_embeddings=128))
    code, _, err = measure(str(model), "--text", text, "--set", f"cache_dir={tmp_path / 'cache'}", capsys=capsys)
    assert code == 1 and "the model's context is 128 tokens, but the measurement takes 256 at a time" in err
