"""Rerankers score pairs of texts as their model cards do it with transformers, from the folder to the logit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.config.settings import ChatSettings, Settings
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import notes_of
from pipeline.stages.ingest.prompts import prompt_processor
from pipeline.stages.ingest.prompts.prompt_processor import PromptProcessor
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.tiny_encoders import Texts
from tests.stages.prepare import checkpoints
from tests.stages.prepare.encoders.test_sentence_transformers import add_modules, write

MAX_ERROR = 1e-4
LONGEST = 1024
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
PREFIX = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
DEFAULT = "Given a web search query, retrieve relevant passages that answer the query"
PAIRS = [("the quick dog", "The quick brown fox, 12 345 dogs."), ("naïve?", "return 42  # naïve Straße\n"), ("a", "b")]
QWEN3 = (
    "{% for message in messages %}{% if message.role == 'user' or message.role == 'system' %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It knows no queries and documents."""
OWN = (
    "{% for role in ['system', 'query', 'document'] %}{% for message in messages %}{% if message.role == role %}"
    "{{ '<' + role + '>' + message.content + '</' + role + '>\n' }}{% endif %}{% endfor %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
"""As vLLM's documentation has them."""


def save(folder: Path, model: Any, template: str = QWEN3) -> Path:
    """A folder whose tokenizer has the tokens of Qwen3's chats, and yes and no."""
    checkpoints.save_folder(
        folder, model, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    )
    tokenizer = checkpoints.byte_level()
    tokenizer.add_special_tokens([AddedToken(f"<|im_{end}|>", special=True) for end in ("start", "end")])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def model() -> Any:
    return checkpoints.tiny("qwen3", head_dim=16, max_position_embeddings=LONGEST)


@pytest.fixture
def source(tmp_path: Path, model: Any) -> Path:
    return save(tmp_path / "source", model)


def converted(model: Any) -> Any:
    """The model as one with a score, in the way of those on the hub."""
    config = type(model.config)(**{**model.config.to_dict(), "num_labels": 1})
    other = AutoModelForSequenceClassification.from_config(config)
    other.model.load_state_dict(model.model.state_dict())
    rows = model.lm_head.weight
    yes, no = checkpoints.byte_level().get_vocab_size() + 2, checkpoints.byte_level().get_vocab_size() + 3
    with torch.no_grad():
        other.score.weight.copy_((rows[yes] - rows[no])[None])
    return other.eval()


def official(
    source: Path, query: str, document: str, instruction: str = DEFAULT, max_length: int = LONGEST
) -> list[int]:
    """The ids of a pair as on the model card of Qwen3-Reranker."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    room = max_length - len(prefix) - len(suffix)
    ids = tokenizer(text, truncation="longest_first", max_length=room, add_special_tokens=False)["input_ids"]
    return [*prefix, *ids, *suffix]


def score(source: Path, model: Any, ids: list[int]) -> float:
    """The probability of yes against no."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    two = torch.stack([logits[tokenizer.convert_tokens_to_ids(token)] for token in ("no", "yes")])
    return float(torch.log_softmax(two, 0)[1].exp())


class Served:
    """A prepared reranker: what ingest and the executor make of pairs."""

    def __init__(self, folder: Path, chat: ChatSettings = ChatSettings()) -> None:  # noqa: B008
        self.folder = folder
        self.config = ModelConfig.load(folder)
        facts = m.ExecuteFacts(num_blocks=64, block_size=16, max_model_len=LONGEST, vocab_size=self.config.vocab_size)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.processor: PromptProcessor = prompt_processor.load(folder, facts, self.tokenizer, chat=chat)

    def ids(self, query: str, document: str, truncate: int = 0, *, right: bool = True, **variables: Any) -> list[int]:
        kwargs = json.dumps(variables) if variables else ""
        submit = m.Submit(
            *(1, 1, 0, 0.0),
            m.TextPrompt(query, document, kwargs),
            m.GenerationOptions(max_tokens=1, pooling=m.Pooling.LAST),
            prompt_options=m.PromptOptions(truncate=truncate, truncates_right=right),
        )
        return self.processor.encode_pooled(submit).ids.tolist()

    def scores(self, texts: list[list[int]]) -> np.ndarray:
        logits = Texts(self.folder, settings(kernels="torch", kv_mib=4, tokens=LONGEST)).compute(texts)
        return 1 / (1 + np.exp(-np.concatenate(logits)))


def served(source: Path, **changes: Any) -> Served:
    return Served(prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache"), **changes)))


@pytest.mark.parametrize("form", ["original", "converted", "sentence-transformers"])
def test_qwen3_reranker_scores_as_its_model_card(tmp_path: Path, source: Path, model: Any, form: str) -> None:
    if form == "original":
        reranker = served(source, hf_overrides=json.dumps(OVERRIDES))
    elif form == "converted":
        folder = save(tmp_path / "converted", converted(model))
        reranker = served(folder, hf_overrides=json.dumps({"is_original_qwen3_reranker": True}))
    else:
        vocab = checkpoints.byte_level().get_vocab_size()
        add_modules(source, "LogitScore", LogitScore={"true_token_id": vocab + 2, "false_token_id": vocab + 3})
        reranker = served(source)
    assert reranker.config.tasks == ("classify", "score")
    texts = [reranker.ids(*pair) for pair in PAIRS]
    assert texts == [official(source, *pair) for pair in PAIRS]
    expected = [score(source, model, ids) for ids in texts]
    assert len({round(one, 3) for one in expected}) == len(expected)
    np.testing.assert_allclose(reranker.scores(texts), expected, rtol=0, atol=MAX_ERROR)


def test_an_instruction_is_the_clients(source: Path) -> None:
    reranker = served(source, hf_overrides=json.dumps(OVERRIDES))
    expected = official(source, *PAIRS[0], instruction="Find the dog")
    assert reranker.ids(*PAIRS[0], instruction="Find the dog") == expected
    for kwargs, words in (({"instruction": 7}, "must be a string, not int"), ({"tools": []}, "can't have 'tools'")):
        with pytest.raises(RequestRejected, match=words):
            reranker.ids(*PAIRS[0], **kwargs)


def test_a_long_document_is_cut_before_the_end_of_the_template(source: Path) -> None:
    reranker = served(source, hf_overrides=json.dumps(OVERRIDES))
    query, document = "the quick dog", "The quick brown fox, 12 345 dogs. " * 9
    whole = len(official(source, query, document, max_length=10_000))
    for most in (whole - 1, whole - 60):
        ids = reranker.ids(query, document, truncate=most)
        assert len(ids) == most and ids == official(source, query, document, max_length=most)
    for truncate, right, words in (
        (5, True, "must be more than"),
        (whole - 1, False, "'truncation_side' must be right"),
    ):
        with pytest.raises(RequestRejected, match=words):
            reranker.ids(query, document, truncate=truncate, right=right)
    with pytest.raises(RequestRejected, match="maximum context length is 1024"):
        reranker.ids(query, document * 20)


@pytest.mark.parametrize("allows", [True, False])
def test_special_tokens_in_texts_are_plain_unless_the_setting_allows_them(source: Path, allows: bool) -> None:
    folder = served(source, hf_overrides=json.dumps(OVERRIDES)).folder
    reranker = Served(folder, ChatSettings(allow_special_tokens_in_content=allows))
    for texts in (("a<|im_end|>", "x"), ("a", "x<|im_end|>y")):
        ids = reranker.ids(*texts)
        specials = [reranker.tokenizer.id_to_token(one) for one in ids]
        assert specials.count("<|im_end|>") == (3 if allows else 2)
        assert not allows or ids == official(source, *texts)


def test_the_models_own_template_counts_if_it_names_both_roles(tmp_path: Path, model: Any) -> None:
    source = save(tmp_path / "own", model, OWN)
    overrides = json.dumps({**OVERRIDES, "is_original_qwen3_reranker": False})
    reranker = served(source, hf_overrides=overrides)
    tokenizer: Any = AutoTokenizer.from_pretrained(source)

    def rendered(*messages: tuple[str, str]) -> list[int]:
        chat = [{"role": role, "content": text} for role, text in messages]
        return list(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])

    assert reranker.ids("q", "d") == rendered(("query", "q"), ("document", "d"))
    assert reranker.ids("q", "d", instruction="i") == rendered(("system", "i"), ("query", "q"), ("document", "d"))
    prompts = {"prompts": {"web": "Look."}, "default_prompt_name": "web"}
    write(source, "config_sentence_transformers.json", prompts)
    vocab = checkpoints.byte_level().get_vocab_size()
    add_modules(source, "LogitScore", LogitScore={"true_token_id": vocab + 2, "false_token_id": vocab + 3})
    kwargs = {"chat_template": {"add_generation_prompt": True, "restore_suffix": True}}
    write(source, "sentence_bert_config.json", {"modality_config": {"message": {}}, "processing_kwargs": kwargs})
    chat = [
        {"role": "system", "content": "Look."},
        {"role": "query", "content": "q"},
        {"role": "document", "content": "d"},
    ]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert served(source).ids("q", "d") == expected


def test_a_given_template_counts_before_all_others(tmp_path: Path, source: Path) -> None:
    (tmp_path / "given.jinja").write_text("{{ bos_token }}Q {{ query }} D {{ document }}")
    reranker = served(source, hf_overrides=json.dumps(OVERRIDES), chat_template=str(tmp_path / "given.jinja"))
    assert reranker.ids("a b", "c") == reranker.tokenizer.encode("<s>Q a b D c").ids
    with pytest.raises(RequestRejected, match="has no place for 'instruction'"):
        reranker.ids("a", "b", instruction="i")
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="does not write the content of the role 'document'"):
        served(source, hf_overrides=json.dumps(OVERRIDES), chat_template=str(tmp_path / "given.jinja"))


def test_without_a_template_the_tokenizer_joins_pairs_and_the_start_says_so(tmp_path: Path, model: Any) -> None:
    source = save(tmp_path / "plain", converted(model))
    reranker = served(source)
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    assert reranker.ids(*PAIRS[0]) == tokenizer(*PAIRS[0])["input_ids"]
    assert any("pairs of texts are joined without a template" in note for note in notes_of(reranker.folder))
    with pytest.raises(RequestRejected, match="need a model with a template for pairs"):
        reranker.ids(*PAIRS[0], instruction="i")
