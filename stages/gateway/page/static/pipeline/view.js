/**
 * The view of the stages. It asks the server only while it is seen.
 * @module
 */

import { ApiError, getJson } from "../common/api.js";
import { el, replace } from "../common/dom.js";
import { uptime, whole } from "../common/format.js";
import { Diagram } from "./diagram.js";
import { Figures } from "./figures.js";
import { ModelTable } from "./models.js";
import { RequestList } from "./requests.js";
import { History, summary, Tracker } from "./state.js";

const INTERVAL_MS = 400;
const AFTER_ERROR_MS = 3000;
const NAMES = ["gateway", "ingest", "schedule", "execute", "detokenize"];

export class LiveView {
  #history = new History();
  #tracker = new Tracker();
  #figures = new Figures();
  #requests = new RequestList();
  #models = new ModelTable();
  #diagram = new Diagram((key) => this.#requests.open(key));
  #line = el("p", { class: "server soft" });
  #failure = el("p", { class: "failure", role: "alert", hidden: true });
  #isShown = false;
  #isAsking = false;
  #timer = 0;
  /** Of several models, the one to show; empty for the only one. */
  model = "";

  /**
   * @param {HTMLElement} root
   * @param {(isAnswering: boolean) => void} [onAnswer] called with each answer, and each time that there is none
   */
  constructor(root, onAnswer = () => {}) {
    this.onAnswer = onAnswer;
    root.append(
      el(
        "div",
        { class: "page-column" },
        el("h1", { class: "hidden" }, "Stages"),
        this.#failure,
        this.#line,
        this.#models.element,
        this.#diagram.element,
        el("div", { class: "below" }, this.#figures.element, this.#requests.element),
      ),
    );
    document.addEventListener("visibilitychange", () => this.#ask());
  }

  /** @param {boolean} isShown */
  show(isShown) {
    this.#isShown = isShown;
    this.#ask();
  }

  /**
   * @param {readonly import("../model_choice.js").Model[]} models all of the server
   * @param {string} chosen the name of the one to show
   */
  setModels(models, chosen) {
    this.model = models.length > 1 ? chosen : "";
    this.#models.update(models, chosen, Date.now() / 1000);
  }

  get #path() {
    return this.model ? `pipeline?model=${encodeURIComponent(this.model)}` : "pipeline";
  }

  async #ask() {
    clearTimeout(this.#timer);
    if (!this.#isShown || document.hidden || this.#isAsking) return;
    this.#isAsking = true;
    let waitMs = INTERVAL_MS;
    try {
      this.#update(await getJson(this.#path, { signal: AbortSignal.timeout(10_000) }));
      this.#failure.hidden = true;
      this.onAnswer(true);
    } catch (error) {
      waitMs = AFTER_ERROR_MS;
      this.#failure.hidden = false;
      this.#failure.textContent = error instanceof ApiError ? error.message : "The server does not answer in time.";
      this.#clear();
      this.onAnswer(error instanceof ApiError && error.status > 0);
    }
    this.#isAsking = false;
    this.#timer = setTimeout(() => this.#ask(), waitMs);
  }

  /** Shows nothing that was true of a server which does not answer any more. */
  #clear() {
    this.#history = new History();
    this.#tracker = new Tracker();
    this.#diagram.clear();
    this.#figures.clear();
    this.#requests.update([]);
    replace(this.#line, el("span", { class: "dot bad" }), "no answer");
  }

  /** @param {import("./state.js").LiveState} state */
  #update(state) {
    this.#history.push(state);
    this.#diagram.update(
      NAMES.map((name) => summary(name, state, this.#history)),
      this.#history.rates,
    );
    this.#figures.update(state, this.#history);
    const { rows, moves } = this.#tracker.update(state);
    this.#requests.update(rows);
    this.#diagram.setRequests(rows, moves);
    const words = [
      `Pipeline ${state.version}`,
      state.state,
      `up ${uptime(state.uptime_s)}`,
      `context ${whole(state.max_model_len)} tokens`,
      `${state.block_size} tokens in a block`,
    ];
    replace(this.#line, el("span", { class: `dot ${state.state === "serving" ? "good" : "bad"}` }), words.join(" · "));
  }
}
