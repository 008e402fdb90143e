// The view of the stages: rates, the way of requests, lines between boxes, and numbers.

import assert from "node:assert/strict";
import { test } from "node:test";

import { counted, duration, number, percent, size, uptime } from "../page/common/format.js";
import { HOPS } from "../page/common/hops.js";
import { unitOf } from "../page/pipeline/diagram.js";
import { arrowData, lengthOf, line, pathData, pointAt } from "../page/pipeline/geometry.js";
import { hopsUntilNow } from "../page/pipeline/requests.js";
import { History, hitShare, placeOf, ROUTE, summary, Tracker } from "../page/pipeline/state.js";

const stage = (name, more = {}) => ({
  name,
  state: "ready",
  num_queued: 1,
  num_active: 2,
  num_received: 0,
  cpu_s: 0,
  rss_bytes: 10,
  idle_s: 0,
  ...more,
});
const counters = (output, more = {}) => ({
  prompt_tokens: 0,
  cached_tokens: 0,
  output_tokens: output,
  steps: 0,
  preemptions: 0,
  finished: 0,
  ...more,
});
const state = (seconds, output, more = {}) => ({
  unix_s: 100 + seconds,
  uptime_s: seconds,
  gateway: 0,
  counters: counters(output),
  stages: [],
  requests: [],
  ...more,
});
const request = (id, hop, more = {}) => ({ id, index: 0, hop, received: 1, total_ms: 5, hops_ms: {}, ...more });

test("rates are those of the last seconds", () => {
  const history = new History();
  history.push(state(0, 0));
  assert.equal(history.rates, null);
  history.push(state(0, 0)); // the same counts again
  assert.equal(history.rates, null);
  history.push(state(1, 50));
  assert.equal(history.rates.output_tokens, 50);
  history.push(state(2, 100));
  history.push(state(4, 500));
  assert.equal(history.rates.output_tokens, 200);
  assert.deepEqual(
    history.output.map(({ perS }) => perS),
    [50, 50, 200],
  );
  history.push(state(80, 500));
  assert.equal(history.output.length, 0, "after a minute nothing is left of them");
});

test("a server that has started again begins anew", () => {
  const history = new History();
  history.push(state(50, 1000));
  history.push({ ...state(1, 3), unix_s: 160 });
  assert.equal(history.rates, null);
  history.push({ ...state(2, 5), unix_s: 161 });
  assert.equal(history.rates.output_tokens, 2);
});

test("replicas of a stage are one box", () => {
  const history = new History();
  const stages = (cpu, idle) => [
    stage("ingest.0", { cpu_s: cpu, idle_s: null }),
    stage("ingest.1", { state: "late", idle_s: null }),
    stage("execute.0", { idle_s: idle }),
  ];
  history.push(state(0, 0, { stages: stages(0, 0) }));
  const now = state(2, 0, { stages: stages(1, 0.5) });
  assert.deepEqual([summary("ingest", now, history).cpu, summary("ingest", now, history).busy], [null, null]);
  history.push(now);
  assert.deepEqual(summary("ingest", now, history), {
    name: "ingest",
    states: ["ready", "late"],
    numQueued: 2,
    numActive: 4,
    rssBytes: 20,
    cpu: 0.5,
    busy: null,
  });
  assert.equal(summary("execute", now, history).busy, 0.75);
});

test("every hop has a place on the way, in order", () => {
  const places = HOPS.map(({ name }) => placeOf(name));
  assert.deepEqual(
    places,
    [...places].sort((a, b) => a - b),
  );
  assert.deepEqual(
    ["tokenize", "queue", "decode", "deliver", null].map((hop) => ROUTE[placeOf(hop)]),
    ["ingest", "schedule", "execute", "gateway", "client"],
  );
});

test("requests move along the way, and those that were there at first do not", () => {
  const tracker = new Tracker();
  const keyed = (moves) => moves.map(({ key, from, to }) => [key, from, to]);
  assert.deepEqual(tracker.update(state(0, 0, { requests: [request("a", "decode"), request("b", null)] })).moves, []);
  const next = tracker.update(
    state(1, 0, {
      requests: [request("c", "tokenize"), request("a", "decode"), request("b", null), request("d", null)],
    }),
  );
  assert.deepEqual(keyed(next.moves), [
    ["0-c-0", 0, 2],
    ["0-d-0", 0, 8],
  ]);
  assert.deepEqual(
    next.rows.map(({ id }) => id),
    ["c", "a", "b", "d"],
  );
  const last = tracker.update(state(2, 0, { requests: [request("a", null), request("b", null)] }));
  assert.deepEqual(
    keyed(last.moves),
    [
      ["0-a-0", 4, 8],
      ["0-c-0", 2, 8],
    ],
    "c was aborted",
  );
});

test("requests of several gateways are kept apart", () => {
  const tracker = new Tracker();
  const stages = [stage("gateway.0"), stage("gateway.1")];
  tracker.update(state(0, 0, { stages, requests: [request("a", "decode")] }));
  const { rows, moves } = tracker.update(
    state(0, 0, { stages, gateway: 1, requests: [request("a", "queue", { received: 2 })] }),
  );
  assert.deepEqual(
    rows.map(({ key }) => key),
    ["1-a-0", "0-a-0"],
  );
  assert.deepEqual(moves, []);
});

test("requests of a gateway that was taken away are not listed any more", () => {
  const tracker = new Tracker();
  const both = [stage("gateway.0"), stage("gateway.1")];
  tracker.update(state(0, 0, { stages: both, requests: [request("a", "decode")] }));
  tracker.update(state(1, 0, { stages: both, gateway: 1, requests: [request("b", "decode"), request("c", null)] }));
  const { rows, moves } = tracker.update(state(2, 0, { stages: [both[0]], requests: [request("a", "decode")] }));
  assert.deepEqual(
    rows.map(({ key }) => key),
    ["0-a-0"],
  );
  assert.deepEqual(
    moves.map(({ key, to }) => [key, to]),
    [["1-b-0", 8]],
  );
});

test("the hop that has not ended has the rest of the time", () => {
  assert.deepEqual(hopsUntilNow(request("a", "decode", { total_ms: 10, hops_ms: { gateway: 1, prefill: 2 } })), {
    gateway: 1,
    prefill: 2,
    decode: 7,
  });
  assert.deepEqual(hopsUntilNow(request("a", null, { hops_ms: { gateway: 1 } })), { gateway: 1 });
});

test("lines are straight, or have one bend", () => {
  const box = (left, top) => ({ left, top, right: left + 100, bottom: top + 50 });
  assert.deepEqual(line(box(0, 0), box(200, 0), 0, "down first"), [
    { x: 103, y: 25 },
    { x: 197, y: 25 },
  ]);
  assert.deepEqual(line(box(0, 0), box(0, 100), 7, "down first"), [
    { x: 57, y: 53 },
    { x: 57, y: 97 },
  ]);
  const down = line(box(200, 0), box(0, 100), 0, "down first");
  assert.deepEqual(down, [
    { x: 250, y: 53 },
    { x: 250, y: 125 },
    { x: 103, y: 125 },
  ]);
  assert.deepEqual(line(box(200, 100), box(0, 0), 0, "across first"), [
    { x: 197, y: 125 },
    { x: 50, y: 125 },
    { x: 50, y: 53 },
  ]);
  assert.equal(lengthOf(down), 72 + 147);
  assert.deepEqual([pointAt(down, 0), pointAt(down, 1), pointAt(down, 72 / 219)], [down[0], down[2], down[1]]);
  assert.equal(pathData(down), "M250 53L250 125L103 125");
  assert.equal(arrowData(down), "M108 130L103 125L108 120");
});

test("numbers have the digits that matter", () => {
  const plain = (text) => text.replaceAll("\u00a0", " ");
  assert.deepEqual([0, 0.42, 4.2, 42, 4200, 42_000, 420_000].map(duration).map(plain), [
    "0 ms",
    "0.42 ms",
    "4.2 ms",
    "42 ms",
    "4.20 s",
    "42.0 s",
    "7 min 0 s",
  ]);
  assert.deepEqual([5.9, 65, 3700, 1e6].map(uptime).map(plain), ["5 s", "1 min 5 s", "1 h 1 min", "11 days"]);
  assert.deepEqual([null, 0, 0.00001, 0.004, 0.05, 0.5, 0.995, 1].map(percent).map(plain), [
    "–",
    "0 %",
    "< 0.01 %",
    "0.40 %",
    "5.0 %",
    "50 %",
    "99.5 %",
    "100 %",
  ]);
  assert.deepEqual([null, 0, 3.14, 31.4, 31_400].map(number), ["–", "0", "3.1", "31", "31,400"]);
  assert.deepEqual([10, 2048, 5e7].map(size).map(plain), ["10 B", "2.0 KiB", "48 MiB"]);
  assert.deepEqual([counted(1, "token"), counted(1200, "token")], ["1 token", "1,200 tokens"]);
  assert.deepEqual(
    [hitShare(counters(0)), hitShare(counters(0, { prompt_tokens: 4, cached_tokens: 1 }))],
    [null, 0.25],
  );
});

test("one of something is not several", () => {
  assert.deepEqual([0, 1, 2].map((count) => unitOf("execute", count)), ["rows", "row", "rows"]);
  assert.deepEqual([0, 1, 2].map((count) => unitOf("detokenize", count)), ["streams", "stream", "streams"]);
  assert.equal(unitOf("schedule", 1), "running");
});
