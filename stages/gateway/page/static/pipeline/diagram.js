/**
 * The drawing of the stages, as in docs/architecture.md. A dot is a request: at rest it is in the box of the stage that
 * has it, and it moves along the lines from one to the next.
 * @module
 */

import { el, reducedMotion, replace, svg } from "../common/dom.js";
import { percent, size, whole } from "../common/format.js";
import { arrowData, lengthOf, line, pathData, pointAt } from "./geometry.js";
import { placeOf, ROUTE } from "./state.js";

/** @typedef {import("./state.js").Row} Row */
/** @typedef {import("./state.js").Move} Move */
/** @typedef {import("./state.js").StageSummary} StageSummary */
/** @typedef {import("./geometry.js").Point} Point */

const STAGES = /** @type {const} */ ([
  { name: "gateway", does: "holds connections", one: "open", several: "open" },
  { name: "ingest", does: "templates, tokens", one: "at work", several: "at work" },
  { name: "schedule", does: "plans steps", one: "running", several: "running" },
  { name: "execute", does: "runs the model", one: "row", several: "rows" },
  { name: "detokenize", does: "ids to text", one: "stream", several: "streams" },
]);
/** @type {{from: string, to: string, offset: number, bend: "down first" | "across first", carries: "prompts" | "steps" | "output"}[]} */
const EDGES = [
  { from: "client", to: "gateway", offset: -7, bend: "down first", carries: "prompts" },
  { from: "gateway", to: "client", offset: 7, bend: "down first", carries: "output" },
  { from: "gateway", to: "ingest", offset: 0, bend: "down first", carries: "prompts" },
  { from: "ingest", to: "schedule", offset: 0, bend: "down first", carries: "prompts" },
  { from: "schedule", to: "execute", offset: -7, bend: "down first", carries: "steps" },
  { from: "execute", to: "schedule", offset: 7, bend: "down first", carries: "steps" },
  { from: "schedule", to: "detokenize", offset: 0, bend: "down first", carries: "output" },
  { from: "detokenize", to: "gateway", offset: 0, bend: "across first", carries: "output" },
];
const MAX_DOTS = 24;
const PX_PER_S = 900;
const MIN_MOVE_S = 0.35;

/**
 * @param {string} stage
 * @param {number} count
 * @returns {string} what a stage has so many of, such as "row" for 1 and "rows" for 2
 */
export function unitOf(stage, count) {
  const found = STAGES.find(({ name }) => name === stage);
  return (count === 1 ? found?.one : found?.several) ?? "";
}

export class Diagram {
  /** @type {Map<string, HTMLElement>} */
  #boxes = new Map();
  /** @type {Map<string, Point[]>} */
  #lines = new Map();
  /** The lines with their arrows. @type {Map<string, SVGGElement>} */
  #drawn = new Map();
  /** @type {Map<string, {points: Point[], beginMs: number, tookMs: number, circle: SVGCircleElement}>} */
  #moving = new Map();
  #drawing = svg("svg", { class: "lines", "aria-hidden": "true" });
  #isAnimating = false;
  /** @type {Row[]} */
  #rows = [];

  /** @param {(key: string) => void} onSelect called with the key of a request whose dot is clicked */
  constructor(onSelect) {
    this.onSelect = onSelect;
    const client = el("div", { class: "box client" }, el("p", { class: "name" }, "clients"));
    this.#boxes.set("client", client);
    const boxes = STAGES.map((stage) => this.#box(stage));
    const supervisor = el("p", { class: "supervisor soft" }, "The supervisor watches all of them.");
    const props = { class: "diagram", role: "group", "aria-label": "The stages" };
    this.element = el("div", props, client, ...boxes, supervisor, this.#drawing);
    for (const { from, to } of EDGES) {
      const drawn = svg("g", {}, svg("path", { class: "line" }), svg("path"));
      this.#drawn.set(`${from}-${to}`, drawn);
      this.#drawing.append(drawn);
    }
    new ResizeObserver(() => this.#layOut()).observe(this.element);
  }

  /** @param {(typeof STAGES)[number]} stage */
  #box({ name, does, several }) {
    const box = el(
      "div",
      { class: `box ${name}` },
      el(
        "p",
        { class: "name" },
        el("span", { class: `dot ${name}` }),
        el("span", { class: "title" }, name),
        el("span", { class: "state" }),
      ),
      el("p", { class: "does soft" }, does),
      el("p", { class: "figure" }, el("b", {}, "–"), " ", el("span", { class: "soft unit" }, several)),
      el("p", { class: "load soft number" }),
      el("p", { class: "dots", "aria-hidden": "true" }),
      el("span", { class: "meter" }, el("i")),
    );
    this.#boxes.set(name, box);
    return box;
  }

  /**
   * @param {StageSummary[]} stages
   * @param {import("./state.js").Counters | null} rates
   */
  update(stages, rates) {
    for (const stage of stages) this.#updateBox(stage);
    const flows = { prompts: rates?.prompt_tokens, steps: rates?.steps, output: rates?.output_tokens };
    for (const { from, to, carries } of EDGES) {
      this.#drawn.get(`${from}-${to}`)?.classList.toggle("flows", (flows[carries] ?? 0) > 0);
    }
  }

  /** @param {StageSummary} stage */
  #updateBox({ name, states, numQueued, numActive, rssBytes, cpu, busy }) {
    const box = /** @type {HTMLElement} */ (this.#boxes.get(name));
    const part = (/** @type {string} */ selector) => /** @type {HTMLElement} */ (box.querySelector(selector));
    const wrong = states.filter((state) => state !== "ready");
    part(".title").textContent = states.length > 1 ? `${name} ×${states.length}` : name;
    part(".state").textContent = wrong[0] ?? "";
    box.classList.toggle("wrong", wrong.length > 0);
    part("b").textContent = whole(numActive);
    part(".unit").textContent = unitOf(name, numActive);
    const waits = name === "schedule" || name === "ingest" ? `${whole(numQueued)}\u00a0waiting` : "";
    const work = cpu === null ? "" : `CPU\u00a0${percent(cpu)}`;
    const busyWords = busy === null ? "" : `busy\u00a0${percent(busy)}`;
    part(".load").textContent = [waits, busyWords || work, rssBytes ? size(rssBytes) : ""].filter(Boolean).join(" · ");
    part(".meter i").style.width = `${100 * Math.min(1, busy ?? cpu ?? 0)}%`;
  }

  /** Shows that nothing is known: the server does not answer. */
  clear() {
    for (const box of this.#boxes.values()) {
      for (const node of box.querySelectorAll(".state, .load")) node.textContent = "";
      for (const node of box.querySelectorAll("b")) node.textContent = "–";
      for (const node of box.querySelectorAll("i")) /** @type {HTMLElement} */ (node).style.width = "0";
      box.classList.remove("wrong");
    }
    for (const drawn of this.#drawn.values()) drawn.classList.remove("flows");
    for (const { circle } of this.#moving.values()) circle.remove();
    this.#moving.clear();
    this.setRequests([], []);
  }

  /**
   * @param {Row[]} rows
   * @param {Move[]} moves
   */
  setRequests(rows, moves) {
    this.#rows = rows;
    if (!reducedMotion() && !document.hidden) for (const move of moves) this.#begin(move);
    this.#drawDots();
  }

  /** Draws the requests that are at rest. */
  #drawDots() {
    for (const { name } of STAGES) {
      const here = this.#rows.filter(
        ({ key, hop }) => hop !== null && ROUTE[placeOf(hop)] === name && !this.#moving.has(key),
      );
      const dots = here.slice(0, MAX_DOTS).map(({ key, id }) => {
        const dot = el("span", { class: `request ${name}`, title: `Request ${id}` });
        dot.addEventListener("click", () => this.onSelect(key));
        return dot;
      });
      const more = here.length > MAX_DOTS ? el("span", { class: "soft" }, `+${here.length - MAX_DOTS}`) : null;
      replace(/** @type {Element} */ (this.#boxes.get(name)?.querySelector(".dots")), ...dots, more);
    }
  }

  /** @param {Move} move */
  #begin({ key, from, to }) {
    const points = this.#wayOf(from, to);
    if (points.length < 2) return;
    this.#moving.get(key)?.circle.remove();
    const circle = svg("circle", { r: 5, class: "moving" });
    this.#drawing.append(circle);
    const tookMs = 1000 * Math.max(MIN_MOVE_S, lengthOf(points) / PX_PER_S);
    this.#moving.set(key, { points, beginMs: performance.now(), tookMs, circle });
    if (!this.#isAnimating) {
      this.#isAnimating = true;
      requestAnimationFrame((nowMs) => this.#step(nowMs));
    }
  }

  /** @param {number} nowMs */
  #step(nowMs) {
    let hasEnded = false;
    for (const [key, { points, beginMs, tookMs, circle }] of this.#moving) {
      const share = Math.max(0, (nowMs - beginMs) / tookMs);
      if (share >= 1) {
        circle.remove();
        this.#moving.delete(key);
        hasEnded = true;
        continue;
      }
      const { x, y } = pointAt(points, share);
      circle.setAttribute("cx", String(x));
      circle.setAttribute("cy", String(y));
    }
    if (hasEnded) this.#drawDots();
    this.#isAnimating = this.#moving.size > 0;
    if (this.#isAnimating) requestAnimationFrame((nextMs) => this.#step(nextMs));
  }

  /**
   * The corners of the way between two places of ROUTE; through a box it is straight.
   * @param {number} from
   * @param {number} to
   * @returns {Point[]}
   */
  #wayOf(from, to) {
    const points = [];
    for (let place = from; place < to; place += 1) {
      points.push(...(this.#lines.get(`${ROUTE[place]}-${ROUTE[place + 1]}`) ?? []));
    }
    return points;
  }

  #layOut() {
    const around = this.element.getBoundingClientRect();
    if (!around.width) return;
    this.#drawing.setAttribute("viewBox", `0 0 ${around.width} ${around.height}`);
    const boxOf = (/** @type {string} */ name) => {
      const box = /** @type {HTMLElement} */ (this.#boxes.get(name)).getBoundingClientRect();
      const { left, top } = around;
      return { left: box.left - left, right: box.right - left, top: box.top - top, bottom: box.bottom - top };
    };
    for (const { from, to, offset, bend } of EDGES) {
      const points = line(boxOf(from), boxOf(to), offset, bend);
      this.#lines.set(`${from}-${to}`, points);
      const [path, arrow] = this.#drawn.get(`${from}-${to}`)?.children ?? [];
      path.setAttribute("d", pathData(points));
      arrow.setAttribute("d", arrowData(points));
    }
  }
}
