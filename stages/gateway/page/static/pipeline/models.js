/**
 * The models of a server of several: what is loaded, what sleeps and what waits, since when.
 * @module
 */

import { el, replace } from "../common/dom.js";
import { size, uptime } from "../common/format.js";
import { stateWords, waitingWords } from "../model_choice.js";

/** @typedef {import("../model_choice.js").Model} Model */

export class ModelTable {
  #rows = el("tbody");

  constructor() {
    const heads = ["Model", "State", "Since", "Memory", "Waits"].map((words) => el("th", { scope: "col" }, words));
    this.element = el(
      "section",
      { class: "model-table", "aria-label": "Models", hidden: true },
      el("h2", {}, "Models"),
      el("table", {}, el("thead", {}, el("tr", {}, heads)), this.#rows),
    );
  }

  /**
   * @param {readonly Model[]} models all of the server; nothing is shown of a single one
   * @param {string} chosen the name of the one that the page is about
   * @param {number} nowS in Unix time
   */
  update(models, chosen, nowS) {
    this.element.hidden = models.length < 2;
    replace(this.#rows, ...models.map((one) => rowOf(one, one.id === chosen, nowS)));
  }
}

/**
 * @param {Model} model
 * @param {boolean} isChosen
 * @param {number} nowS
 */
function rowOf(model, isChosen, nowS) {
  const { since = 0, memory_bytes: bytes = 0, value = "loaded" } = model.status ?? {};
  const isAwake = value === "loaded" || value === "loading" || value === "unloading";
  const dot = value === "loaded" ? "good" : value === "failed" ? "bad" : "";
  return el(
    "tr",
    { "aria-current": isChosen && "true" },
    el("th", { scope: "row" }, model.id),
    el("td", {}, el("span", { class: `dot ${dot}` }), stateWords(model)),
    el("td", { class: "number" }, since ? uptime(Math.max(0, nowS - since)) : "–"),
    el("td", { class: "number" }, bytes && isAwake ? size(bytes) : "–"),
    el("td", {}, waitingWords(model, nowS)),
  );
}
