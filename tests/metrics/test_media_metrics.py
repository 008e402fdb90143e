"""Metrics of images."""

from pipeline.metrics.media_stats import EncoderCacheCounts, ImageCounts
from pipeline.metrics.stats import IngestCounts
from tests.metrics.test_exposition import read, schedule, server, stage, value


def test_images_have_metrics_only_if_the_server_takes_some() -> None:
    counts = IngestCounts(0, 0, 1, 2, 3, 0.5, images=ImageCounts(4, 3, 1, 0.25, 1000))
    encoder = EncoderCacheCounts(5, 6, 7, 8, 9, 10, 0.75)
    samples = read(server(stage("ingest.0", counts), stage("schedule.0", schedule(encoder=encoder))))
    ingest = {"images": 4, "images_rejected": 1, "image_decode_seconds": 0.25}
    for name, expected in ingest.items():
        assert value(samples, f"pipeline_ingest_{name}_total", stage="ingest.0") == expected
    assert value(samples, "pipeline_image_cache_bytes", stage="ingest.0") == 1000
    assert [value(samples, f"vllm:mm_cache_{name}_total") for name in ("queries", "hits")] == [4, 3]
    rows = [
        value(samples, "pipeline_encoder_cache_rows", stage="schedule.0", state=s) for s in ("free", "cached", "held")
    ]
    assert rows == [5, 6, 7]
    names = ["cache_queries", "cache_hits", "rows", "seconds"]
    assert [value(samples, f"pipeline_encoder_{name}_total", stage="schedule.0") for name in names] == [8, 9, 10, 0.75]
    off = read(server(stage("ingest.0", IngestCounts(0, 0, 1, 2, 3, 0.5)), stage("schedule.0", schedule())))
    assert not any("image" in name or "encoder" in name or "mm_cache" in name for name, _ in off)
