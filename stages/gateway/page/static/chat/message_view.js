/**
 * One message of the conversation.
 * @module
 */

import { endReasoning } from "../common/api.js";
import { copyButton } from "../common/copy.js";
import { el, replace } from "../common/dom.js";
import { counted, duration, number, whole } from "../common/format.js";
import { hopBar, hopTable } from "../common/hops.js";
import { previewOf } from "./attachments.js";
import { tokensPerSecond } from "./conversation.js";
import { MarkdownView } from "./markdown_view.js";
import { TokenView } from "./token_view.js";

/** @typedef {import("./conversation.js").Message} Message */
/**
 * @typedef {{edit: (text: string) => void, regenerate: () => void, showSetting: (name: string) => void}} Actions
 */

const FINISHES = /** @type {Record<string, string>} */ ({
  length: "cut off by the token limit",
  abort: "stopped",
  content_filter: "filtered",
});

export class MessageView {
  #markdown = new MarkdownView();
  #tokens = new TokenView();
  #body = el("div", { class: "body" });
  #foot = el("div", { class: "foot" });
  #isFrameAsked = false;

  /**
   * @param {Message} message
   * @param {Actions} actions
   * @param {{showTokens: boolean, isStreaming: boolean}} state
   */
  constructor(message, actions, state) {
    this.message = message;
    this.state = state;
    this.actions = actions;
    const label = message.role === "user" ? "You" : "Reply";
    this.element = el("article", { class: `message ${message.role}`, "aria-label": label }, this.#body, this.#foot);
    this.draw();
  }

  /** Draws the message with the next frame, however often it has changed until then. */
  drawSoon() {
    if (this.#isFrameAsked) return;
    this.#isFrameAsked = true;
    requestAnimationFrame(() => {
      this.#isFrameAsked = false;
      this.draw();
    });
  }

  draw() {
    const { role } = this.message;
    this.element.classList.toggle("streaming", this.state.isStreaming);
    this.element.setAttribute("aria-busy", String(this.state.isStreaming));
    if (role === "user") this.#drawUser();
    else this.#drawReply();
  }

  #drawUser() {
    const { text, attachments = [] } = this.message;
    replace(
      this.#body,
      ...attachments.map(
        (file) => previewOf(file) ?? el("p", { class: "file soft" }, `${file.name} (${file.kind}, not kept)`),
      ),
      el("p", { class: "typed" }, text),
    );
    const edit = el("button", { class: "quiet", type: "button", onclick: () => this.#edit() }, "Edit");
    replace(
      this.#foot,
      edit,
      copyButton(() => text, "Copy your message"),
    );
  }

  #edit() {
    const field = el("textarea", { "aria-label": "Your message", rows: 3 });
    field.value = this.message.text;
    const save = () => {
      if (field.value.trim()) this.actions.edit(field.value.trim());
    };
    const cancel = () => {
      this.draw();
      this.#foot.querySelector("button")?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    replace(this.#body, field);
    replace(
      this.#foot,
      el("button", { class: "quiet strong", type: "button", onclick: save }, "Send"),
      el("button", { class: "quiet", type: "button", onclick: cancel }, "Cancel"),
    );
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  #drawReply() {
    const { text, reasoning, tokens = [], failure } = this.message;
    const { showTokens, isStreaming } = this.state;
    const usesTokens = showTokens && tokens.length > 0;
    if (usesTokens) this.#tokens.update(tokens);
    else this.#markdown.update(text);
    const view = usesTokens ? this.#tokens.element : this.#markdown.element;
    const waits = isStreaming && !text && !reasoning;
    const nodes = [
      reasoning ? this.#reasoning(reasoning) : null,
      waits ? el("p", { class: "waiting soft" }, "Waiting for the first token") : view,
      showTokens && !isStreaming && text && !tokens.length ? this.#noTokens : null,
      failure ? this.#failure(failure) : null,
    ].filter((node) => node !== null);
    if (nodes.length !== this.#body.childNodes.length || nodes.some((node, i) => node !== this.#body.childNodes[i])) {
      replace(this.#body, ...nodes);
    }
    if (!isStreaming) this.#drawFoot();
    else if (reasoning && !text) this.#drawAnswerNow();
    else replace(this.#foot);
  }

  /** @type {HTMLButtonElement | null} */
  #answerNow = null;

  /** While a reply reasons: a button that ends it. */
  #drawAnswerNow() {
    this.#answerNow ??= el("button", { class: "quiet", type: "button", onclick: () => this.#endReasoning() }, "Answer now");
    if (this.#foot.firstChild !== this.#answerNow) replace(this.#foot, this.#answerNow);
  }

  async #endReasoning() {
    if (!this.#answerNow || !this.message.id) return;
    this.#answerNow.disabled = true;
    try {
      await endReasoning(this.message.id);
    } catch {
      this.#answerNow.disabled = false; // it can be tried again
    }
  }

  #noTokens = el("p", { class: "soft" }, "Regenerate this reply to see its tokens: it was written without them.");
  /** @type {HTMLDetailsElement | null} */
  #details = null;

  /** @param {string} text */
  #reasoning(text) {
    this.#details ??= el("details", { class: "reasoning", open: true }, el("summary", {}, "Reasoning"), el("p"));
    /** @type {HTMLElement} */ (this.#details.lastElementChild).textContent = text;
    return this.#details;
  }

  /** @param {import("./conversation.js").Failure} failure */
  #failure({ message, param, status, retryAfterS }) {
    const retry = retryAfterS ? ` Try again in ${counted(retryAfterS, "second")}.` : "";
    const isOfControl = param !== null && /^[a-z_]+$/.test(param) && param !== "messages" && param !== "model";
    return el(
      "div",
      { class: "failure", role: "alert" },
      el("p", {}, el("strong", {}, status ? `Error ${status}. ` : "No connection. "), message, retry),
      el(
        "p",
        {},
        el("button", { class: "quiet strong", type: "button", onclick: () => this.actions.regenerate() }, "Try again"),
        isOfControl &&
          el(
            "button",
            { class: "quiet", type: "button", onclick: () => this.actions.showSetting(param) },
            `Change ${param}`,
          ),
      ),
    );
  }

  #drawFoot() {
    const { text, failure, timings, finish } = this.message;
    const again = el(
      "button",
      { class: "quiet", type: "button", onclick: () => this.actions.regenerate() },
      "Regenerate",
    );
    const buttons = failure ? [] : [copyButton(() => text, "Copy the reply"), again];
    const remark = finish && finish in FINISHES ? el("span", { class: "soft" }, FINISHES[finish]) : null;
    replace(this.#foot, ...buttons, remark, timings ? timingsNode(timings) : null);
  }
}

/** @param {import("./conversation.js").Timings} timings */
function timingsNode(timings) {
  const perSecond = tokensPerSecond(timings);
  const words = [
    counted(timings.outputTokens, "token"),
    perSecond === null ? "" : `${number(perSecond)} tokens/s`,
    `first after ${duration(timings.firstMs)}`,
  ];
  const prompt = `${counted(timings.promptTokens, "prompt token")}, ${whole(timings.cachedTokens)} from the prefix cache`;
  return el(
    "details",
    { class: "timings" },
    el("summary", {}, hopBar(timings.hopsMs), el("span", { class: "soft" }, words.filter(Boolean).join(" · "))),
    hopTable(timings.hopsMs),
    el("p", { class: "soft" }, `${prompt}; ${duration(timings.totalMs)} in all. Request ${timings.id}.`),
  );
}
