/**
 * Files for the next message, of the kinds that the model takes: chosen with a button, dropped on the chat, pasted, or
 * taken with a phone's camera. The server checks each file at once: it renders a prompt with it, without running the
 * model.
 * @module
 */

import { ApiError, getJson } from "../common/api.js";
import { announce, el, replace } from "../common/dom.js";
import { size } from "../common/format.js";
import { contentOf } from "./conversation.js";
import { smaller } from "./photos.js";

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

/**
 * The files that a paste or a drop brings, with their kinds.
 * @template {{type: string}} F
 * @param {Iterable<F>} files
 * @param {ReturnType<typeof kindsOf>} kinds those that the model takes
 * @returns {{kind: "image" | "audio", file: F}[]} without files of other kinds
 */
export function taken(files, kinds) {
  return [...files].flatMap((file) => {
    const found = kinds.find(({ kind }) => file.type.startsWith(`${kind}/`));
    return found ? [{ kind: found.kind, file }] : [];
  });
}

export class Attachments {
  /** @type {Attachment[]} */
  files = [];
  #list = el("ul", { class: "files", "aria-label": "Files of the next message" });
  /** @type {ReturnType<typeof kindsOf>} */
  #kinds = [];
  /** @type {Set<Promise<void>>} */
  #checks = new Set();
  #isTaking = false;

  /**
   * @param {() => string} model
   * @param {HTMLElement} [root] where files can be dropped
   */
  constructor(model, root) {
    this.model = model;
    this.list = this.#list;
    this.buttons = el("span", { class: "attach" });
    if (root) this.#listen(root);
  }

  /**
   * Offers what the model takes.
   * @param {readonly string[]} capabilities
   */
  setCapabilities(capabilities) {
    this.#kinds = kindsOf(capabilities);
    replace(this.buttons, ...this.#kinds.flatMap((kind) => this.#inputs(kind)));
  }

  /** @param {ReturnType<typeof kindsOf>[number]} kind */
  #inputs({ kind, label, accept }) {
    const file = this.#input(kind, label, { accept, multiple: true, "aria-label": `${label} file` });
    if (kind !== "image") return [file];
    // The chooser of many phones offers no camera. CSS shows this button where fingers point.
    const camera = this.#input(kind, "Camera", { accept, capture: "environment", "aria-label": "Photo" });
    camera.className = "camera";
    return [file, camera];
  }

  /**
   * @param {"image" | "audio"} kind
   * @param {string} label
   * @param {Record<string, any>} attributes
   */
  #input(kind, label, attributes) {
    const input = el("input", { type: "file", hidden: true, ...attributes });
    input.addEventListener("change", () => {
      const files = [...(input.files ?? [])];
      input.value = "";
      for (const file of files) this.#add(kind, file);
    });
    return el("span", {}, el("button", { class: "quiet", type: "button", onclick: () => input.click() }, label), input);
  }

  /**
   * Takes files that are dropped or pasted. A drop never opens the file in place of the page.
   * @param {HTMLElement} root
   */
  #listen(root) {
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    const show = (/** @type {boolean} */ isOver) => root.classList.toggle("drop", isOver && this.#kinds.length > 0);
    root.addEventListener("dragover", (event) => {
      if (!hasFiles(event) || !event.dataTransfer) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = this.#kinds.length ? "copy" : "none";
      show(true);
    });
    root.addEventListener("dragleave", (event) => {
      if (!(event.relatedTarget instanceof Node && root.contains(event.relatedTarget))) show(false);
    });
    root.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      show(false);
      this.#addAll(event.dataTransfer?.files);
    });
    document.addEventListener("paste", (event) => {
      if (!root.hidden && this.#addAll(event.clipboardData?.files)) event.preventDefault();
    });
  }

  /**
   * @param {FileList | undefined} files
   * @returns {boolean} whether the model takes one of them
   */
  #addAll(files) {
    const found = taken(files ?? [], this.#kinds);
    for (const { kind, file } of found) this.#add(kind, file);
    if (files?.length && !found.length) announce("The model takes no such files.");
    return found.length > 0;
  }

  /**
   * The files of the message that is sent, once all of them are checked; they are no longer there for the next one.
   * @returns {Promise<Attachment[] | null>} null if a file is refused meanwhile, or the files are being taken already
   */
  async take() {
    if (this.#isTaking) return null;
    this.#isTaking = true;
    const isWaiting = this.#checks.size > 0;
    while (this.#checks.size) await Promise.all(this.#checks);
    this.#isTaking = false;
    if (isWaiting && this.#list.querySelector(".refused")) return null;
    const { files } = this;
    this.files = [];
    replace(this.#list);
    return files;
  }

  /** Whether there is a file, or one is being checked. */
  get any() {
    return this.files.length + this.#checks.size > 0;
  }

  /**
   * @param {"image" | "audio"} kind
   * @param {File} file
   */
  #add(kind, file) {
    const check = this.#addChecked(kind, file).finally(() => this.#checks.delete(check));
    this.#checks.add(check);
  }

  /**
   * @param {"image" | "audio"} kind
   * @param {File} file
   */
  async #addChecked(kind, file) {
    const name = el("span", {}, `${file.name} (${size(file.size)})`);
    const remark = el("span", { class: "soft" }, "checking…");
    const item = el("li", {}, name, remark);
    this.#list.append(item);
    const preview = URL.createObjectURL(file);
    try {
      const url = await dataUrl(kind === "image" ? await smaller(file) : file);
      const attachment = { kind, name: file.name, url, preview };
      await this.#check(attachment);
      this.files.push(attachment);
      remark.remove();
      item.prepend(previewOf(attachment) ?? "");
      this.#addRemove(item, file.name, () => {
        this.files = this.files.filter((one) => one !== attachment);
        URL.revokeObjectURL(preview);
      });
    } catch (error) {
      const words = error instanceof ApiError ? error.message : "The file can't be read.";
      const why = words.replace(/^the image '[^']*'/, "The image");
      URL.revokeObjectURL(preview);
      item.classList.add("refused");
      remark.textContent = `No ${kind} attached. ${why}`;
      remark.className = "";
      announce(`${file.name} is not attached. ${why}`);
      this.#addRemove(item, file.name, () => {});
    }
  }

  /**
   * @param {HTMLElement} item
   * @param {string} name of the file
   * @param {() => void} then
   */
  #addRemove(item, name, then) {
    const remove = () => {
      item.remove();
      then();
    };
    item.append(el("button", { class: "quiet", type: "button", "aria-label": `Remove ${name}`, onclick: remove }, "✕"));
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
 * @param {Blob} file
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
