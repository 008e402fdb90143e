/**
 * What the view of the stages computes from the answers of /pipeline: rates, stages by name, and where each request is.
 * Pure.
 * @module
 */

/**
 * @typedef {{name: string, state: string, num_queued: number, num_active: number, num_received: number, cpu_s: number,
 *   rss_bytes: number, idle_s: number | null}} StageState
 * @typedef {{id: string, index: number, hop: string | null, received: number, total_ms: number, prompt_tokens: number,
 *   cached_tokens: number, output_tokens: number, hops_ms: Record<string, number>}} RequestState
 * @typedef {{prompt_tokens: number, cached_tokens: number, output_tokens: number, steps: number, preemptions: number,
 *   finished: number}} Counters
 * @typedef {{model: string, version: string, state: string, unix_s: number, uptime_s: number, gateway: number,
 *   num_running: number, num_waiting: number, num_swapped: number, max_model_len: number, block_size: number,
 *   kv_blocks: {free: number, cached: number, held: number, total: number}, counters: Counters,
 *   stages: StageState[], requests: RequestState[]}} LiveState
 */

/** The way of a request. */
export const ROUTE = /** @type {const} */ ([
  "client",
  "gateway",
  "ingest",
  "schedule",
  "execute",
  "schedule",
  "detokenize",
  "gateway",
  "client",
]);
const PLACES = /** @type {Record<string, number>} */ ({
  gateway: 1,
  tokenize: 2,
  admit: 2,
  queue: 3,
  prefill: 4,
  decode: 4,
  detokenize: 6,
  deliver: 7,
});
const END = ROUTE.length - 1;

const WINDOW_S = 60;
const RATE_S = 1.5;
const MAX_ROWS = 64;

/** The answers of the last minute. */
export class History {
  /** @type {LiveState[]} */
  #samples = [];

  /** @param {LiveState} state */
  push(state) {
    const last = this.#samples.at(-1);
    if (last && (state.uptime_s < last.uptime_s || state.unix_s < last.unix_s)) this.#samples = []; // another server
    if (last?.unix_s === state.unix_s) return;
    this.#samples.push(state);
    const keeps = (/** @type {LiveState} */ one) => one.unix_s >= state.unix_s - WINDOW_S;
    this.#samples = this.#samples.filter(keeps);
  }

  /** Per second, over the last one or two seconds; null before the second answer. @returns {Counters | null} */
  get rates() {
    const now = this.#samples.at(-1);
    const then = this.#samples.findLast((one) => now && one.unix_s <= now.unix_s - RATE_S) ?? this.#samples[0];
    if (!now || !then || now === then) return null;
    const seconds = now.unix_s - then.unix_s;
    const names = /** @type {(keyof Counters)[]} */ (Object.keys(now.counters));
    const rates = names.map((name) => [name, Math.max(0, (now.counters[name] - then.counters[name]) / seconds)]);
    return Object.fromEntries(rates);
  }

  /** Output tokens per second between the answers. @returns {{atS: number, perS: number}[]} */
  get output() {
    return this.#samples.slice(1).map((now, place) => {
      const then = this.#samples[place];
      const gained = now.counters.output_tokens - then.counters.output_tokens;
      return { atS: now.unix_s, perS: Math.max(0, gained / (now.unix_s - then.unix_s)) };
    });
  }

  /**
   * The share of a stage's time since the previous answer: of one core, and busy (null where that is not known).
   * @param {string} name
   * @returns {{cpu: number, busy: number | null} | null}
   */
  use(name) {
    const [then, now] = this.#samples.slice(-2);
    if (!now) return null;
    const stage = now.stages.find((one) => one.name === name);
    const previous = then.stages.find((one) => one.name === name);
    const seconds = now.unix_s - then.unix_s;
    if (!stage || !previous) return null;
    const isKnown = stage.idle_s !== null && previous.idle_s !== null;
    const idle = isKnown ? (Number(stage.idle_s) - Number(previous.idle_s)) / seconds : 0;
    const cpu = Math.max(0, (stage.cpu_s - previous.cpu_s) / seconds);
    return { cpu, busy: isKnown ? Math.min(1, Math.max(0, 1 - idle)) : null };
  }
}

/**
 * @param {Counters} counters
 * @returns {number | null} the share of prompt tokens that the prefix cache had
 */
export function hitShare({ prompt_tokens, cached_tokens }) {
  return prompt_tokens ? cached_tokens / prompt_tokens : null;
}

/**
 * @typedef {RequestState & {key: string, gateway: number}} Row
 * @typedef {{key: string, from: number, to: number}} Move places on ROUTE
 */

/** The requests of all answers: the newest of each gateway that the server has now. */
export class Tracker {
  /** @type {Map<number, Row[]>} */
  #byGateway = new Map();
  /** @type {Map<string, number>} */
  #places = new Map();

  /**
   * @param {LiveState} state
   * @returns {{rows: Row[], moves: Move[]}} rows with the newest first, and which of them have moved
   */
  update({ gateway, requests, stages }) {
    const isFirst = !this.#byGateway.has(gateway);
    const names = new Set(stages.map(({ name }) => name));
    for (const one of this.#byGateway.keys()) if (!names.has(`gateway.${one}`)) this.#byGateway.delete(one);
    const own = requests.map((one) => ({ ...one, gateway, key: `${gateway}-${one.id}-${one.index}` }));
    this.#byGateway.set(gateway, own);
    /** @type {Move[]} */
    const moves = [];
    for (const { key, hop } of own) {
      const to = placeOf(hop);
      const from = this.#places.get(key) ?? (isFirst ? to : 0);
      if (to > from) moves.push({ key, from, to });
      this.#places.set(key, to);
    }
    const rows = [...this.#byGateway.values()].flat().sort(byAge);
    const known = new Set(rows.map(({ key }) => key));
    for (const [key, place] of this.#places) {
      if (known.has(key)) continue;
      if (place < END) moves.push({ key, from: place, to: END }); // aborted or failed: it has no timings
      this.#places.delete(key);
    }
    return { rows: rows.slice(0, MAX_ROWS), moves };
  }
}

/**
 * @param {string | null} hop
 * @returns {number} the place on ROUTE
 */
export function placeOf(hop) {
  return hop === null ? END : (PLACES[hop] ?? 1);
}

/**
 * Open requests come first.
 * @param {Row} a
 * @param {Row} b
 */
function byAge(a, b) {
  return Number(a.hop === null) - Number(b.hop === null) || b.received - a.received || a.index - b.index;
}

/**
 * @typedef {{name: string, states: string[], numQueued: number, numActive: number, rssBytes: number, cpu: number | null,
 *   busy: number | null}} StageSummary
 */

/**
 * The replicas of a stage as one.
 * @param {string} name without a number
 * @param {LiveState} state
 * @param {History} history
 * @returns {StageSummary}
 */
export function summary(name, state, history) {
  const stages = state.stages.filter((one) => one.name.split(".")[0] === name);
  const uses = stages.map((one) => history.use(one.name)).filter((use) => use !== null);
  const busy = uses.map((use) => use.busy).filter((share) => share !== null);
  const sum = (/** @type {number[]} */ values) => values.reduce((total, value) => total + value, 0);
  return {
    name,
    states: stages.map((one) => one.state),
    numQueued: sum(stages.map((one) => one.num_queued)),
    numActive: sum(stages.map((one) => one.num_active)),
    rssBytes: sum(stages.map((one) => one.rss_bytes)),
    cpu: uses.length ? sum(uses.map((use) => use.cpu)) : null,
    busy: busy.length ? sum(busy) / busy.length : null,
  };
}
