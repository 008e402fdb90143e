"""A sampling profiler for the process it runs in, and what it finds as a flame graph.

The kernel's profiling timer counts the CPU time of the process and signals each time another `INTERVAL_S` has been
used; Python then interrupts its main thread between two instructions, and the stack that it has there is one sample. So
it costs some microseconds a sample, and samples fall where CPU is used, not where the stage waits. Time in native code
goes to the Python line that called it. A sample for which the main thread used hardly any CPU is of another thread,
ZeroMQ's, and is counted as such.
"""

import html
import json
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec

from pipeline.errors import UserError

INTERVAL_S = 0.001
OTHER = "(other threads: ZeroMQ)"
MAX_DEPTH = 128


class Stacks(msgspec.Struct, array_like=True, frozen=True):
    """How often each stack was seen, outermost frame first, frames separated by `;`."""

    counts: dict[str, int]
    interval_s: float
    """CPU time from one sample to the next, on average: kernels count it by their ticks, of 1 to 10 ms."""


class Sampler:
    """Samples from `start` to `stop`. Raises UserError where it is not in a main thread: signals come only there."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[tuple[str, int], str] = {}
        self._main_s = self._begun_s = 0.0
        self._is_on = False

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UserError("a stage that is not a process of its own can't be sampled")
        self._counts.clear()
        self._main_s = time.thread_time()
        self._begun_s = time.process_time()
        self._is_on = True
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self) -> Stacks:
        if not self._is_on:
            raise UserError("nothing is being sampled")
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # one may be on its way; by default it would end the process
        self._is_on = False
        used_s = time.process_time() - self._begun_s
        return Stacks(dict(self._counts), used_s / max(1, self._counts.total()))

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now_s = time.thread_time()
        is_main, self._main_s = now_s - self._main_s > INTERVAL_S / 2, now_s
        if not is_main:
            self._counts[OTHER] += 1
            return
        names: list[str] = []
        while frame is not None and len(names) < MAX_DEPTH:
            names.append(self._name(frame))
            frame = frame.f_back
        self._counts[";".join(reversed(names))] += 1

    def _name(self, frame: FrameType) -> str:
        code = frame.f_code
        key = code.co_filename, code.co_firstlineno
        if key not in self._names:
            parts = Path(code.co_filename).parts[-2:]
            place = "/".join(parts).replace(";", ",").replace(" ", "_")
            self._names[key] = f"{code.co_qualname} ({place}:{code.co_firstlineno})".replace(";", ",")
        return self._names[key]


def write(stacks: Stacks, path: Path, title: str) -> None:
    """As the file's name says: .svg is a picture, .json is for https://speedscope.app, others are collapsed stacks."""
    match path.suffix:
        case ".svg":
            path.write_text(_svg(stacks, title))
        case ".json":
            path.write_text(_speedscope(stacks, title))
        case _:
            path.write_text("".join(f"{stack} {count}\n" for stack, count in sorted(stacks.counts.items())))


def _speedscope(stacks: Stacks, title: str) -> str:
    frames: dict[str, int] = {}
    samples, weights = [], []
    for stack, count in sorted(stacks.counts.items()):
        samples.append([frames.setdefault(name, len(frames)) for name in stack.split(";")])
        weights.append(count * stacks.interval_s)
    total = sum(weights)
    profile = {
        "type": "sampled",
        "name": title,
        "unit": "seconds",
        "startValue": 0,
        "endValue": total,
        "samples": samples,
        "weights": weights,
    }
    return json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": [profile],
            "name": title,
        }
    )


WIDTH, ROW, CHAR = 1200.0, 17, 6.6
"""Of the picture, in pixels: its width, a row's height, and about a letter's width."""


class _Node:
    def __init__(self) -> None:
        self.count = 0
        self.children: dict[str, _Node] = {}


def _svg(stacks: Stacks, title: str) -> str:
    root = _Node()
    for stack, count in sorted(stacks.counts.items()):
        node = root
        node.count += count
        for name in stack.split(";"):
            node = node.children.setdefault(name, _Node())
            node.count += count
    boxes: list[str] = []
    depth = _boxes(root, 0.0, 0, max(1, root.count), boxes)
    height = (depth + 2) * ROW
    head = html.escape(f"{title}: {root.count} samples of {1000 * stacks.interval_s:g} ms of CPU")
    style = "text{font:11px monospace}rect{stroke:#fff;stroke-width:.5}g:hover rect{stroke:#000}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{height}"><style>{style}</style>'
        f'<text x="4" y="12">{head}</text>{"".join(boxes)}</svg>\n'
    )


def _boxes(node: _Node, x: float, depth: int, total: int, boxes: list[str]) -> int:
    """Append the boxes of a node's children, and theirs. Returns how many rows they have."""
    deepest = depth
    for name, child in sorted(node.children.items()):
        width = child.count / total * WIDTH
        if width >= 0.3:
            y = (depth + 1) * ROW
            hue = sum(name.encode()) % 40 + 15
            label = html.escape(name[: max(0, int(width / CHAR))])
            hint = html.escape(f"{name}: {child.count} samples, {100 * child.count / total:.1f} %")
            boxes.append(
                f'<g><title>{hint}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 1}" '
                f'fill="hsl({hue},80%,70%)"/><text x="{x + 2:.2f}" y="{y + 12}">{label}</text></g>'
            )
            deepest = max(deepest, _boxes(child, x, depth + 1, total, boxes))
        x += width
    return max(deepest, depth + 1)
