/**
 * The hops of a request: the parts of its path through the stages, as the server names them.
 * @module
 */

import { el } from "./dom.js";
import { duration, percent } from "./format.js";

/** @typedef {"gateway" | "ingest" | "schedule" | "execute" | "detokenize"} Stage */

/** @type {{name: string, stage: Stage, words: string}[]} */
export const HOPS = [
  { name: "gateway", stage: "gateway", words: "reads and checks the request" },
  { name: "tokenize", stage: "ingest", words: "applies the chat template, tokenizes" },
  { name: "admit", stage: "ingest", words: "the way to the scheduler" },
  { name: "queue", stage: "schedule", words: "waits for its first step" },
  { name: "prefill", stage: "execute", words: "computes the prompt, up to the first token" },
  { name: "decode", stage: "execute", words: "generates the other tokens" },
  { name: "detokenize", stage: "detokenize", words: "turns the last token into text" },
  { name: "deliver", stage: "gateway", words: "sends the end of the response" },
];

/** @type {Record<string, Stage>} */
export const STAGE_OF = Object.fromEntries(HOPS.map(({ name, stage }) => [name, stage]));

/**
 * A bar with a part for each hop, as long as its share of the time.
 * @param {Record<string, number>} hopsMs
 * @returns {HTMLElement}
 */
export function hopBar(hopsMs) {
  const known = HOPS.filter(({ name }) => hopsMs[name] > 0);
  const total = known.reduce((sum, { name }) => sum + hopsMs[name], 0);
  const parts = known.map(({ name, stage }) => {
    const part = el("i", { class: `hop ${stage}` });
    part.style.flexGrow = String(hopsMs[name] / total);
    return part;
  });
  const words = known.map(({ name }) => `${name} ${duration(hopsMs[name])}`).join(", ");
  return el("span", { class: "hops", role: "img", "aria-label": words || "no timings yet" }, ...parts);
}

/**
 * A table of the hops with their durations. The bars share one time axis, so each begins where the one before ends.
 * @param {Record<string, number>} hopsMs
 * @returns {HTMLElement}
 */
export function hopTable(hopsMs) {
  const known = HOPS.filter(({ name }) => name in hopsMs);
  const total = known.reduce((sum, { name }) => sum + hopsMs[name], 0);
  let before = 0;
  const rows = known.map(({ name, stage, words }) => {
    const ms = hopsMs[name];
    const bar = el("i", { class: `hop ${stage}` });
    bar.style.marginInlineStart = `${total ? (100 * before) / total : 0}%`;
    bar.style.width = `${total ? (100 * ms) / total : 0}%`;
    before += ms;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, el("span", { class: `dot ${stage}` }), name),
      el("td", { class: "number" }, duration(ms)),
      el("td", { class: "number soft" }, percent(total ? ms / total : null)),
      el("td", { class: "track" }, bar, el("span", { class: "soft" }, words)),
    );
  });
  return el(
    "table",
    { class: "hop-table" },
    el("caption", { class: "hidden" }, "Time in each hop"),
    el("tbody", {}, ...rows),
  );
}
