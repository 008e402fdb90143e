/**
 * Files for the next message: a button for each kind that the model takes, or else one disabled button that says what it
 * lacks. The server checks each file as soon as it is chosen: it renders a prompt with it, without running the model.
 * @module
 */

import { ApiError, getJson } from "../common/api.js";
import { announce, el, replace } from "../common/dom.js";
import { size } from "../common/format.js";
import { contentOf } from "./conversation.js";

/** @typedef {import("./conversation.js").Attachment} Attachment */

const KINDS = /** @type {const} */ ([
  { kind: "image", capability: "vision", label: "Image", accept: "image/*" },
  { kind: "audio", capability: "audio", label: "Audio", accept: "audio/*" },
]);

/**
 * The kinds of files that a model takes.
 * @param {readonly string[]} capabilities those in the reply of /api/show
 */
export function kindsOf(capabilities) {
  return KINDS.filter(({ capability }) => capabilities.includes(capability));
}

export class Attachments {
  /** @type {Attachment[]} */
  files = [];
  #list = el("ul", { class: "files", "aria-label": "Files of the next message" });

  /** @param {() => string} model */
  constructor(model) {
    this.model = model;
    this.list = this.#list;
    this.buttons = el("span", { class: "attach" });
  }

  /**
   * Offers what the model takes.
   * @param {readonly string[]} capabilities
   */
  setCapabilities(capabilities) {
    replace(this.buttons, ...this.#inputs(kindsOf(capabilities)));
  }

  /** @param {ReturnType<typeof kindsOf>} kinds */
  #inputs(kinds) {
    return kinds.map(({ kind, label, accept }) => {
      const input = el("input", { type: "file", accept, hidden: true, "aria-label": `${label} file` });
      input.addEventListener("change", () => {
        const [file] = input.files ?? [];
        input.value = "";
        if (file) this.#add(kind, file);
      });
      const button = el("button", { class: "quiet", type: "button", onclick: () => input.click() }, label);
      return el("span", {}, button, input);
    });
  }

  clear() {
    this.files = [];
    replace(this.#list);
  }

  /**
   * @param {"image" | "audio"} kind
   * @param {File} file
   */
  async #add(kind, file) {
    const words = el("span", {}, `${file.name} (${size(file.size)})`);
    const remark = el("span", { class: "soft" }, "checking…");
    const item = el("li", {}, words, remark);
    this.#list.append(item);
    try {
      const url = await dataUrl(file);
      const attachment = { kind, name: file.name, url, preview: URL.createObjectURL(file) };
      await this.#check(attachment);
      this.files.push(attachment);
      remark.replaceWith(previewOf(attachment) ?? "");
      this.#addRemove(item, () => {
        this.files = this.files.filter((one) => one !== attachment);
      });
    } catch (error) {
      const why = error instanceof ApiError ? error.message : "The file can't be read.";
      item.classList.add("refused");
      remark.textContent = `No ${kind} attached. ${why}`;
      remark.className = "";
      announce(`${file.name} is not attached. ${why}`);
      this.#addRemove(item, () => {});
    }
  }

  /**
   * @param {HTMLElement} item
   * @param {() => void} then
   */
  #addRemove(item, then) {
    const remove = () => {
      item.remove();
      then();
    };
    item.append(
      el("button", { class: "quiet", type: "button", "aria-label": "Remove the file", onclick: remove }, "✕"),
    );
  }

  /**
   * @param {Attachment} attachment
   * @throws {ApiError}
   */
  async #check(attachment) {
    const content = contentOf({ role: "user", text: "?", attachments: [attachment] });
    const body = { model: this.model(), messages: [{ role: "user", content }] };
    await getJson("v1/chat/completions/render", { body });
  }
}

/**
 * @param {Attachment} attachment
 * @returns {HTMLElement | null} a picture or a player; null if the file is not kept
 */
export function previewOf({ kind, name, preview }) {
  if (!preview) return null;
  return kind === "image"
    ? el("img", { src: preview, alt: name })
    : el("audio", { src: preview, controls: true, "aria-label": name });
}

/**
 * @param {File} file
 * @returns {Promise<string>}
 */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
