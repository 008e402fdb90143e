// One connection to a server: a socket, `hello`, and the heartbeat.

import { Dealer } from "zeromq";

import { ConnectionLost, RequestError } from "./errors.mjs";
import { decode, encode, VERSION } from "./wire.mjs";

const LINGER_MS = 200;

export class Connection {
  #socket = new Dealer({ linger: LINGER_MS, sendHighWaterMark: 0, reconnectInterval: 100 });
  #address;
  #onMessage;
  #onLost;
  #welcome = { resolve() {}, reject() {} };
  #info = null;
  #isClosed = false;
  #outgoing = [];
  #isSending = false;
  #heardMs = Date.now();
  #saidMs = Date.now();
  #heartbeat = null;

  /** `onLost(connection, error, mayReturn)` is called once if an open connection ends by itself; `mayReturn` says whether
   * the server may take this client again. */
  constructor(address, onMessage, onLost) {
    this.#address = address;
    this.#onMessage = onMessage;
    this.#onLost = onLost;
  }

  /** Returns the server's `welcome`. Rejects with ConnectionLost where none answers in time, and with RequestError where
   * the server can't take this client. Close the connection in any case. */
  async open(timeoutMs, apiKey, model) {
    const welcome = new Promise((resolve, reject) => (this.#welcome = { resolve, reject }));
    this.#socket.events.on("disconnect", () => this.#lose(`the server at ${this.#address} closed the connection`));
    this.#socket.connect(this.#address);
    this.#receive();
    const hello = { kind: "hello", min_version: VERSION, max_version: VERSION, client: "pipeline-node/2.0.0" };
    this.send({ ...hello, api_key: apiKey, model });
    const late = new ConnectionLost(`no server answered at ${this.#address} within ${timeoutMs} ms`);
    const timer = setTimeout(() => this.#welcome.reject(late), timeoutMs);
    try {
      this.#info = await welcome;
    } finally {
      clearTimeout(timer);
    }
    const { heartbeat_s: beat, silence_s: silence } = this.#info;
    if (!(beat >= 0.01 && beat <= silence && silence <= 86_400)) {
      throw new ConnectionLost(`the server at ${this.#address} wants heartbeat_s ${beat} and silence_s ${silence}`);
    }
    this.#heartbeat = setInterval(() => this.#beat(), this.#info.heartbeat_s * 500);
    this.#heartbeat.unref();
    return this.#info;
  }

  send(message) {
    this.sendBytes(encode(message));
  }

  /** Queue a message: libzmq's binding takes one at a time. */
  sendBytes(data) {
    this.#outgoing.push(data);
    this.#saidMs = Date.now();
    if (!this.#isSending) this.#drain();
  }

  /** Send what is queued, and close the socket: libzmq need not look for a server that is gone. */
  async close() {
    this.#isClosed = true;
    clearInterval(this.#heartbeat);
    while (this.#isSending) await new Promise((resolve) => setImmediate(resolve));
    if (!this.#socket.closed) this.#socket.close();
  }

  async #drain() {
    this.#isSending = true;
    try {
      while (this.#outgoing.length && !this.#socket.closed) await this.#socket.send(this.#outgoing.shift());
    } catch (error) {
      this.#lose(`nothing can be sent: ${error.message}`);
    } finally {
      this.#isSending = false;
    }
  }

  async #receive() {
    try {
      for await (const [data] of this.#socket) {
        this.#heardMs = Date.now();
        this.#handle(decode(data));
      }
    } catch (error) {
      this.#lose(`the server does not speak this protocol: ${error.message}`, { mayReturn: false });
    }
  }

  #handle(message) {
    if (message.kind === "welcome") {
      this.#welcome.resolve(message);
    } else if (message.kind === "error") {
      const { code, status } = message.failure;
      this.#welcome.reject(new RequestError(message.failure));
      const mayReturn = code === "silent" || status >= 500;
      this.#lose(`the server ended the connection: ${message.failure.message}`, { mayReturn });
    } else if (!this.#isClosed) {
      this.#onMessage(message);
    }
  }

  #beat() {
    const now = Date.now();
    if (now - Math.min(this.#saidMs, this.#heardMs) >= this.#info.heartbeat_s * 500) this.send({ kind: "ping" });
    if (now - this.#heardMs > this.#info.silence_s * 1000) {
      this.#lose(`the server has said nothing for ${this.#info.silence_s} s`);
    }
  }

  #lose(reason, { mayReturn = true } = {}) {
    if (this.#isClosed) return;
    this.#isClosed = true;
    const error = new ConnectionLost(reason);
    if (this.#info === null) this.#welcome.reject(error);
    else this.#onLost(this, error, mayReturn);
  }
}
