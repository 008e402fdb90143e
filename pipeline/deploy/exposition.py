"""Metrics of an ingress in Prometheus' text form: its own, then those of each replica with the label `replica`."""

import re
from collections.abc import Mapping, Sequence

from pipeline.deploy.proxy.relay_counts import RelayCounts
from pipeline.deploy.replicas import ReplicaInfo, RoutedReplicas
from pipeline.metrics.stats import KeyUsage

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(\{)?(.*)")
_COMMENT = re.compile(r"# (HELP|TYPE) ([A-Za-z_:][A-Za-z0-9_:]*) ")
STATES = ("ok", "draining", "down")


def own_metrics(
    counts: RelayCounts,
    routed: RoutedReplicas,
    infos: list[ReplicaInfo],
    num_open: int,
    keys: Sequence[KeyUsage] = (),
) -> str:
    """The metrics of the ingress. `keys` are what it has counted of each API key."""
    router = routed.router.counts
    lines: list[str] = []

    def metric(name: str, kind: str, words: str, samples: Mapping[str, float]) -> None:
        lines.extend([f"# HELP {name} {words}", f"# TYPE {name} {kind}"])
        lines.extend(f"{name}{labels} {value:g}" for labels, value in samples.items())

    def count(name: str, words: str, value: float) -> None:
        metric(f"pipeline_{name}_total", "counter", words, {"": value})

    count("ingress_requests", "Requests.", counts.num_requests)
    count("ingress_retries", "Attempts repeated before anything was passed on.", counts.num_retried)
    count("ingress_resumed_streams", "Streams continued at another replica.", counts.num_resumed)
    count("ingress_inexact_streams", "Of these, those whose ids may differ from there on.", counts.num_inexact)
    count("ingress_broken_streams", "Streams that ended because their replica was lost.", counts.num_broken)
    count("ingress_unserved", "Requests that no replica took.", counts.num_unserved)
    words = "Replies whose clients took the least while all of them kept too much."
    count("ingress_replies_given_up", words, counts.num_given_up)
    count("router_requests", "Requests routed to a replica.", router.num_requests)
    count("router_hits", "Of these, requests with a prefix that the replica was expected to have.", router.num_hits)
    count("router_misses", "Of these, the other ones.", router.num_requests - router.num_hits)
    count("router_prompt_tokens", "Prompt tokens, estimated.", router.num_prompt_tokens)
    count("router_cached_tokens", "Of these, tokens of expected prefixes.", router.num_cached_tokens)
    count("router_predicted_ttft_seconds", "Sum of the predicted times to first token.", router.predicted_s)
    count("router_measured_ttft_seconds", "Sum of the measured ones.", router.measured_s)
    speed = {"": routed.speed.tokens_per_s}
    metric("pipeline_router_prefill_tokens_per_second", "gauge", "Speed of prefill, as measured.", speed)
    metric("pipeline_ingress_open_requests", "gauge", "Requests whose responses are not over.", {"": num_open})
    open_requests = {f'{{replica="{one.name}"}}': float(one.open_requests) for one in infos}
    metric("pipeline_replica_open_requests", "gauge", "Requests that are open at a replica.", open_requests)
    kinds = {f'{{replica="{one.name}",{_kind(one)}}}': 1.0 for one in infos}
    metric("pipeline_replica_info", "gauge", "What a replica computes with; the value is 1.", kinds)
    states = {
        f'{{replica="{one.name}",state="{state}"}}': float(one.status == state) for one in infos for state in STATES
    }
    metric("pipeline_replica_state", "gauge", "1 for the state that a replica is in.", states)
    failures = {f'{{replica="{name}"}}': float(num) for name, num in routed.num_failures.items()}
    metric("pipeline_replica_failures_total", "counter", "How often a request found a replica dead.", failures)
    if keys:
        limited = {f'{{key="{key.name}"}}': float(key.num_rate_limited) for key in keys}
        words = "Requests of an API key that the ingress has answered with 429."
        metric("pipeline_ingress_rate_limited_total", "counter", words, limited)
    return "\n".join(lines) + "\n"


def _kind(replica: ReplicaInfo) -> str:
    """Labels. What a replica says of itself may be anything."""
    backend = replica.backend.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    batch_invariant = "" if replica.batch_invariant is None else str(replica.batch_invariant).lower()
    return f'backend="{backend}",batch_invariant="{batch_invariant}"'


def of_replicas(texts: Mapping[str, str]) -> str:
    """The metrics of all replicas: each sample gets the label `replica`. Samples of one metric stay together."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, text in texts.items():
        name = ""
        for line in text.split("\n"):  # not splitlines: a label may have other separators
            if comment := _COMMENT.match(line):
                kind, name = comment.groups()
                comments, _ = families.setdefault(name, ([], []))
                if not any(other.startswith(f"# {kind} ") for other in comments):
                    comments.append(line)
            elif line and (match := _SAMPLE.fullmatch(line)):
                _, samples = families.setdefault(name, ([], []))
                rest = match[3] if match[2] is None else "," + match[3]
                if match[2] is None:
                    samples.append(f'{match[1]}{{replica="{replica}"}}{rest}')
                elif match[3].startswith("}"):
                    samples.append(f'{match[1]}{{replica="{replica}"{match[3]}')
                else:
                    samples.append(f'{match[1]}{{replica="{replica}"{rest}')
    return "".join("\n".join([*comments, *samples]) + "\n" for comments, samples in families.values())
