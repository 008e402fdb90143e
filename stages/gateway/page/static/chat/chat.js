/**
 * The chat: a conversation, the field for the next message, and the settings of the reply.
 * @module
 */

import { ApiError, streamChat } from "../common/api.js";
import { announce, el, replace } from "../common/dom.js";
import { load, save } from "../common/store.js";
import { Attachments } from "./attachments.js";
import { ChatList } from "./chat_list.js";
import { Chats } from "./chats.js";
import { apply, before, edited, requestMessages } from "./conversation.js";
import { MessageView } from "./message_view.js";
import { isLimitTooHigh, withinContext } from "./sampling.js";
import { SettingsPanel } from "./settings_panel.js";

/** @typedef {import("./conversation.js").Message} Message */

const NUM_TOP = 5;
const SUGGESTIONS = [
  "What is the capital of Greece?",
  "Explain in three sentences what a KV cache is.",
  "Write a Python function that reverses the words of a sentence.",
];
const NEAR_END_PX = 80;
const WIDE = matchMedia("(min-width: 1100px)");

export class Chat {
  /** @type {Message[]} */
  #messages;
  /** @type {MessageView[]} */
  #views = [];
  /** @type {AbortController | null} */
  #running = null;
  #model = "";
  #contextTokens = 0;
  #showTokens = Boolean(load("tokens", false));
  #follows = true;

  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.chats = new Chats();
    this.#messages = this.chats.messages();
    this.list = new ChatList({
      open: (id) => this.#open(() => this.chats.open(id)),
      rename: (id, name) => {
        this.chats.rename(id, name);
        this.#drawList();
      },
      remove: (id) => this.#remove(id),
    });
    this.settings = new SettingsPanel();
    this.attachments = new Attachments(() => this.#model, root);
    this.thread = el("div", { class: "thread", role: "log", "aria-live": "off", "aria-label": "Conversation" });
    this.field = el("textarea", { id: "message", rows: 1, placeholder: "Write a message", "aria-label": "Message" });
    this.sendButton = el("button", { class: "send", type: "submit" }, "Send");
    this.newButton = el("button", { class: "quiet", type: "button", onclick: () => this.#open(() => this.chats.create()) }, "New chat");
    this.undo = el("p", { class: "undo", hidden: true });
    const scroller = el("div", { class: "scroller", tabindex: -1 }, this.thread);
    this.scroller = scroller;
    const column = el("div", { class: "column" }, scroller, this.undo, this.#composer());
    root.append(this.list.element, column, this.settings.element);
    addEventListener("storage", () => this.#drawList()); // another tab has changed the chats
    scroller.addEventListener("scroll", () => {
      this.#follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;
    });
    this.#draw();
    this.#drawList();
  }

  /**
   * @param {string} model the served model's name
   * @param {readonly string[]} capabilities
   * @param {Record<string, number>} recommended the sampling parameters that it recommends
   * @param {number} contextTokens the longest sequence
   */
  setModel(model, capabilities, recommended, contextTokens) {
    this.#model = model;
    this.#contextTokens = contextTokens;
    this.settings.setRecommended(recommended);
    this.attachments.setCapabilities(capabilities);
    if (!this.#messages.length) this.#draw();
  }

  #composer() {
    const tokens = el(
      "button",
      { class: "quiet toggle", type: "button", "aria-pressed": String(this.#showTokens) },
      "Tokens",
    );
    tokens.title = "Show replies token by token, with the likeliest tokens at each place";
    tokens.addEventListener("click", () => {
      this.#showTokens = !this.#showTokens;
      tokens.setAttribute("aria-pressed", String(this.#showTokens));
      save("tokens", this.#showTokens);
      for (const view of this.#views) view.state.showTokens = this.#showTokens;
      this.#views.forEach((view) => view.draw());
    });
    const settings = el(
      "button",
      { class: "quiet toggle", type: "button", "aria-controls": "settings", "aria-expanded": "false" },
      "Settings",
    );
    const show = (/** @type {boolean} */ isShown) => {
      this.settings.element.hidden = !isShown;
      settings.setAttribute("aria-expanded", String(isShown));
    };
    settings.addEventListener("click", () => show(this.settings.element.hidden));
    const hide = () => {
      show(false);
      settings.focus();
    };
    this.settings.close.addEventListener("click", hide);
    this.settings.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
    });
    const chats = this.#chatsButton();
    const form = el(
      "form",
      { class: "composer", novalidate: true },
      this.attachments.list,
      this.field,
      el("div", { class: "tools" }, chats, this.attachments.buttons, tokens, settings, this.newButton, this.sendButton),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) this.stop();
      else this.#submit();
    });
    this.field.addEventListener("input", () => this.#fit());
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.#running) this.#submit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running && !this.root.hidden) this.stop();
    });
    return form;
  }

  /** Makes the field as high as its text. */
  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }

  async #submit() {
    const text = this.field.value.trim();
    if ((!text && !this.attachments.any) || !this.#settingsAreValid()) return;
    const attachments = await this.attachments.take();
    if (!attachments) return;
    this.field.value = "";
    this.#fit();
    this.#replyTo([...this.#messages, { role: "user", text, ...(attachments.length ? { attachments } : {}) }]);
  }

  /** Ends the reply that is being written. The server aborts its request. */
  stop() {
    this.#running?.abort();
  }

  /** Shows and hides the list of chats: beside the conversation if there is room, else over it. */
  #chatsButton() {
    const button = el("button", { class: "quiet toggle", type: "button", "aria-controls": "chats" }, "Chats");
    const { element, close } = this.list;
    const show = (/** @type {boolean} */ isShown) => {
      element.hidden = !isShown;
      button.setAttribute("aria-expanded", String(isShown));
    };
    const hide = () => {
      show(false);
      button.focus();
    };
    const follow = () => show(WIDE.matches && load("chatsShown", true) !== false);
    button.addEventListener("click", () => {
      show(element.hidden);
      if (WIDE.matches) save("chatsShown", !element.hidden);
      else if (!element.hidden) close.focus();
    });
    close.addEventListener("click", hide);
    element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
    });
    WIDE.addEventListener("change", follow);
    follow();
    this.hideChats = () => {
      if (!WIDE.matches) show(false);
    };
    return button;
  }

  /**
   * Shows another chat. A reply that is being written ends, and stays as far as it is.
   * @param {() => void} choose makes it the current one
   */
  #open(choose) {
    this.stop();
    this.undo.hidden = true;
    choose();
    this.#messages = this.chats.messages();
    this.#draw();
    this.#drawList();
    this.hideChats();
    this.field.focus();
  }

  /** @param {string} id */
  #remove(id) {
    const wasShown = id === this.chats.current;
    if (wasShown) this.stop();
    const bringBack = this.chats.remove(id);
    const shown = () => {
      this.#messages = this.chats.messages();
      this.#draw();
      this.#drawList();
    };
    if (wasShown) shown();
    else this.#drawList();
    const back = () => {
      this.undo.hidden = true;
      bringBack();
      if (this.chats.current === id) shown();
      else this.#drawList();
    };
    replace(
      this.undo,
      "Chat deleted. ",
      el("button", { class: "quiet strong", type: "button", onclick: back }, "Undo"),
    );
    this.undo.hidden = false;
  }

  /** @param {Message[]} messages */
  #set(messages) {
    this.#messages = messages;
    this.#draw();
    this.#save();
  }

  #drawList() {
    this.list.draw(this.chats.list(), this.chats.current);
  }

  #draw() {
    this.#views = this.#messages.map((message, index) => this.#viewOf(message, index));
    replace(this.thread, ...(this.#views.length ? this.#views.map(({ element }) => element) : [this.#welcome()]));
    this.#scroll(true);
  }

  #welcome() {
    const ask = (/** @type {string} */ text) => this.#replyTo([{ role: "user", text }]);
    return el(
      "div",
      { class: "welcome" },
      el("h1", {}, this.#model || "Connecting…"),
      el("p", { class: "soft" }, "Messages go to this server only, and are kept in this browser."),
      el(
        "ul",
        {},
        ...SUGGESTIONS.map((text) => el("li", {}, el("button", { type: "button", onclick: () => ask(text) }, text))),
      ),
    );
  }

  /**
   * @param {Message} message
   * @param {number} index
   */
  #viewOf(message, index) {
    const actions = {
      edit: (/** @type {string} */ text) => this.#replyTo(edited(this.#messages, index, text)),
      regenerate: () => this.#replyTo(before(this.#messages, index)),
      showSetting: (/** @type {string} */ name) => this.settings.focus(name),
    };
    return new MessageView(message, actions, { showTokens: this.#showTokens, isStreaming: false });
  }

  /**
   * Shows messages, the last one the user's, and streams the reply to them.
   * @param {Message[]} messages
   */
  async #replyTo(messages) {
    if (!this.#settingsAreValid()) return;
    this.stop();
    this.undo.hidden = true;
    const body = this.#body(messages);
    /** @type {Message} */
    const reply = { role: "assistant", text: "" };
    this.#set([...messages, reply]);
    const view = this.#views[this.#views.length - 1];
    const chat = this.chats.current;
    const shown = this.#messages;
    const running = new AbortController();
    this.#running = running;
    this.#showRunning(true);
    view.state.isStreaming = true;
    view.draw();
    try {
      for await (const chunk of this.#stream(body, running.signal)) {
        apply(reply, chunk);
        view.drawSoon();
        this.#scrollSoon();
      }
    } catch (error) {
      if (running.signal.aborted) reply.finish = "abort";
      else reply.failure = failureOf(error);
    }
    view.state.isStreaming = false;
    view.draw();
    this.#scroll();
    if (this.#running === running) {
      this.#running = null;
      this.#showRunning(false);
    }
    if (this.#messages.includes(reply) || this.chats.current !== chat) this.#save(chat, shown);
    announce(reply.failure ? `Error: ${reply.failure.message}` : `Reply: ${reply.text}`);
  }

  /**
   * The chunks of a reply. If the prompt leaves less room than the limit of tokens, the reply may take all of it.
   * @param {Record<string, unknown>} body
   * @param {AbortSignal} signal
   * @throws {ApiError}
   */
  async *#stream(body, signal) {
    try {
      yield* streamChat(body, signal);
    } catch (error) {
      if (!(error instanceof ApiError) || !isLimitTooHigh(error, body)) throw error;
      yield* streamChat({ ...body, max_tokens: undefined }, signal); // JSON has no undefined
    }
  }

  /** Whether a request can be made; otherwise the first wrong field gets the focus. */
  #settingsAreValid() {
    const [problem] = Object.entries(this.settings.read().problems);
    if (!problem) return true;
    this.settings.focus(problem[0]);
    announce(problem[1]);
    return false;
  }

  /**
   * @param {Message[]} messages
   * @returns {Record<string, unknown>}
   */
  #body(messages) {
    return {
      model: this.#model,
      messages: requestMessages(messages, this.settings.system),
      ...withinContext(this.settings.read().fields, this.#contextTokens),
      timings: true,
      ...(this.#showTokens ? { logprobs: true, top_logprobs: NUM_TOP } : {}),
    };
  }

  /** @param {boolean} isRunning */
  #showRunning(isRunning) {
    this.sendButton.textContent = isRunning ? "Stop" : "Send";
    this.sendButton.classList.toggle("stop", isRunning);
  }

  #scrollSoon() {
    requestAnimationFrame(() => this.#scroll());
  }

  /** @param {boolean} [always] also if the reader has scrolled up */
  #scroll(always = false) {
    if (always) this.#follows = true;
    if (this.#follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /**
   * @param {string} [chat]
   * @param {Message[]} [messages]
   */
  #save(chat = this.chats.current, messages = this.#messages) {
    if (!this.chats.save(chat, messages)) {
      replace(this.undo, "This browser's storage is full, so this chat will be lost. Delete others to keep it.");
      this.undo.hidden = false;
    }
    this.#drawList();
  }
}

/**
 * @param {unknown} error
 * @returns {import("./conversation.js").Failure}
 */
function failureOf(error) {
  if (error instanceof ApiError) {
    const { message, status, code, param, retryAfterS } = error;
    return { message, status, code, param, retryAfterS };
  }
  const message = error instanceof Error ? error.message : String(error);
  return { message, status: 0, code: null, param: null, retryAfterS: null };
}
