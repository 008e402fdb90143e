"""Requests with known outcomes, and the ledger of what a gateway received about them.

The outcome of a sequence is a pure function of its prompt, seed, index and options. A ledger compares every delta with
it at the delta's absolute offsets, also those of earlier attempts: no process may ever contradict another.
"""

from random import Random

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.token_outputs import token_output_bytes
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.stages.gateway.apis.openai.reply import COMPLETION
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.schedule.request_table import PROMPT_TAIL
from pipeline.supervisor.crashes.crash_counts import MAX_CRASHES
from pipeline.text.vocabulary import Vocabulary
from tests import fakes
from tests.rig import raw

ID_BYTES = 4
INCOMPLETE = "\ufffd"
"""The text of an incomplete character."""


class Outcome(msgspec.Struct):
    """What a client of an undisturbed server gets of one sequence."""

    ids: list[int]
    text: str
    finish: int
    stop_reason: str | int | None


def outcome_of(
    vocabulary: Vocabulary, prompt: list[int], options: m.GenerationOptions, index: int, max_tokens: int
) -> Outcome:
    """Decode the expected ids one by one."""
    ids, natural = fakes.expected(prompt, options, index, max_tokens)
    fails = [position for position, token_id in enumerate(ids) if token_id in options.bias_ids]
    if fails:
        ids, natural = ids[: fails[0]], Finish.ERROR
    if options.pooling != m.Pooling.NONE:
        return Outcome(ids, "", natural, None)
    processor = OutputProcessor(vocabulary)
    tail = np.array(prompt[-PROMPT_TAIL:], np.int32).tobytes()
    processor.open(m.Open(1, 1, 1, index, 0, tail, raw(msgspec.structs.replace(options, num_logprobs=-1))))
    outcome = Outcome([], "", Finish.NONE, None)
    for position in range(len(ids) + 1):
        token_ids = ids[position : position + 1]
        is_last = position == len(ids) if fails else position == len(ids) - 1
        processor.settle([1], [position], [len(token_ids)], token_ids, [natural if is_last else Finish.NONE])
        if processor.unsent():
            deltas = processor.deltas(0)
            processor.mark_sent(0)
            outcome.text += deltas.texts[0]
            outcome.ids += np.frombuffer(deltas.ids, np.int32).tolist()
            outcome.finish, outcome.stop_reason = deltas.finishes[0], deltas.stop_reasons[0]
        if outcome.finish:
            break
    return outcome


class Case(msgspec.Struct, eq=False):
    """One request of a client."""

    number: int
    prompt: list[int]
    options: m.GenerationOptions
    outcomes: list[Outcome]
    """By index."""
    has_killed: bool = False
    """Schedule has died of it."""
    may_end: bool = False
    """Though it kills schedule, it may get its last ids: by steps after the last plan of a schedule that hands over, or
    by steps that settle in one turn, before the next plan and report."""
    is_too_long: bool = False
    """Schedule refuses it."""
    nums_given: list[int] = []
    """Output ids that the client has already, by index; empty for a new request."""
    request: Request | None = None
    is_aborted: bool = False
    has_left: bool = False
    """The client has closed its connection."""
    is_over: bool = False
    texts: list[str] = []
    """What the client has read, by index."""
    text_begins: dict[int, int] = {}
    """Offset of the first text that arrived, by index: where a resumed stream goes on."""

    @property
    def request_id(self) -> int:
        """As the stages know it."""
        assert self.request is not None
        return self.request.prompt_requests[0].id

    @property
    def attempt(self) -> int:
        """The current one."""
        assert self.request is not None
        return self.request.prompt_requests[0].submit.attempt

    @property
    def is_closed(self) -> bool:
        """Whether all its sequences have ended."""
        assert self.request is not None
        return self.request.prompt_requests[0].is_closed

    def parsed(self) -> ParsedRequest:
        packed = np.array(self.prompt, np.int32).tobytes()
        given = zip(self.outcomes, self.nums_given, strict=bool(self.nums_given))
        return ParsedRequest(
            dialect=COMPLETION,
            model="model",
            prompts=[m.IdsPrompt(packed)],
            n=self.options.n,
            max_tokens_param="max_tokens",
            seed=self.options.seed,
            options=self.options,
            stream=True,
            include_usage=False,
            outputs=[np.array(outcome.ids[:num], np.int32).tobytes() for outcome, num in given],
            request_id=f"request {self.number}",
        )


class Ledger:
    """The requests of one gateway's process."""

    def __init__(self, num_random_deaths: dict[str, int], *, is_strict: bool) -> None:
        """`num_random_deaths` are those of the whole run that no request caused, by stage. `is_strict`: only requests
        that have killed a stage may fail for its deaths."""
        self._is_strict = is_strict
        self._num_random_deaths = num_random_deaths
        self.cases: list[Case] = []
        self._by_id: dict[int, Case] = {}
        self._closings: set[tuple[str, int, int, int]] = set()
        """By sender, request, attempt and index."""

    def add(self, case: Case) -> None:
        self.cases.append(case)
        self._by_id[case.request_id] = case

    @property
    def open_cases(self) -> list[Case]:
        """Whose clients still read."""
        return [case for case in self.cases if not case.is_over]

    def check(self, message: m.Deltas, sender: str) -> None:
        """Assert that nothing in a message contradicts what its sequences must be."""
        begin = 0
        for entry, request_id in enumerate(message.request_ids):
            end = begin + message.num_ids[entry] * ID_BYTES
            ids, begin = np.frombuffer(message.ids[begin:end], np.int32).tolist(), end
            case = self._by_id.get(request_id)
            if case is None:
                continue  # of the gateway before
            index, finish = message.indexes[entry], message.finishes[entry]
            outcome, offset = case.outcomes[index], message.id_offsets[entry]
            text, text_offset = message.texts[entry], message.text_offsets[entry]
            where = f"request {case.number}, sequence {index}, attempt {message.attempts[entry]}"
            assert outcome.ids[offset : offset + len(ids)] == ids, f"{where}: other ids at {offset}"
            if finish in (Finish.NONE, outcome.finish):  # else it may end within a character, or within a stop string
                assert outcome.text[text_offset:].startswith(text), f"{where}: another text at {text_offset}: {text!r}"
            case.text_begins.setdefault(index, text_offset)
            if finish in (Finish.STOP, Finish.LENGTH):
                found = offset + len(ids), text_offset + len(text), finish, message.stop_reasons[entry]
                expected = len(outcome.ids), len(outcome.text), outcome.finish, outcome.stop_reason
                assert found == expected, f"{where}: it ended with {found} and not with {expected}"
            if case.is_closed:
                continue  # the sequences of a request that was submitted twice are computed again, and aborted
            if finish == Finish.ABORT:
                is_old = message.attempts[entry] < case.attempt
                assert is_old or case.is_aborted or case.is_over, f"{where}: it was not aborted"
            if finish:
                key = sender, request_id, message.attempts[entry], index
                assert key not in self._closings, f"{where}: it has two closings"
                self._closings.add(key)

    def read(self, table: RequestTable) -> None:
        """Do what clients and the tasks of responses do: read, and leave when the response is over."""
        for case in self.open_cases:
            request = case.request
            assert request is not None
            for index, sequence in enumerate(request.sequences):
                case.texts[index] += sequence.take_text()
            if request.failure is not None or request.is_finished:
                case.is_over = True
                table.release(request)

    def check_outcomes(self) -> None:
        """Assert that each request has ended as it must."""
        for case in self.cases:
            if case.has_left:
                continue
            assert case.is_over, f"request {case.number} has not ended"
            self._check_outcome(case)

    def _check_outcome(self, case: Case) -> None:
        request = case.request
        assert request is not None
        where = f"request {case.number}"
        if (failure := request.failure) is not None:
            is_killer = False
            if failure.code == "stage_died":
                # Random deaths count too, in runs that are not strict.
                stage = failure.message.partition(" died ")[0]
                assert failure.status == 500, f"{where}: {failure}"
                num_random = 0 if self._is_strict else self._num_random_deaths.get(stage, 0)
                is_killer = case.has_killed or num_random >= MAX_CRASHES
            may_fail = any(outcome.finish == Finish.ERROR for outcome in case.outcomes)
            expected = 400 if case.is_too_long else 500
            assert is_killer or ((case.is_too_long or may_fail) and failure.status == expected), f"{where}: {failure}"
            return
        must_fail = case.has_killed and not (case.is_aborted or case.may_end)
        assert not must_fail, f"{where}: a stage died of it, and it has not failed"
        for index, (sequence, outcome) in enumerate(zip(request.sequences, case.outcomes, strict=True)):
            if case.is_aborted and sequence.finish == Finish.ABORT:
                continue
            where = f"request {case.number}, sequence {index}"
            num_resumed_tokens = case.nums_given[index] if case.nums_given else 0
            assert np.frombuffer(sequence.ids, np.int32).tolist() == outcome.ids, f"{where}: other ids"
            assert (sequence.finish, sequence.stop_reason) == (outcome.finish, outcome.stop_reason), where
            if not case.is_too_long:
                assert case.texts[index] == outcome.text[case.text_begins[index] if num_resumed_tokens else 0 :], where
            options = case.options
            if options.num_logprobs >= 0:
                token_outputs = b"".join(
                    fakes.record(one, options.num_logprobs) for one in outcome.ids[num_resumed_tokens:]
                )
                assert sequence.token_outputs == token_outputs, f"{where}: other logprobs"
                assert len(token_outputs) == (len(outcome.ids) - num_resumed_tokens) * token_output_bytes(
                    options, hidden_size=0
                )
        if case.options.num_prompt_logprobs >= 0 and not case.is_aborted:
            token_outputs = b"".join(fakes.record(one, case.options.num_prompt_logprobs) for one in case.prompt[1:])
            assert request.prompt_requests[0].prompt_logprobs == token_outputs, f"{where}: other prompt logprobs"


def random_case(
    rng: Random, number: int, vocabulary: Vocabulary, max_model_len: int, num_blocks: int, block_size: int
) -> Case:
    """A request with its outcomes. Some stop early by an id or a text, some fail, are too long, or are pooled."""
    prompt = list(range(rng.randint(1, 60)))  # all of these share a prefix
    if rng.random() < 0.5:
        prompt = [rng.randint(0, 3) for _ in range(rng.randint(1, 50))]
    max_tokens = rng.randint(1, 36)
    options = m.GenerationOptions(
        n=rng.choice([1, 1, 2, 3]),
        max_tokens=max_tokens,
        seed=rng.randint(0, 3),
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice(["", "", "", "mine"]),
        num_logprobs=rng.choice([-1, -1, 0, 2]),
        num_prompt_logprobs=rng.choice([-1, -1, -1, 1]),
        include_stop_str_in_output=rng.random() < 0.5,
    )
    limit = min(max_tokens, max_model_len - len(prompt))

    def outcomes() -> list[Outcome]:
        return [outcome_of(vocabulary, prompt, options, index, limit) for index in range(options.n)]

    likely = rng.choice(outcomes())
    way = rng.random()
    if way < 0.2:
        options = msgspec.structs.replace(options, stop_token_ids=[rng.choice(likely.ids), 5])
    elif way < 0.5 and (text := likely.text.replace(INCOMPLETE, "")):
        # An incomplete character is no part of a stop string: an abort in the middle of a character would complete it.
        begin = rng.randrange(len(text))
        options = msgspec.structs.replace(options, stop=[text[begin : begin + rng.randint(1, 4)], "no"])
    elif way < 0.6:
        options = msgspec.structs.replace(options, bias_ids=[rng.choice(likely.ids)], bias_values=[1.0])
    elif way > 0.85:
        pooled = {"n": 1, "max_tokens": 1, "pooling": m.Pooling.MEAN, "num_logprobs": -1, "num_prompt_logprobs": -1}
        options, limit = msgspec.structs.replace(options, **pooled), 1
    case = Case(number, prompt, options, outcomes(), texts=[""] * options.n)
    case.is_too_long = -(-(len(prompt) + limit - 1) // block_size) > num_blocks
    may_resume = not options.bias_ids and options.num_prompt_logprobs < 0 and options.pooling == m.Pooling.NONE
    if rng.random() < 0.2 and may_resume:
        case.nums_given = [rng.randint(0, len(outcome.ids)) for outcome in case.outcomes]
    return case
