// A client of Pipeline's ZeroMQ protocol (docs/protocol.md).
//
//     import { Client } from "./pipeline-client.mjs";
//
//     const client = await Client.connect("ipc://@pipeline/8000/zmq");
//     for await (const output of client.generate("Once upon a time", { max_tokens: 64 })) {
//       process.stdout.write(output.text);
//     }
//     await client.close();
//
// If the connection is lost, because a gateway died or the server is started again at its address, the client connects
// again and repeats the open requests behind what they have received: streams go on without an error.
//
// It can't see which user serves at an ipc:// address: any user may have bound an abstract name (docs/security.md).

import { Connection } from "./connection.mjs";
import { ConnectionLost, RequestError } from "./errors.mjs";
import { Stream } from "./stream.mjs";
import { encode } from "./wire.mjs";

export { ConnectionLost, RequestError, Stream };

/** The first and the longest time for an answer to `hello` of a new connection. */
const [ATTEMPT_FIRST_MS, ATTEMPT_MAX_MS] = [2000, 30_000];
/** The first and the longest pause after an attempt, and before a request is repeated at a full server. */
const [PAUSE_FIRST_MS, PAUSE_MAX_MS] = [50, 1000];
/** Codes of `failed` from a server that ends. */
const ENDING_CODES = ["draining", "shutting_down", "failed", "stage_died"];
/** After `stage_died`, the connection ends within this time if the server does. Else only the request has failed. */
const ENDING_MS = 5000;
/** Codes of `failed` after which a repeated request is sent once more. */
const FULL_CODES = ["overloaded", "starting"];

/** A connection to a running server, and its open requests, which outlive it. */
export class Client {
  #address;
  #apiKey;
  #model;
  #reconnectTimeoutMs;
  #connection = null;
  #streams = new Map();
  /** Timers of open requests that no server works on. */
  #waiting = new Map();
  #nextId = 1n;
  /** Questions about sleep without an answer, by nonce: {resolve, reject}. */
  #asked = new Map();
  #lost = null;
  #reconnectEndMs = 0;

  constructor(address, apiKey, model, reconnectTimeoutMs) {
    this.#address = address;
    this.#apiKey = apiKey;
    this.#model = model;
    this.#reconnectTimeoutMs = reconnectTimeoutMs;
    /** What the server says about itself: `welcome` of the last connection. */
    this.info = null;
  }

  /**
   * Connect to the server whose gateway is at `address`. Rejects with ConnectionLost where none answers in time, and with
   * RequestError where the server can't take this client. Of a server of several models, the connection is for `model`,
   * by default the first. After a lost connection, open requests wait `reconnectTimeoutMs` for the next one; with 0 they
   * fail at once.
   */
  static async connect(address, { timeoutMs = 5000, apiKey = null, model = null, reconnectTimeoutMs = 60_000 } = {}) {
    const client = new Client(address, apiKey, model, reconnectTimeoutMs);
    await client.#connect(timeoutMs);
    return client;
  }

  /**
   * Generate from a text, an array of token ids, an array of chat messages {role, content, …}, or the fields of a prompt:
   * {messages, tools, …}.
   *
   * `params` has the names of `Request` in docs/protocol.md, which are those of the HTTP API. With `received`, for each of the n sequences its output ids so far, the
   * request goes on behind them; `params.seed` must then be that of the first stream. `name` is the caller's own for it:
   * it ends `stream.id`, and POST /abort_requests takes it. With `timings`, `stream.timings` says where the time went.
   * `priority`, `cacheSalt` and `timeoutS` are fields of `Request`, too.
   *
   * Throws TypeError for what is no request, and RangeError for one that is larger than the server reads.
   */
  generate(prompt, params = {}, options = {}) {
    const { received = [], model = null, name = null, timings = null } = options;
    const { priority = null, cacheSalt = null, timeoutS = null } = options;
    if (this.#lost) throw this.#lost;
    if (name !== null && typeof name !== "string") throw new TypeError("name must be a string");
    const own = { model, timings, priority, cache_salt: cacheSalt, timeout_s: timeoutS };
    const request = { ...promptOf(prompt), ...params, ...own };
    const message = { kind: "generate", request_id: this.#nextId++, request, received, name };
    const stream = new Stream((part) => this.#send(part), message);
    const data = this.#encoded(stream._message());
    this.#streams.set(stream.requestId, stream);
    if (this.#connection) this.#connection.sendBytes(data);
    else this.#wait(stream, null);
    return stream;
  }

  /**
   * What the model's pooler makes of a text, an array of token ids, or a pair {prompt, pair}: Float32Array. `params.task` is
   * one of `info.tasks` (docs/http/embeddings.md), by default "embed". The numbers of a task for tokens are those of one
   * token after the other. Further fields of `Request` are `dimensions`, `prompt_name`, `instruction`, `use_activation` …
   * `options` are those of `generate`, without `received`. Rejects with RequestError or ConnectionLost.
   */
  async pool(prompt, params = {}, options = {}) {
    const stream = this.generate(prompt, { task: "embed", ...params }, options);
    for await (const _ of stream); // it has no outputs
    return stream.embedding;
  }

  /**
   * Put the server to sleep, if it allows it (gateway.enable_sleep_mode). Open requests go on after `wakeUp`; with
   * `wakeOnRequest`, the next request wakes it. Rejects with RequestError with the reason if it does not, with
   * ConnectionLost where the connection ends first, and with TypeError at a server that is too old.
   */
  async sleep({ wakeOnRequest = false } = {}) {
    await this.#ask({ kind: "set_sleep", sleeps: true, wakes_on_request: wakeOnRequest });
  }

  /** Wake the server. Resolves when open requests go on. Rejects as `sleep`. */
  async wakeUp() {
    await this.#ask({ kind: "set_sleep", sleeps: false });
  }

  /** Whether the server sleeps, or is about to fall asleep or to wake. Rejects as `sleep`. */
  async isSleeping() {
    return (await this.#ask({ kind: "ask_sleep" })).is_sleeping;
  }

  /** Close the connection; the server aborts what is open. */
  async close() {
    const connection = this.#connection;
    this.#connection = null;
    this.#end(new ConnectionLost("the client was closed"));
    connection?.send({ kind: "bye" });
    await connection?.close();
  }

  // ------------------------------------------------------------------------------------------------------ connections

  async #connect(timeoutMs) {
    const connection = new Connection(
      this.#address,
      (message) => this.#handle(message),
      (...lost) => this.#lose(...lost),
    );
    try {
      this.#connected(connection, await connection.open(timeoutMs, this.#apiKey, this.#model));
    } catch (error) {
      await connection.close();
      throw error;
    }
  }

  #connected(connection, welcome) {
    if (this.#lost) throw this.#lost;
    const before = this.info;
    this.info = welcome;
    this.#connection = connection;
    this.#reconnectEndMs = Date.now() + this.#reconnectTimeoutMs;
    const isOther = before && (before.model !== welcome.model || before.vocab_size !== welcome.vocab_size);
    for (const stream of [...this.#streams.values()]) {
      this.#stopWaiting(stream);
      if (isOther) this.#fail(stream, new ConnectionLost(`the server now serves another model: ${welcome.model}`));
      else this.#repeat(stream);
    }
  }

  #lose(connection, error, mayReturn) {
    if (connection !== this.#connection) return;
    this.#connection = null;
    connection.close();
    this.#loseAsked(error);
    if (!mayReturn || this.#reconnectTimeoutMs === 0) {
      this.#end(error);
      return;
    }
    this.#reconnectEndMs = Date.now() + this.#reconnectTimeoutMs;
    for (const stream of [...this.#streams.values()]) {
      this.#stopWaiting(stream);
      stream._lost(error);
      if (stream.isClosed) this.#streams.delete(stream.requestId);
      else this.#wait(stream, null);
    }
    this.#reconnect(error);
  }

  async #reconnect(loss) {
    let [attemptMs, pauseMs] = [ATTEMPT_FIRST_MS, PAUSE_FIRST_MS];
    while (!this.#lost) {
      const leftMs = this.#reconnectEndMs - Date.now();
      if (leftMs <= 0) {
        const timeout = `none answered within ${this.#reconnectTimeoutMs / 1000} s`;
        this.#end(new ConnectionLost(`${loss.message}, and ${timeout}`));
        return;
      }
      try {
        await this.#connect(Math.min(attemptMs, leftMs));
        return;
      } catch (error) {
        // A server that starts or ends may accept this client later.
        if (error instanceof RequestError && error.status < 500) {
          this.#end(new ConnectionLost(`${loss.message}; now it refuses this client: ${error.message}`));
        }
      }
      attemptMs = Math.min(2 * attemptMs, ATTEMPT_MAX_MS);
      // Random pauses spread the clients of one server.
      await new Promise((resolve) => setTimeout(resolve, pauseMs * (0.5 + Math.random() / 2)));
      pauseMs = Math.min(2 * pauseMs, PAUSE_MAX_MS);
    }
  }

  /** Fail all requests, and make no more connections. */
  #end(error) {
    this.#lost ??= error;
    this.#loseAsked(this.#lost);
    for (const stream of [...this.#streams.values()]) this.#fail(stream, this.#lost);
  }

  // ------------------------------------------------------------------------------------------------------------ sleep

  async #ask(question) {
    if (this.#lost) throw this.#lost;
    if (!this.#connection) throw new ConnectionLost("there is no connection now");
    if (!this.info.takes_sleep) throw new TypeError("this server can't be put to sleep over ZeroMQ: it is too old");
    const nonce = this.#nextId++;
    const answer = new Promise((resolve, reject) => this.#asked.set(nonce, { resolve, reject }));
    this.#connection.send({ ...question, nonce });
    const state = await answer;
    if (state.failure) throw new RequestError(state.failure);
    return state;
  }

  #loseAsked(error) {
    for (const { reject } of this.#asked.values()) reject(error);
    this.#asked.clear();
  }

  // --------------------------------------------------------------------------------------------------------- requests

  #encoded(message) {
    const data = encode(message);
    if (data.length > this.info.max_message_bytes) {
      const most = `the server reads at most ${this.info.max_message_bytes}`;
      throw new RangeError(`the request takes ${data.length} bytes, and ${most}`);
    }
    return data;
  }

  /** Send a message of a stream. Returns false if no server works on its request now. */
  #send(message) {
    if (!this.#connection || this.#waiting.has(message.request_id)) return false;
    this.#connection.send(message);
    return true;
  }

  /** Send a request again, behind what was received. */
  #repeat(stream) {
    if (stream._settle()) {
      this.#streams.delete(stream.requestId);
      return;
    }
    if (stream._leftMs <= 0) {
      this.#expire(stream);
      return;
    }
    stream.numRepeats += 1;
    try {
      this.#connection.sendBytes(this.#encoded(stream._message()));
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.#fail(stream, new ConnectionLost(`the request can't be continued: ${error.message}`));
    }
  }

  #handle(message) {
    if (message.kind === "sleep_state") {
      this.#asked.get(message.nonce)?.resolve(message);
      this.#asked.delete(message.nonce);
      return;
    }
    const stream = this.#streams.get(message.request_id);
    if (!stream || (message.kind === "failed" && this.#isKept(stream, message.failure))) return;
    try {
      stream._handle(message);
      // Not before: what can't be read fails all streams, and this one with them.
      if (message.kind === "finished" || message.kind === "failed") this.#streams.delete(message.request_id);
    } catch (error) {
      if (!(error instanceof ConnectionLost)) throw error;
      this.#send({ kind: "abort", request_id: message.request_id });
      this.#fail(stream, error);
    }
  }

  /** Whether a request that failed is repeated: on the next connection if this server ends, or on this one if it was
   * accepted before, and there is no room for it now. */
  #isKept(stream, failure) {
    const [isEnding, isFull] = [ENDING_CODES.includes(failure.code), FULL_CODES.includes(failure.code)];
    if (this.#reconnectTimeoutMs && isEnding) {
      const waitMs = failure.code === "stage_died" ? ENDING_MS : this.#reconnectTimeoutMs;
      if (stream._settle()) this.#streams.delete(stream.requestId);
      else this.#wait(stream, new RequestError(failure), Math.min(waitMs, this.#reconnectTimeoutMs));
      return true;
    }
    if (stream.numRepeats && isFull && Date.now() < this.#reconnectEndMs) {
      const pauseMs = Math.min((failure.retry_after_s ?? PAUSE_FIRST_MS / 1000) * 1000, PAUSE_MAX_MS);
      const repeat = () => {
        this.#stopWaiting(stream);
        if (this.#connection) this.#repeat(stream);
      };
      this.#waiting.set(stream.requestId, setTimeout(repeat, pauseMs * (0.5 + Math.random() / 2)));
      return true;
    }
    return false;
  }

  /** Keep a request until the next connection, at most until its time is up; with an error, at most for `waitMs`. */
  #wait(stream, error, waitMs = Infinity) {
    const leftMs = stream._leftMs;
    const end = leftMs < waitMs || !error ? () => this.#expire(stream) : () => this.#fail(stream, error);
    const endMs = Math.max(Math.min(leftMs, waitMs), 0);
    this.#waiting.set(stream.requestId, endMs === Infinity ? null : setTimeout(end, endMs));
  }

  #stopWaiting(stream) {
    clearTimeout(this.#waiting.get(stream.requestId) ?? undefined);
    this.#waiting.delete(stream.requestId);
  }

  #expire(stream) {
    this.#stopWaiting(stream);
    this.#streams.delete(stream.requestId);
    stream._expire();
  }

  #fail(stream, error) {
    this.#stopWaiting(stream);
    this.#streams.delete(stream.requestId);
    stream._fail(error);
  }
}

function promptOf(prompt) {
  if (typeof prompt === "string") return { prompt };
  if (typeof prompt[0] === "number") return { prompt_token_ids: prompt };
  return Array.isArray(prompt) ? { messages: prompt } : prompt;
}
