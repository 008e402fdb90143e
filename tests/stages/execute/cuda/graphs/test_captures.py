"""Graphs that are captured beside steps: a capture runs once on padding, and must change no row and no result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.stages.execute.cuda.device import Calls, Interpreted
from pipeline.stages.execute.cuda.graphs.step_graphs import SamplerKind
from pipeline.stages.execute.cuda.runner import CudaRunner
from tests.slices import part_of
from tests.stages.execute.checkpoints import VOCAB_SIZE
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.driver import make_step, row_add, take
from tools.gpu_check.servers.in_flight import FakeMasks

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

PROMPTS = [[5, 9, 7], [11, 3], [8, 8, 4, 2]]
NUM_STEPS = part_of(5, 3)

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.2, "repetition_penalty": 1.5, "presence_penalty": 0.4},
    {"temperature": 1.0, "compiled_grammar": "a"},
    {"temperature": 0.7, "min_p": 0.01, "compiled_grammar": "a", "bias_ids": [17], "bias_values": [2.0]},
    {"temperature": 1.1, "num_logprobs": 3, "compiled_grammar": "a"},
]


class Capturing(Interpreted):
    """Runs the launches of a graph once when it is captured, as a GPU does."""

    captures_graphs = True

    def __init__(self) -> None:
        super().__init__()
        self.num_captured = 0

    def graph(self, calls: Calls) -> Calls:
        self.num_captured += 1
        calls()
        return calls


class StepMasks(FakeMasks):
    """Row r may only sample ids that are r modulo 3, and each step other ones."""

    def __init__(self, words: "np.ndarray[Any, np.dtype[np.uint32]]") -> None:
        super().__init__(words)
        self.num_requests = 0

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> Any:
        self.num_requests += 1
        allowed = np.zeros((len(rows), 32 * self.words.shape[1]), np.uint8)
        for index, row in enumerate(rows.tolist()):
            allowed[index, row % 3 : VOCAB_SIZE : 3] = 1
            allowed[index, : 30 * (self.num_requests % 4)] = 0
        self.words[: len(rows)] = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
        return np.flatnonzero(rows >= 0)


def results_of(settings: Settings, folder: Path, device: Interpreted, options: dict[str, Any]) -> list[Any]:
    """Ids and logprobs of rows with these options, after one without, two steps in flight. Rows come one by one, so
    that new sizes and kinds of samplers are captured while rows are there."""
    runner: Any = CudaRunner(settings, folder, device=device)
    masks: Any = StepMasks(runner.masks.words)
    runner.masks.close()
    runner.masks = runner._changes._masks = masks
    done: list[Any] = []
    runner.publish = lambda launched_step, sampled: done.append((sampled.ids.tolist(), bytes(sampled.token_outputs)))
    starts: dict[int, int] = {}
    for number in range(NUM_STEPS + len(PROMPTS)):
        adds, entries = [], [(row, start, 1, True) for row, start in starts.items()]
        if number < len(PROMPTS):
            prompt = PROMPTS[number]
            of_row = options if number else {"temperature": 1.0}
            adds = [row_add(number, prompt, [number], m.GenerationOptions(seed=number, ignore_eos=True, **of_row))]
            entries.append((number, 0, len(prompt), True))
        for row, start, count, _ in entries:
            starts[row] = start + count
        runner.launch(make_step(entries, adds=adds, step_id=number), take)
        if len(runner.launched_steps) > 1:
            runner.collect()
    runner.drain()
    runner.close()
    assert bool(masks.num_requests) == ("compiled_grammar" in options)
    return done


@pytest.mark.parametrize("options", WAYS, ids=lambda options: "-".join(list(options)[1:]))
def test_a_capture_disturbs_no_step(slight_dir: Path, options: dict[str, Any]) -> None:
    settings = on_device()
    device = Capturing()
    captured = results_of(settings, slight_dir, device, options)
    assert captured == results_of(settings, slight_dir, Interpreted(), options)
    assert device.num_captured >= 3 and len({str(each) for each in captured}) > NUM_STEPS


def test_masks_choose_the_ids(slight_dir: Path) -> None:
    """Otherwise the tests above would compare texts without masks."""
    done = results_of(on_device(), slight_dir, Capturing(), {"temperature": 5.0, "compiled_grammar": "a"})
    for ids, _ in done[len(PROMPTS) :]:
        assert ids[1] % 3 == 1 and ids[2] % 3 == 2


def test_everything_is_captured_before_and_while_idle(slight_dir: Path) -> None:
    """Then the steps of the usual sizes capture nothing."""
    device = Capturing()
    runner: Any = CudaRunner(on_device(), slight_dir, device=device)
    runner.capture_graphs()
    while runner.capture_more():
        pass
    num = device.num_captured
    for shape in (*runner.shapes.first(), *runner.shapes.mixes(1)):
        for filtered in (False, True):
            runner.step_graphs.with_sampling(shape, filtered=filtered)
        for kind in ((False, True), (True, False), (True, True)):
            runner.step_graphs.sampler(SamplerKind(shape.num_samples, kind[0], False, True, kind[1]))
    assert device.num_captured == num
    runner.close()
