/**
 * The dialog that asks for an API key.
 * @module
 */

import { apiKey, setApiKey } from "./common/api.js";
import { el } from "./common/dom.js";

export class KeyDialog {
  #field = el("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true });
  #remark = el("p", { class: "soft" });

  /** @param {() => void} onKey called when there is another key */
  constructor(onKey) {
    this.element = el(
      "dialog",
      { class: "key-dialog", "aria-labelledby": "key-title" },
      el(
        "form",
        { method: "dialog" },
        el("h2", { id: "key-title" }, "API key"),
        this.#remark,
        el("label", { for: "key" }, "Key"),
        this.#field,
        el("p", { class: "soft" }, "It is kept until you close this tab."),
        el(
          "p",
          { class: "buttons" },
          el("button", { class: "quiet", type: "button", onclick: () => this.element.close() }, "Cancel"),
          el("button", { class: "send", type: "submit" }, "Use this key"),
        ),
      ),
    );
    this.element.querySelector("form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      setApiKey(this.#field.value.trim());
      this.#field.value = "";
      this.element.close();
      onKey();
    });
    document.body.append(this.element);
  }

  /** @param {boolean} [isAsked] by the server */
  open(isAsked = false) {
    const words = apiKey() ? "The server does not accept this key." : "This server needs an API key.";
    this.#remark.textContent = isAsked ? words : "Requests of this page use it.";
    if (!this.element.open) this.element.showModal();
  }
}
