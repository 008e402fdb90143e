"""What a model of several needs of memory_bytes."""

from pathlib import Path

import msgspec

from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.sections.speculative import max_num_drafts
from pipeline.config.settings import Settings
from pipeline.media import support
from pipeline.runtime.model import vocabulary_size
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.runtime.model.vocabulary_size import VocabularySize
from pipeline.runtime.model.weight_headers import weight_facts

MIB = 1024**2
PROCESSES_BYTES = 192 * MIB
"""What the processes of a model take besides its weights, KV cache, swap space and vocabulary, at most. Measured with
two threads: 161 MiB of a tiny model."""
SLEEPING_BYTES = 128 * MIB
"""What they take without the executor, while the model sleeps. Measured: 96 MiB, and 18 of the process for grammars."""
TEXT_BYTES, MASKS_BYTES = 150, 460
"""For each entry of the vocabulary: of detokenize, and of each of the two processes for grammars besides the tokenizer.
They start with the first grammar."""
DEVICE_BYTES = 320 * MIB
"""What the executor takes of a GPU's memory besides weights, KV cache and swap space."""


class Needs(msgspec.Struct, frozen=True):
    """Of a prepared model, in bytes."""

    awake: int
    processes_asleep: int
    """What its processes take while it sleeps."""


class VocabularyBytes(msgspec.Struct, frozen=True):
    """What processes take because of a vocabulary."""

    text: int
    """ingest and detokenize"""
    grammar: int
    """Each of the two processes for grammars: ingest's, and the executor's."""

    @classmethod
    def of(cls, size: VocabularySize) -> "VocabularyBytes":
        """For a vocabulary of this size."""
        tokenizer = size.tokenizer_bytes
        return cls(tokenizer + TEXT_BYTES * size.num_entries, tokenizer + MASKS_BYTES * size.num_entries)


def needed_before(settings: Settings) -> int:
    """What is known before a model is prepared: all but its weights and its vocabulary."""
    return PROCESSES_BYTES + _kv_bytes(settings)


def needs_of(settings: Settings, folder: Path) -> Needs:
    """What the model prepared in `folder` needs: of the GPU's memory, if it is there."""
    config, execute = ModelConfig.load(folder), settings.execute
    vocabulary = VocabularyBytes.of(vocabulary_size.load(folder, config.vocab_size))
    paths = dict.fromkeys(config.weight_paths(folder))
    memory = execute.swap_bytes
    if support.encodes(settings, folder) and (vision := VisionConfig.load(folder)) is not None:
        paths |= dict.fromkeys(vision.encoder.weight_paths(folder))
        memory += execute.encoder_cache_bytes
    memory += weight_facts(list(paths)).num_bytes
    asleep = SLEEPING_BYTES + vocabulary.text
    processes = PROCESSES_BYTES + vocabulary.text
    if config.generates:
        memory += _kv_bytes(settings)
        asleep += vocabulary.grammar
        processes += 2 * vocabulary.grammar + _logits_bytes(settings, config)
    return Needs(memory + (processes if execute.device == "cpu" else DEVICE_BYTES), asleep)


def _kv_bytes(settings: Settings) -> int:
    execute = settings.execute
    of_rank = kv_bytes_in_ram(settings) if execute.device == "cpu" else execute.kv_cache_bytes
    return of_rank * execute.num_ranks


def _logits_bytes(settings: Settings, config: ModelConfig) -> int:
    """Of the executor: a float32 for each row, draft and id."""
    num_seqs = settings.schedule.max_num_seqs
    return (num_seqs + max_num_drafts(settings.speculative, num_seqs)) * config.vocab_size * 4
