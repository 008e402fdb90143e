"""Pipeline parallelism: which layers each stage of the pipeline computes.

    stage 0      embedding, layers 0 to 18
    stage 1      layers 19 to 29, last norm, head

The stages take about the same time if each reads as many bytes of weights: those of its layers, and the head's in the
last one. Tokens that only read a prompt skip the head, so prompts alone would be faster with equal numbers of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeline.config.sections.stages import ExecuteSettings
from pipeline.errors import UserError
from pipeline.runtime.model.kv_groups import NO_LOCATION, KVLayout, scratch


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage of the pipeline computes of a model."""

    layers: range
    is_first: bool = True
    """It has the embedding."""
    is_last: bool = True
    """It has the last norm and the head."""

    def __str__(self) -> str:
        return f"{self.layers.start}-{self.layers.stop - 1}"


def split(settings: ExecuteSettings, layer_bytes: Sequence[int], head_bytes: int) -> list[Part]:
    """The parts of all stages. Raises UserError if the model can't be divided like that."""
    num, num_layers = settings.pipeline_parallel, len(layer_bytes)
    if num > num_layers:
        raise UserError(f"execute.pipeline_parallel: {num} stages, but the model has {num_layers} layers")
    sizes = settings.pipeline_layers or balanced(layer_bytes, head_bytes, num)
    if sum(sizes) != num_layers:
        raise UserError(
            f"execute.pipeline_layers: {' + '.join(map(str, sizes))} = {sum(sizes)} layers, but the model has "
            f"{num_layers}"
        )
    ends = list(accumulate(sizes))
    return [Part(range(end - size, end), end == size, end == num_layers) for end, size in zip(ends, sizes, strict=True)]


def balanced(layer_bytes: Sequence[int], head_bytes: int, num: int) -> list[int]:
    """Numbers of layers of `num` stages, at least one each, of which the one with the most bytes has as few as
    possible; the last one also has the head."""
    sums = [0, *accumulate(layer_bytes)]
    num_layers = len(layer_bytes)
    # best[i]: the least possible maximum of the stages so far, if they have the first i layers, and their ends.
    best: dict[int, tuple[int, list[int]]] = {i: (sums[i], [i]) for i in range(1, num_layers + 1)}
    for stage in range(1, num):
        is_last = stage == num - 1
        best = {
            end: min(
                (max(most, sums[end] - sums[begin] + (head_bytes if is_last else 0)), [*ends, end])
                for begin, (most, ends) in best.items()
                if begin < end
            )
            for end in range(stage + 1, num_layers + 1)
        }
    ends = best[num_layers][1]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def kv_layout_of(layout: KVLayout, part: Part) -> KVLayout:
    """Where the layers of a part keep keys and values: the groups are those of the model, and blocks have room for the
    part's layers only."""
    if len(part.layers) == len(layout.layer_locations):
        return layout
    assert not layout.begins, "a model whose layers have different sizes has one stage"
    sizes = [0] * len(layout.groups)
    layer_locations = []
    for layer in part.layers:
        group, _ = location = layout.layer_locations[layer]
        if location == NO_LOCATION:
            layer_locations.append(location)
            continue
        layer_locations.append((group, sizes[group]))
        sizes[group] += 1
    if layout == scratch(len(layout.layer_locations)):
        return scratch(len(part.layers))
    return KVLayout(layout.groups, tuple(layer_locations), max(sizes))


def with_most_layers(layout: KVLayout, parts: Sequence[Part]) -> KVLayout:
    """The layout of a model whose blocks have room for the part that needs most."""
    return replace(layout, layers_per_group=max(kv_layout_of(layout, part).layers_per_group for part in parts))
