/**
 * The list of chats, beside the conversation: choose one, rename it or delete it.
 * @module
 */

import { announce, el, replace } from "../common/dom.js";

/**
 * @typedef {import("./chats.js").Entry} Entry
 * @typedef {{open: (id: string) => void, rename: (id: string, name: string) => void, remove: (id: string) => void}} Actions
 */

export class ChatList {
  #items = el("ul", {});

  /** @param {Actions} actions */
  constructor(actions) {
    this.actions = actions;
    this.close = el("button", { class: "quiet close", type: "button" }, "Close");
    this.element = el(
      "nav",
      { class: "chats", id: "chats", "aria-label": "Chats", hidden: true },
      this.close,
      this.#items,
    );
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  /**
   * @param {readonly Entry[]} entries
   * @param {string} current
   */
  draw(entries, current) {
    const focused = this.element.contains(document.activeElement);
    const items = entries.map((entry) => this.#itemOf(entry, entry.id === current));
    replace(this.#items, ...(items.length ? items : [el("li", { class: "soft" }, "Chats are listed here.")]));
    if (focused && !this.element.contains(document.activeElement)) this.#focus(current);
  }

  /** @param {string} id */
  #focus(id) {
    const buttons = this.#choices();
    (buttons.find(({ dataset }) => dataset.id === id) ?? buttons[0])?.focus();
  }

  #choices() {
    return /** @type {HTMLElement[]} */ ([...this.#items.querySelectorAll(".choice")]);
  }

  /**
   * @param {Entry} entry
   * @param {boolean} isCurrent
   */
  #itemOf({ id, name }, isCurrent) {
    const choice = el("button", { class: "choice", type: "button", title: name, "data-id": id }, name);
    choice.setAttribute("aria-current", String(isCurrent));
    choice.addEventListener("click", () => this.actions.open(id));
    const item = el(
      "li",
      {},
      choice,
      el("button", { class: "quiet", type: "button", "aria-label": `Rename ${name}`, onclick: () => edit() }, "✎"),
      el(
        "button",
        {
          class: "quiet",
          type: "button",
          "aria-label": `Delete ${name}`,
          onclick: () => {
            this.actions.remove(id);
            announce(`Deleted ${name}`);
          },
        },
        "✕",
      ),
    );
    const edit = () => {
      const field = el("input", { type: "text", value: name, "aria-label": "Name of the chat" });
      let isOver = false;
      const end = (/** @type {boolean} */ keeps) => {
        if (isOver) return;
        isOver = true;
        const hasFocus = document.activeElement === field;
        if (keeps) this.actions.rename(id, field.value);
        else field.replaceWith(choice);
        if (hasFocus) this.#focus(id);
      };
      field.addEventListener("keydown", (event) => {
        if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
        event.preventDefault();
        event.stopPropagation();
        end(event.key === "Enter");
      });
      field.addEventListener("blur", () => end(true));
      choice.replaceWith(field);
      field.select();
      field.focus();
    };
    return item;
  }

  /**
   * Up and down go from chat to chat.
   * @param {KeyboardEvent} event
   */
  #move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const choices = this.#choices();
    const index = choices.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    if (!step || index < 0) return;
    event.preventDefault();
    choices[Math.min(Math.max(index + step, 0), choices.length - 1)].focus();
  }
}
