"""Random histories with images: exact tokens, no row of the encoder cache lost, and none read before it is written."""

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from pipeline.runtime import messages as m
from pipeline.runtime.model.kv_groups import FULL
from pipeline.stages.schedule.scheduler_config import StateConfig
from tests.stages.schedule.bench import media_item
from tests.stages.schedule.test_histories import EXAMPLES, GroupHistories, Histories, StateHistories

IMAGE_ROWS = {"a": 1, "b": 3, "c": 17, "d": 20, "e": 40}
"""By name of an image."""
PLACEHOLDER, SEPARATOR = 3, 2
MEDIA_PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), max_size=20),
        st.tuples(st.sampled_from(sorted(IMAGE_ROWS)), st.lists(st.integers(1, 39), max_size=2, unique=True)),
    ),
    min_size=1,
    max_size=5,
)
"""Texts, and images with the rows before which their runs are divided."""


def with_media(parts: list[list[int] | tuple[str, list[int]]]) -> tuple[list[int], list[m.MediaItem]]:
    """A prompt with these parts, as far as there is room, and its images."""
    prompt: list[int] = []
    media: list[m.MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            prompt += part
            continue
        name, cuts = part
        num_rows, runs = IMAGE_ROWS[name], list[tuple[int, int]]()
        bounds = [0, *sorted(cut for cut in cuts if cut < num_rows), num_rows]
        if len(prompt) + num_rows + len(bounds) > 100:
            continue
        for begin, end in pairwise(bounds):
            prompt += [SEPARATOR] if begin else []
            runs.append((len(prompt), end - begin))
            prompt += [PLACEHOLDER] * (end - begin)
        media.append(media_item(name, *runs))
    return prompt[:110] or [1], media


class MediaHistories(Histories):
    """As without images, which some prompts have here."""

    GROUPS = st.one_of(st.just((FULL,)), st.just((FULL,)), GroupHistories.GROUPS)
    STATES = st.one_of(st.just(StateConfig()), st.just(StateConfig()), StateHistories.STATES)
    NUM_ENCODER_ROWS = st.sampled_from([40, 41, 64, 200])
    MAX_SLOWDOWNS = st.sampled_from([float("inf"), 1.1, 2.0])

    @rule(
        parts=MEDIA_PARTS,
        max_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        priority=st.integers(-1, 2),
        num_prompt_logprobs=st.sampled_from([-1, -1, 1]),
    )
    def admit_media(
        self,
        parts: list[list[int] | tuple[str, list[int]]],
        max_tokens: int,
        n: int,
        priority: int,
        num_prompt_logprobs: int,
    ) -> None:
        prompt, media = with_media(parts)
        number = self.bench.admit(
            prompt, max_tokens, n, priority=priority, num_prompt_logprobs=num_prompt_logprobs, media=media
        )
        self.known.append(number)

    @invariant()
    def the_encoder_cache_holds_what_is_being_computed(self) -> None:
        if hasattr(self, "bench"):
            cache = self.bench.scheduler.media.cache
            assert cache.num_held <= cache.num_rows

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "bench"):
            assert self.bench.scheduler.media.cache.num_held == 0


class WholeRunHistories(MediaHistories):
    """The positions of a run see each other, as those of Gemma 3's images."""

    STATES = st.just(StateConfig())
    MAX_WHOLE_RUN = max(IMAGE_ROWS.values())


TestMediaHistories = MediaHistories.TestCase
TestMediaHistories.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestWholeRunHistories = WholeRunHistories.TestCase
TestWholeRunHistories.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
