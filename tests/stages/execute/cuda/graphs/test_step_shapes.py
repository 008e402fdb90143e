"""Every step has a shape that it fits, and there are few shapes."""

from itertools import pairwise

import pytest

from pipeline.stages.execute.cuda.graphs.step_shapes import MAX_TOKENS, StepShapes, decode_sizes, mixed_sizes

LIMITS = [(1, 16), (2, 96), (7, 40), (16, 2048), (64, 96), (256, 2048), (300, 8192), (1024, 512), (4096, 2**20)]


@pytest.mark.parametrize(("max_num_rows", "max_num_tokens"), LIMITS)
def test_every_step_fits_its_shape(max_num_rows: int, max_num_tokens: int) -> None:
    shapes = StepShapes(max_num_rows, max_num_tokens, max_num_rows)
    most = min(max_num_rows, max_num_tokens)
    for num in range(1, most + 1):
        shape = shapes.decode(num)
        assert shape.num_tokens == shape.num_entries == shape.num_samples and shape.one_each
        assert num <= shape.num_tokens <= max_num_rows
    for num_tokens in {1, 2, 15, 16, 17, 100, 1000, max_num_tokens - 1, max_num_tokens}:
        for num_rows in {1, 2, 16, 17, most}:
            if num_rows <= num_tokens <= max_num_tokens and num_rows <= max_num_rows:
                shape = shapes.mix(num_tokens, num_rows, num_rows // 2)
                assert num_tokens <= shape.num_tokens <= max_num_tokens
                assert num_rows <= shape.num_entries <= max_num_rows
                assert num_rows // 2 <= shape.num_samples <= max_num_rows
                assert shape.is_captured == (num_tokens <= MAX_TOKENS)


@pytest.mark.parametrize("most", [1, 3, 8, 96, 100, 256, 1000, 4096])
def test_sizes_are_few_and_increase_to_the_maximum(most: int) -> None:
    for sizes, worst in ((decode_sizes(most), 2.0), (mixed_sizes(most), 2.0)):
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(b <= worst * a for a, b in pairwise(sizes))
        assert all(b <= 1.5 * a for a, b in pairwise(sizes) if a >= 32)
        assert all(b <= 1.26 * a for a, b in pairwise(sizes) if a >= 256)
    assert len(decode_sizes(256)) <= 20


def test_first_and_later_shapes_cover_all_decode_shapes() -> None:
    shapes = StepShapes(256, 2048, 256)
    first, others = shapes.first(), shapes.others()
    assert [shape.num_tokens for shape in first] == [256, 16, 8, 4, 2, 1]
    assert sorted(shape.num_tokens for shape in first + others) == shapes.decodes
    assert [shape.num_tokens for shape in StepShapes(3, 96, 3).first()] == [3, 2, 1]


@pytest.mark.parametrize(("max_num_rows", "max_num_drafts", "max_num_tokens"), [(4, 12, 48), (256, 256, 2048)])
def test_every_step_with_proposed_ids_fits_its_shape(
    max_num_rows: int, max_num_drafts: int, max_num_tokens: int
) -> None:
    most = max_num_rows + max_num_drafts
    shapes = StepShapes(max_num_rows, max_num_tokens, most)
    assert not StepShapes(max_num_rows, max_num_tokens, max_num_rows).verifying()
    for num_rows in {1, 2, max_num_rows // 2, max_num_rows}:
        for num_samples in range(num_rows + 1, min(most, num_rows * 16, max_num_tokens) + 1):
            for num_tokens in {num_samples, min(max_num_tokens, num_samples + 30)}:
                shape = shapes.verify(num_tokens, num_rows, num_samples)
                assert shape.verifies and not shape.one_each and shape.is_captured
                assert num_tokens <= shape.num_tokens <= max_num_tokens
                assert num_rows <= shape.num_entries <= max_num_rows and num_samples <= shape.num_samples <= most
    assert all(shape.num_tokens == shape.num_samples for shape in shapes.verifying())
