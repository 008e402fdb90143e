/**
 * The chats that this browser keeps: a list with the newest first, and the messages of each. A chat is in the list as
 * soon as it has a message. Other tabs of this page may change them too, so each change begins with what is stored.
 * @module
 */

import { load, save } from "../common/store.js";
import { restored, stored } from "./conversation.js";

/**
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {{id: string, name: string, isNamed?: boolean}} Entry `isNamed` by the user, not after its first message
 */

const LIST = "chats";
const CURRENT = "chat";
const BEFORE_THE_LIST = "conversation";
const MAX_NAME = 60;

export class Chats {
  /** @param {Storage} [storage] */
  constructor(storage = localStorage) {
    this.storage = storage;
    const id = load(CURRENT, "", storage);
    /** The chat that is shown; one without messages is not in the list. */
    this.current = this.list().some((one) => one.id === id) ? id : newId();
    const messages = restored(load(BEFORE_THE_LIST, [], storage));
    if (messages.length) {
      this.open(newId());
      this.save(this.current, messages);
    }
    save(BEFORE_THE_LIST, undefined, storage);
  }

  /** @returns {Entry[]} the newest first */
  list() {
    const found = load(LIST, /** @type {Entry[]} */ ([]), this.storage);
    return Array.isArray(found)
      ? found.filter((one) => typeof one?.id === "string" && typeof one.name === "string")
      : [];
  }

  /** @returns {Message[]} those of the current chat */
  messages() {
    return restored(load(key(this.current), [], this.storage));
  }

  /** @param {string} id */
  open(id) {
    this.current = id;
    save(CURRENT, id, this.storage);
  }

  /** Opens a chat without messages. */
  create() {
    this.open(newId());
  }

  /**
   * Keeps the messages of a chat: with as many tokens as there is room for. It becomes the newest. A chat that was
   * deleted meanwhile stays so.
   * @param {string} id
   * @param {Message[]} messages
   * @returns {boolean} whether there was room
   */
  save(id, messages) {
    const list = this.list();
    const entry = list.find((one) => one.id === id);
    if (!entry && (id !== this.current || !messages.length)) return true;
    if (!this.#saveMessages(id, messages)) return false;
    const others = list.filter((one) => one !== entry);
    const changed = { id, ...entry, name: entry?.isNamed ? entry.name : nameOf(messages) };
    if (!save(LIST, [changed, ...others], this.storage)) return false;
    if (id === this.current) this.open(id);
    return true;
  }

  /**
   * @param {string} id
   * @param {string} name empty for one after its first message
   */
  rename(id, name) {
    const words = short(name);
    const list = this.list().map((one) => {
      if (one.id !== id) return one;
      return words ? { id, name: words, isNamed: true } : { id, name: nameOf(this.#messagesOf(id)) };
    });
    save(LIST, list, this.storage);
  }

  /**
   * Deletes a chat. If it is the current one, a new one is opened.
   * @param {string} id
   * @returns {() => void} brings it back, and opens it if it was the current one
   */
  remove(id) {
    const list = this.list();
    const index = list.findIndex((one) => one.id === id);
    const messages = this.#messagesOf(id);
    const wasCurrent = id === this.current;
    save(
      LIST,
      list.filter((one) => one.id !== id),
      this.storage,
    );
    save(key(id), undefined, this.storage);
    if (wasCurrent) this.create();
    return () => {
      if (index < 0 || !save(key(id), messages, this.storage)) return;
      const now = this.list();
      save(LIST, [...now.slice(0, index), list[index], ...now.slice(index)], this.storage);
      if (wasCurrent) this.open(id);
    };
  }

  /** @param {string} id */
  #messagesOf(id) {
    return restored(load(key(id), [], this.storage));
  }

  /**
   * @param {string} id
   * @param {Message[]} messages
   */
  #saveMessages(id, messages) {
    const tried = (/** @type {number} */ numWithTokens) =>
      save(key(id), stored(messages, numWithTokens), this.storage);
    if ([20, 4, 1].some(tried)) return true;
    for (const other of this.list()) {
      if (other.id !== id) save(key(other.id), stored(this.#messagesOf(other.id), 0), this.storage);
    }
    return tried(0);
  }
}

/**
 * @param {Message[]} messages
 * @returns {string} the beginning of the first one
 */
export function nameOf(messages) {
  const [first] = messages;
  return short(first?.text ?? "") || first?.attachments?.[0]?.name || "New chat";
}

/** @param {string} text */
function short(text) {
  const letters = [...text.replace(/\s+/g, " ").trim()];
  return letters.length > MAX_NAME ? `${letters.slice(0, MAX_NAME - 1).join("").trim()}…` : letters.join("");
}

/** @param {string} id */
const key = (id) => `chat.${id}`;

/** crypto.randomUUID is missing over plain HTTP. */
const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((one) => one.toString(16).padStart(2, "0")).join("");
