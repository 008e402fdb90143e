/**
 * The figures below the drawing: tokens per second, KV blocks, prefix cache.
 * @module
 */

import { el, svg } from "../common/dom.js";
import { counted, number, percent, whole } from "../common/format.js";
import { hitShare } from "./state.js";

const WIDTH = 300;
const HEIGHT = 56;
const WINDOW_S = 60;

export class Figures {
  #chart = svg("path", { class: "area" });
  #outline = svg("path", { class: "outline" });
  #parts = ["held", "cached", "free"].map((name) => el("i", { class: name }));
  /** @type {Map<string, HTMLElement>} */
  #values = new Map();

  constructor() {
    const chart = svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        class: "chart",
        role: "img",
        "aria-label": "Output tokens per second in the last minute",
      },
      this.#chart,
      this.#outline,
    );
    this.element = el(
      "div",
      { class: "figures" },
      el("section", { class: "tokens-out" }, el("h2", {}, "Tokens out"), this.#value("out", "large"), chart),
      el(
        "section",
        { class: "kv" },
        el("h2", {}, "KV blocks"),
        this.#value("kv", "large"),
        el("p", { class: "blocks", role: "img", "aria-label": "KV blocks: held, cached and free" }, ...this.#parts),
        el("p", { class: "legend" }, ...["held", "cached", "free"].map((name) => this.#legend(name))),
      ),
      el(
        "section",
        { class: "hits" },
        el("h2", {}, "Prefix cache"),
        this.#value("hits", "large"),
        this.#value("hits-words", "soft"),
      ),
      el(
        "dl",
        {},
        ...[
          ["in", "Prompt tokens"],
          ["steps", "Steps"],
          ["per-step", "Tokens per step"],
          ["running", "Running"],
          ["waiting", "Waiting"],
          ["swapped", "Swapped out"],
          ["preempted", "Preemptions"],
          ["finished", "Finished"],
        ].map(([name, label]) => el("div", {}, el("dt", {}, label), this.#value(name, "number", "dd"))),
      ),
    );
  }

  /**
   * @param {string} name
   * @param {string} kind a class
   * @param {"p" | "dd" | "span"} [tag]
   */
  #value(name, kind, tag = "p") {
    const value = el(tag, { class: kind }, "–");
    this.#values.set(name, value);
    return value;
  }

  /** @param {string} name */
  #legend(name) {
    return el("span", {}, el("i", { class: name }), " ", this.#value(`kv-${name}`, "number", "span"), ` ${name}`);
  }

  /** Shows that nothing is known: the server does not answer. */
  clear() {
    for (const node of this.#values.values()) node.textContent = "–";
    for (const part of this.#parts) part.style.flexGrow = "0";
    this.#drawChart([], 0);
  }

  /**
   * @param {import("./state.js").LiveState} state
   * @param {import("./state.js").History} history
   */
  update(state, history) {
    const { kv_blocks: blocks, counters } = state;
    const { rates } = history;
    const perStep = rates && rates.steps > 0 ? rates.output_tokens / rates.steps : null;
    /** @type {Record<string, string>} */
    const words = {
      out: rates ? `${number(rates.output_tokens)} / s` : "–",
      in: rates ? `${number(rates.prompt_tokens)} / s` : "–",
      steps: rates ? `${number(rates.steps)} / s` : "–",
      "per-step": number(perStep),
      kv: `${whole(blocks.held)} of ${whole(blocks.total)}`,
      "kv-held": whole(blocks.held),
      "kv-cached": whole(blocks.cached),
      "kv-free": whole(blocks.free),
      hits: percent(hitShare(counters)),
      "hits-words": `${whole(counters.cached_tokens)} of ${counted(counters.prompt_tokens, "prompt token")} since the start`,
      running: whole(state.num_running),
      waiting: whole(state.num_waiting),
      swapped: whole(state.num_swapped),
      preempted: whole(counters.preemptions),
      finished: whole(counters.finished),
    };
    for (const [name, text] of Object.entries(words)) {
      const node = this.#values.get(name);
      if (node && node.textContent !== text) node.textContent = text;
    }
    for (const [place, name] of /** @type {const} */ (["held", "cached", "free"]).entries()) {
      this.#parts[place].style.flexGrow = String(blocks.total ? blocks[name] / blocks.total : 0);
    }
    this.#drawChart(history.output, state.unix_s);
  }

  /**
   * @param {{atS: number, perS: number}[]} output
   * @param {number} nowS
   */
  #drawChart(output, nowS) {
    const most = Math.max(10, ...output.map(({ perS }) => perS));
    const points = output.map(({ atS, perS }) => {
      const x = WIDTH * (1 - (nowS - atS) / WINDOW_S);
      return `${x.toFixed(1)} ${(HEIGHT - 2 - (HEIGHT - 6) * (perS / most)).toFixed(1)}`;
    });
    const top = points.join("L");
    const begin = points[0]?.split(" ")[0] ?? "0";
    this.#outline.setAttribute("d", points.length > 1 ? `M${top}` : "M0 0");
    this.#chart.setAttribute("d", points.length > 1 ? `M${begin} ${HEIGHT}L${top}L${WIDTH} ${HEIGHT}Z` : "M0 0");
  }
}
