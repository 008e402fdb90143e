/**
 * A reply token by token. A token's colour shows how likely it was; the pointer, a tap or the arrow keys show what else
 * was likely at its place.
 * @module
 */

import { el, replace } from "../common/dom.js";
import { percent } from "../common/format.js";

/** @typedef {import("./conversation.js").Token} Token */

const NAMED = /** @type {Record<string, string>} */ ({ "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅" });

/** Probabilities below which a token is marked, the more the lower. */
const LIMITS = [0.9, 0.6, 0.3, 0.1];

export class TokenView {
  #shown = 0;
  #current = -1;
  /** @type {Token[]} */
  #tokens = [];

  constructor() {
    this.tokens = el("div", {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens of the reply: the arrow keys go from one to the next",
    });
    this.panel = el("div", { class: "candidates", role: "status", hidden: true });
    const limits = LIMITS.map((limit, place) => el("span", { class: `token s${place + 1}` }, `below ${limit * 100} %`));
    const legend = el("p", { class: "token-legend soft" }, "Probability: ", ...limits);
    this.element = el("div", { class: "token-view" }, this.tokens, legend, this.panel);
    this.tokens.addEventListener("pointerover", (event) => this.#showAt(event.target));
    this.tokens.addEventListener("click", (event) => this.#showAt(event.target));
    this.tokens.addEventListener("pointerleave", () => this.#leave());
    this.tokens.addEventListener("blur", () => this.hide());
    this.tokens.addEventListener("focus", () => {
      if (this.#current < 0 && this.tokens.matches(":focus-visible")) this.show(0);
    });
    this.tokens.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {Token[]} tokens all that there are now */
  update(tokens) {
    this.#tokens = tokens;
    if (tokens.length < this.#shown) {
      this.tokens.replaceChildren();
      this.#shown = 0;
    }
    for (; this.#shown < tokens.length; this.#shown += 1) {
      this.tokens.append(tokenNode(tokens[this.#shown], this.#shown));
      if (tokens[this.#shown].token.includes("\n")) this.tokens.append(el("br"));
    }
  }

  /** @param {number} place */
  show(place) {
    const token = this.#tokens[place];
    if (!token) return;
    this.#mark(place);
    replace(this.panel, ...candidateNodes(token, place));
    this.panel.hidden = false;
    this.#moveTo(place);
  }

  hide() {
    this.#mark(-1);
    this.panel.hidden = true;
  }

  #leave() {
    if (document.activeElement !== this.tokens) this.hide();
  }

  /** @param {EventTarget | null} target */
  #showAt(target) {
    const place = target instanceof HTMLElement ? target.dataset.place : undefined;
    if (place !== undefined) this.show(Number(place));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.#tokens.length - 1;
    const places = /** @type {Record<string, number>} */ ({
      ArrowRight: Math.min(this.#current + 1, last),
      ArrowLeft: Math.max(this.#current - 1, 0),
      Home: 0,
      End: last,
    });
    if (event.key in places) this.show(places[event.key]);
    else if (event.key === "Escape") this.hide();
    else return;
    event.preventDefault();
  }

  /** @param {number} place of the token that is shown; -1 for none */
  #mark(place) {
    this.#node(this.#current)?.classList.remove("current");
    this.#current = place;
    this.#node(place)?.classList.add("current");
  }

  /**
   * @param {number} place
   * @returns {HTMLElement | null}
   */
  #node(place) {
    return this.tokens.querySelector(`[data-place="${place}"]`);
  }

  /**
   * Puts the panel below a token, or above it near the window's end.
   * @param {number} place
   */
  #moveTo(place) {
    const node = this.#node(place);
    if (!node) return;
    const around = this.element.getBoundingClientRect();
    const box = node.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.panel;
    const composer = document.querySelector(".composer")?.getBoundingClientRect().top ?? innerHeight;
    const isAbove = box.bottom + height + 8 > composer && box.top - height - 8 > 0;
    this.panel.style.insetInlineStart = `${Math.max(0, Math.min(box.left - around.left, around.width - width))}px`;
    this.panel.style.top = `${(isAbove ? box.top - height - 6 : box.bottom + 6) - around.top}px`;
  }
}

/**
 * @param {string} token
 * @returns {string} with visible white space
 */
export function visible(token) {
  return NAMED[token] ?? token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "·");
}

/**
 * How unlikely a token was, from 0 to 4.
 * @param {number} logprob
 */
export function surprise(logprob) {
  return LIMITS.filter((limit) => Math.exp(logprob) < limit).length;
}

/**
 * @param {Token} token
 * @param {number} place
 */
function tokenNode(token, place) {
  const text = token.token.replaceAll("\n", "⏎") || "∅";
  return el("span", { class: `token s${surprise(token.logprob)}`, "data-place": place }, text);
}

/**
 * @param {Token} token
 * @param {number} place
 * @returns {Node[]}
 */
function candidateNodes({ token, logprob, top }, place) {
  const isListed = top.some((one) => one.token === token);
  const rows = (isListed ? top : [...top, { token, logprob }]).map((one) => {
    const share = Math.exp(one.logprob);
    const bar = el("i");
    bar.style.width = `${Math.max(1, 100 * share)}%`;
    return el(
      "li",
      { class: one.token === token ? "chosen" : undefined },
      el("code", {}, visible(one.token)),
      el("span", { class: "share" }, bar),
      el("span", { class: "number" }, percent(share)),
    );
  });
  const words = `Token ${place + 1}, logprob ${logprob.toFixed(2)}`;
  return [el("p", { class: "soft" }, words), el("ol", {}, ...rows)];
}
