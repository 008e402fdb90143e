/**
 * The list of requests; one that is clicked shows its hops.
 * @module
 */

import { el, replace } from "../common/dom.js";
import { counted, duration, whole } from "../common/format.js";
import { hopBar, hopTable, STAGE_OF } from "../common/hops.js";

/** @typedef {import("./state.js").Row} Row */

const WORDS = /** @type {Record<string, string>} */ ({
  tokenize: "tokenizing",
  queue: "queue or prefill",
  decode: "decoding",
  deliver: "delivering",
});

export class RequestList {
  /** @type {Map<string, {item: HTMLElement, seen: string}>} */
  #items = new Map();
  #list = el("ol", { class: "requests" });
  #empty = el("p", { class: "soft" }, "None yet. Send a message in the chat, or a request from a program.");
  #opened = "";

  constructor() {
    this.element = el(
      "section",
      { class: "request-list", "aria-label": "Requests" },
      el("h2", {}, "Requests"),
      this.#empty,
      this.#list,
    );
  }

  /** @param {Row[]} rows */
  update(rows) {
    this.#empty.hidden = rows.length > 0;
    const keys = new Set(rows.map(({ key }) => key));
    for (const [key, { item }] of this.#items) {
      if (keys.has(key)) continue;
      item.remove();
      this.#items.delete(key);
    }
    rows.forEach((row, place) => {
      const item = this.#itemOf(row);
      const there = this.#list.children[place];
      if (there !== item) this.#list.insertBefore(item, there ?? null);
    });
  }

  /** @param {string} key of the request whose hops are to be seen */
  open(key) {
    const found = this.#items.get(key);
    const button = found?.item.querySelector("button");
    if (button?.getAttribute("aria-expanded") === "false") button.click();
    found?.item.scrollIntoView({ block: "nearest" });
    button?.focus();
  }

  /** @param {Row} row */
  #itemOf(row) {
    const { key } = row;
    const seen = JSON.stringify(row);
    const known = this.#items.get(key);
    if (known?.seen === seen) return known.item;
    const item =
      known?.item ??
      el("li", { id: `request-${key}` }, el("button", { type: "button" }), el("div", { class: "detail" }));
    const button = /** @type {HTMLButtonElement} */ (item.firstElementChild);
    const detail = /** @type {HTMLElement} */ (item.lastElementChild);
    if (!known) {
      detail.id = `detail-${key}`;
      button.setAttribute("aria-controls", detail.id);
      button.addEventListener("click", () => this.#toggle(key));
    }
    this.#items.set(key, { item, seen });
    item.classList.toggle("open", row.hop !== null);
    replace(button, ...summaryOf(row));
    replace(detail, ...detailOf(row));
    this.#show(key, this.#opened === key);
    return item;
  }

  /** @param {string} key */
  #toggle(key) {
    const previous = this.#opened;
    this.#opened = previous === key ? "" : key;
    if (previous) this.#show(previous, false);
    this.#show(key, this.#opened === key);
  }

  /**
   * @param {string} key
   * @param {boolean} isShown
   */
  #show(key, isShown) {
    const item = this.#items.get(key)?.item;
    item?.firstElementChild?.setAttribute("aria-expanded", String(isShown));
    item?.lastElementChild?.toggleAttribute("hidden", !isShown);
  }
}

/**
 * The hops with the one that has not ended, up to now.
 * @param {Row} row
 * @returns {Record<string, number>}
 */
export function hopsUntilNow({ hop, hops_ms: hopsMs, total_ms: totalMs }) {
  if (hop === null) return hopsMs;
  const ended = Object.values(hopsMs).reduce((sum, ms) => sum + ms, 0);
  return { ...hopsMs, [hop]: (hopsMs[hop] ?? 0) + Math.max(0, totalMs - ended) };
}

/** @param {Row} row */
function summaryOf(row) {
  const { id, index, hop, prompt_tokens: prompt, output_tokens: output, total_ms: totalMs } = row;
  const where = hop === null ? "done" : (WORDS[hop] ?? hop);
  return [
    el("code", {}, index ? `${id.slice(0, 8)}/${index}` : id.slice(0, 8)),
    el("span", { class: "where" }, el("span", { class: `dot ${hop === null ? "done" : STAGE_OF[hop]}` }), where),
    el("span", { class: "number" }, `${whole(prompt)} → ${whole(output)}`, el("span", { class: "soft" }, " tokens")),
    el("span", { class: "number" }, duration(totalMs)),
    hopBar(hopsUntilNow(row)),
  ];
}

/** @param {Row} row */
function detailOf(row) {
  const { id, gateway, hop, prompt_tokens: prompt, cached_tokens: cached, received } = row;
  const at = new Date(received * 1000).toLocaleTimeString("en-GB");
  const remark = hop === null ? "" : " It has not ended: its last hop is still growing.";
  return [
    hopTable(hopsUntilNow(row)),
    el(
      "p",
      { class: "soft" },
      `Request ${id} at gateway ${gateway}, received at ${at}: ${counted(prompt, "prompt token")}, ${whole(cached)} from the prefix cache.${remark}`,
    ),
  ];
}
