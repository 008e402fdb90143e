"""Metrics of images, of servers that take some."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from pipeline.metrics.families import by_name, counter_by_stage, counts_by_stage
from pipeline.metrics.stats import IngestCounts, ScheduleCounts, ServerStats


def media_metrics(stats: ServerStats) -> Iterator[Metric]:
    """Nothing for servers that take no images."""
    ingest = [(name, c.images) for name, c in counts_by_stage(stats, IngestCounts) if c.images is not None]
    schedule = [(name, c.encoder) for name, c in counts_by_stage(stats, ScheduleCounts) if c.encoder is not None]
    if not ingest or not schedule:
        return
    yield counter_by_stage("pipeline_ingest_images", "Images of requests.", ingest, lambda c: c.num_queries)
    words = "Images that could not be decoded."
    yield counter_by_stage("pipeline_ingest_images_rejected", words, ingest, lambda c: c.num_rejected)
    words = "Time until images were decoded that were not in the cache."
    yield counter_by_stage("pipeline_ingest_image_decode_seconds", words, ingest, lambda c: c.decode_s)
    words = "Decoded images in the cache of ingest."
    yield by_name(
        GaugeMetricFamily("pipeline_image_cache_bytes", words, labels=["stage"]), ingest, lambda c: c.cache_bytes
    )
    rows = GaugeMetricFamily("pipeline_encoder_cache_rows", "Rows of the encoder cache.", labels=["stage", "state"])
    for name, counts in schedule:
        for state, value in (("free", counts.num_free), ("cached", counts.num_cached), ("held", counts.num_held)):
            rows.add_metric([name, state], value)
    yield rows
    words = "Images whose rows sequences needed."
    yield counter_by_stage("pipeline_encoder_cache_queries", words, schedule, lambda c: c.num_queries)
    words = "Those of them that were in the encoder cache."
    yield counter_by_stage("pipeline_encoder_cache_hits", words, schedule, lambda c: c.num_hits)
    words = "Rows of embeddings that were made of images."
    yield counter_by_stage("pipeline_encoder_rows", words, schedule, lambda c: c.num_rows_encoded)
    words = "Time of steps spent on encoding images."
    yield counter_by_stage("pipeline_encoder_seconds", words, schedule, lambda c: c.encode_s)
