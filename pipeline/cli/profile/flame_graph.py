"""Writes stack samples as a flame graph, as a speedscope file, or as collapsed stacks."""

import html
import json
from pathlib import Path

from pipeline.cli.out_file import write_output
from pipeline.runtime.process.stack_sampler import Stacks


def write(stacks: Stacks, path: Path, title: str) -> None:
    """Write a file in the format of its suffix: .svg is a picture, .json is for https://speedscope.app, others are
    collapsed stacks."""
    match path.suffix:
        case ".svg":
            write_output(path, _svg(stacks, title))
        case ".json":
            write_output(path, _speedscope(stacks, title))
        case _:
            write_output(path, "".join(f"{stack} {count}\n" for stack, count in sorted(stacks.counts.items())))


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
"""Sizes of the picture in pixels: its width, the height of a row, and the approximate width of a letter."""


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
    """Append the boxes of a node's descendants. Returns the number of rows."""
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
