// A client of Pipeline's ZeroMQ door (docs/protocol.md).
//
//     import { Client } from "./pipeline-client.mjs";
//
//     const client = await Client.connect("ipc://@pipeline/8000/door");
//     for await (const output of client.generate("Once upon a time", { max_tokens: 64 })) {
//       process.stdout.write(output.text);
//     }
//     await client.close();
//
// It can't see which user serves at an ipc:// address: any user may have bound an abstract name (docs/security.md).

import { Dealer } from "zeromq";

import { decode, encode, recordsOf, VERSION } from "./wire.mjs";

/** Deltas that a stream holds at most; more are granted when half of them have been read. */
const WINDOW = 32;
const LINGER_MS = 200;

/** The server refuses a request, or could not finish it. */
export class RequestError extends Error {
  constructor({ status, message, param, code, retry_after_s }) {
    super(message);
    this.name = "RequestError";
    this.status = status;
    this.param = param;
    this.code = code;
    /** At status 503: in how many seconds there may be room, as the server expects; else null. */
    this.retryAfterS = retry_after_s;
  }
}

/** The server is gone, or says nothing any more. What was open can be resumed, with the ids received. */
export class ConnectionLost extends Error {
  constructor(message) {
    super(message);
    this.name = "ConnectionLost";
  }
}

/**
 * One request: an async iterable of outputs `{index, text, token_ids, text_offset, token_offset, finish_reason, stop_reason,
 * logprobs}`, the last of which is an array with an entry for each id, and null where `logprobs` were not asked for. An entry is
 * {tokenId, logprob, piece, top: [{tokenId, logprob, piece}, …]}, where `piece` has the bytes of the id's text. `top` has the
 * most likely ids, or those of `logprob_token_ids`.
 */
export class Stream {
  #client;
  #numTop;
  #promptNumTop;
  #promptPieces = [];
  #deltas = [];
  #numRead = 0;
  #error = null;
  #isClosed = false;
  #wake = () => {};

  constructor(client, requestId, { logprobs = null, prompt_logprobs = null, logprob_token_ids = [] } = {}) {
    this.#client = client;
    this.#numTop = logprob_token_ids.length || logprobs;
    this.#promptNumTop = prompt_logprobs;
    this.requestId = requestId;
    /** Of the prompt's ids what `logprobs` of an output has, null for the first; complete when all outputs have come. Null
     * where `prompt_logprobs` were not asked for. */
    this.promptLogprobs = null;
    /** Int32Array; null until the server has accepted the request. */
    this.promptTokenIds = null;
    /** BigInt; null until accepted. A resumed request needs it. */
    this.seed = null;
    /** {num_prompt_tokens, num_output_tokens, num_cached_tokens}; null until the end. The last are those of the prompt
     * that were found in the prefix cache, and null where no sequence got an id. */
    this.usage = null;
    /** The server's name for it, as "cmpl-…"; null until accepted. */
    this.id = null;
    /** Where its time went, as docs/http.md has it; null until the end, and where it was not asked for. */
    this.timings = null;
  }

  /** Have it ended. The last outputs then say "abort". Harmless where it has ended already. */
  abort() {
    if (!this.#isClosed) this.#client._send({ kind: "abort", request_id: this.requestId });
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#deltas.length === 0) {
          if (this.#error) throw this.#error;
          if (this.#isClosed) return;
          await new Promise((resolve) => (this.#wake = resolve));
        }
        const delta = this.#deltas.shift();
        this.#numRead += 1;
        if (this.#numRead >= WINDOW / 2 && !this.#isClosed) {
          this.#client._send({ kind: "credit", request_id: this.requestId, num_deltas: this.#numRead });
          this.#numRead = 0;
        }
        for (const { records, pieces, ...output } of delta.outputs) {
          const k = this.#numTop;
          yield { ...output, logprobs: k === null ? null : logprobsOf(output.token_ids, records, pieces, k) };
        }
      }
    } finally {
      this.abort(); // whoever leaves the loop wants no more
    }
  }

  #takePrompt({ prompt_records, prompt_record_offset, prompt_record_pieces }) {
    if (this.promptLogprobs === null || !prompt_records.length) return;
    const ids = this.promptTokenIds.subarray(prompt_record_offset + 1);
    const k = this.#promptNumTop;
    const own = this.#promptPieces.slice(prompt_record_offset + 1);
    const pieces = own.flatMap((piece, i) => [piece, ...prompt_record_pieces.slice(i * k, (i + 1) * k)]);
    this.promptLogprobs.push(...logprobsOf(ids, prompt_records, pieces, k));
  }

  _handle(message) {
    switch (message.kind) {
      case "accepted":
        this.promptTokenIds = message.prompt_token_ids;
        this.seed = message.seed;
        this.id = message.id || null;
        this.#promptPieces = message.prompt_pieces;
        if (this.#promptNumTop !== null) this.promptLogprobs = [null];
        break;
      case "delta":
        this.#takePrompt(message);
        this.#deltas.push(message);
        break;
      case "finished":
        this.usage = {
          num_prompt_tokens: message.num_prompt_tokens,
          num_output_tokens: message.num_output_tokens,
          num_cached_tokens: message.num_cached_tokens.length ? Math.min(...message.num_cached_tokens) : null,
        };
        if (message.timings !== null) this.timings = JSON.parse(message.timings);
        this.#isClosed = true;
        break;
      case "failed":
        this._fail(new RequestError(message.failure));
    }
    this.#wake();
  }

  _fail(error) {
    this.#error ??= error;
    this.#isClosed = true;
    this.#wake();
  }
}

/** A connection to a running server. */
export class Client {
  #socket = new Dealer({ linger: LINGER_MS, sendHighWaterMark: 0, reconnectInterval: 100 });
  #streams = new Map();
  #nextId = 1n;
  #lost = null;
  #outgoing = [];
  #isSending = false;
  #heardMs = Date.now();
  #saidMs = Date.now();
  #heartbeat = null;
  #welcome;
  #address;

  /**
   * Connect to the server whose door is at `address`. Rejects with ConnectionLost where none answers in time, and with
   * RequestError where the server can't take this client.
   */
  static async connect(address, { timeoutMs = 5000 } = {}) {
    const client = new Client();
    try {
      await client.#open(address, timeoutMs);
    } catch (error) {
      await client.close();
      throw error;
    }
    return client;
  }

  async #open(address, timeoutMs) {
    const welcome = new Promise((resolve, reject) => (this.#welcome = { resolve, reject }));
    this.#socket.events.on("disconnect", () => {
      if (this.info) this.#lose(`the server at ${address} closed the connection`);
    });
    this.#address = address;
    this.#socket.connect(address);
    this.#receive();
    this._send({ kind: "hello", min_version: VERSION, max_version: VERSION, client: "pipeline-node/1.0.0" });
    const late = new ConnectionLost(`no server answered at ${address} within ${timeoutMs} ms`);
    const timer = setTimeout(() => this.#welcome.reject(late), timeoutMs);
    try {
      /** What the server says about itself: `welcome`. */
      this.info = await welcome;
    } finally {
      clearTimeout(timer);
    }
    this.#heartbeat = setInterval(() => this.#beat(), this.info.heartbeat_s * 500);
    this.#heartbeat.unref();
  }

  /**
   * Generate from a text, an array of token ids, an array of chat messages {role, content, …}, or a prompt as the wire has
   * it: {kind: "chat", messages, tools, …}.
   *
   * `params` has the names of docs/protocol.md. With `received`, for each of the n sequences its output ids so far, the
   * request goes on behind them; `params.seed` must then be that of the first stream. `name` is the caller's own for it:
   * it ends `stream.id`, and POST /abort_requests takes it. With `timings`, `stream.timings` says where the time went.
   * `priority`, `cacheSalt` and `timeoutS` are those of `generate` in docs/protocol.md.
   *
   * Throws TypeError for what is no request, and RangeError for one that is larger than the server reads.
   */
  generate(prompt, params = {}, options = {}) {
    const { received = [], model = "", name = null, timings = false } = options;
    const { priority = 0, cacheSalt = null, timeoutS = null } = options;
    if (this.#lost) throw this.#lost;
    if (name !== null && typeof name !== "string") throw new TypeError("name must be a string");
    const stream = new Stream(this, this.#nextId++, params);
    const message = { kind: "generate", request_id: stream.requestId, model, prompt: promptOf(prompt), params };
    const more = { received, name, timings: Boolean(timings), priority, cache_salt: cacheSalt, timeout_s: timeoutS };
    const data = encode({ ...message, credits: WINDOW, ...more });
    if (data.length > this.info.max_message_bytes) {
      const most = `the server reads at most ${this.info.max_message_bytes}`;
      throw new RangeError(`the request takes ${data.length} bytes, and ${most}`);
    }
    this.#sendBytes(data);
    this.#streams.set(stream.requestId, stream);
    return stream;
  }

  /** Close the connection; the server aborts what is open. */
  async close() {
    clearInterval(this.#heartbeat);
    if (this.info) this._send({ kind: "bye" });
    this.#end(new ConnectionLost("the client was closed"));
    while (this.#isSending) await new Promise((resolve) => setImmediate(resolve));
    if (!this.#socket.closed) this.#socket.close();
  }

  /** Queue a message: libzmq's binding takes one at a time. Throws TypeError where it is none. */
  _send(message) {
    if (!this.#lost) this.#sendBytes(encode(message));
  }

  #sendBytes(data) {
    this.#outgoing.push(data);
    this.#saidMs = Date.now();
    if (!this.#isSending) this.#drain();
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
      this.#welcome.reject(error);
      this.#lose(`the server does not speak this protocol: ${error.message}`);
    }
  }

  #handle(message) {
    switch (message.kind) {
      case "welcome":
        this.#welcome.resolve(message);
        break;
      case "error": {
        this.#welcome.reject(new RequestError(message.failure));
        this.#lose(`the server ended the connection: ${message.failure.message}`);
        break;
      }
      case "accepted":
      case "delta":
      case "finished":
      case "failed": {
        const stream = this.#streams.get(message.request_id);
        if (message.kind === "finished" || message.kind === "failed") this.#streams.delete(message.request_id);
        stream?._handle(message);
      }
    }
  }

  #beat() {
    const now = Date.now();
    if (now - Math.min(this.#saidMs, this.#heardMs) >= this.info.heartbeat_s * 500) this._send({ kind: "ping" });
    if (now - this.#heardMs > this.info.silence_s * 1000) {
      this.#lose(`the server has said nothing for ${this.info.silence_s} s`);
    }
  }

  // libzmq need not look for a server that is gone.
  #lose(reason) {
    if (!this.#lost && !this.#socket.closed) this.#socket.disconnect(this.#address);
    this.#end(new ConnectionLost(reason));
  }

  #end(error) {
    if (this.#lost) return;
    this.#lost = error;
    for (const stream of this.#streams.values()) stream._fail(error);
    this.#streams.clear();
  }
}

function logprobsOf(ids, records, pieces, k) {
  return recordsOf(records, k).map(({ logprob, topIds, topLogprobs }, place) => {
    const at = place * (1 + k);
    const named = (tokenId, i) => ({ tokenId, logprob: topLogprobs[i], piece: pieces[at + 1 + i] });
    return { tokenId: ids[place], logprob, piece: pieces[at], top: Array.from(topIds, named) };
  });
}

function promptOf(prompt) {
  if (typeof prompt.kind === "string") return prompt;
  if (typeof prompt === "string") return { kind: "text", text: prompt };
  if (typeof prompt[0] === "number") return { kind: "tokens", token_ids: prompt };
  return { kind: "chat", messages: prompt };
}
