// One request of a client. It outlives the connection: on the next one, it is sent again behind what was received.

import { ConnectionLost, RequestError } from "./errors.mjs";
import { Received } from "./received.mjs";
import { recordsOf } from "./wire.mjs";

/** Deltas that a stream holds at most; more are granted when half of them have been read. */
const WINDOW = 32;
/** Connections that may be lost without output of a request in between, before it fails: it may be the cause. */
const MAX_LOSSES = 5;
/** Values of `tool_choice` that require no call. For others, the server makes a grammar from the chat. */
const NO_CALLS = ["auto", "none"];
/** Fields that constrain the output. */
const CONSTRAINTS = ["structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"];
/** Fields of a prompt that ids replace. */
const PROMPT = [
  ...["prompt", "messages", "add_generation_prompt", "continue_final_message", "tools", "tool_choice"],
  ...["parallel_tool_calls", "documents", "chat_template_kwargs", "reasoning_effort"],
];

/**
 * An async iterable of outputs `{index, text, token_ids, text_offset, token_offset, finish_reason, stop_reason,
 * logprobs}`, the last of which is an array with an entry for each id, and null where `logprobs` were not asked for. An entry is
 * {tokenId, logprob, piece, top: [{tokenId, logprob, piece}, …]}, where `piece` has the bytes of the id's text. `top` has the
 * most likely ids, or those of `logprob_token_ids`.
 */
export class Stream {
  #send;
  #request;
  #numTop;
  #promptNumTop;
  #promptPieces = [];
  #received;
  #deltas = [];
  #numRead = 0;
  #numLosses = 0;
  #sentMs = Date.now();
  #error = null;
  #isAborted = false;
  #wake = () => {};

  /** `request` is the message `generate` without its credits; `send` sends messages of this stream. */
  constructor(send, request) {
    const { logprobs, prompt_logprobs, logprob_token_ids } = request.request;
    this.#send = send;
    this.#request = request;
    this.#numTop = logprob_token_ids?.length || (logprobs ?? null);
    this.#promptNumTop = prompt_logprobs ?? null;
    this.#received = new Received(request.request, request.received);
    this.requestId = request.request_id;
    this.isClosed = false;
    /** How often it was sent again, because a connection was lost or the server was full then. */
    this.numRepeats = 0;
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
    /** Where its time went, as docs/observability.md has it; null until the end, and where it was not asked for. */
    this.timings = null;
    /** Float32Array: what the model's pooler made of a request with `task` or `pooling`; null until the end. */
    this.embedding = null;
  }

  /** Have it ended. The last outputs then say "abort". Harmless where it has ended already. */
  abort() {
    if (this.isClosed) return;
    this.#isAborted = true;
    if (!this.#send({ kind: "abort", request_id: this.requestId })) this._settle();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#deltas.length === 0) {
          if (this.#error) throw this.#error;
          if (this.isClosed) return;
          await new Promise((resolve) => (this.#wake = resolve));
        }
        const outputs = this.#deltas.shift();
        this.#numRead += 1;
        if (this.#numRead >= WINDOW / 2 && !this.isClosed) {
          this.#send({ kind: "credit", request_id: this.requestId, num_deltas: this.#numRead });
          this.#numRead = 0;
        }
        for (const { records, pieces, ...output } of outputs) {
          const k = this.#numTop;
          yield { ...output, logprobs: k === null ? null : logprobsOf(output.token_ids, records, pieces, k) };
        }
      }
    } finally {
      this.abort(); // the loop was left early, or is over
    }
  }

  // ------------------------------------------------------------------------------------------------- for the client

  /** Throws ConnectionLost if the request can't be continued after a lost connection. */
  _handle(message) {
    switch (message.kind) {
      case "accepted":
        this.#accept(message);
        break;
      case "delta":
        this.#numLosses = 0;
        this.#takePrompt(message);
        this.#deltas.push(this.#received.new(message.outputs));
        break;
      case "finished":
        this.usage = {
          num_prompt_tokens: message.num_prompt_tokens,
          num_output_tokens: message.num_output_tokens,
          num_cached_tokens: message.num_cached_tokens.length ? Math.min(...message.num_cached_tokens) : null,
        };
        if (this.#isPooled) this.embedding = floatsOf(message.embedding);
        if (message.timings !== null) this.timings = JSON.parse(message.timings);
        this.isClosed = true;
        break;
      case "failed":
        this._fail(new RequestError(message.failure));
    }
    this.#wake();
  }

  #accept(message) {
    const ids = message.prompt_token_ids;
    this.seed = message.seed;
    this.id = message.id || null;
    if (this.promptTokenIds === null) {
      this.promptTokenIds = ids;
      this.#promptPieces = message.prompt_pieces;
      if (this.#promptNumTop !== null) this.promptLogprobs = [null];
    } else if (ids.length !== this.promptTokenIds.length || ids.some((id, i) => id !== this.promptTokenIds[i])) {
      throw new ConnectionLost("the request can't be continued: the server now makes other ids of its prompt");
    }
  }

  #takePrompt({ prompt_records, prompt_record_offset, prompt_record_pieces }) {
    if (this.promptLogprobs === null || !prompt_records.length) return;
    const begin = prompt_record_offset + 1;
    const k = this.#promptNumTop;
    const own = this.#promptPieces.slice(begin);
    const pieces = own.flatMap((piece, i) => [piece, ...prompt_record_pieces.slice(i * k, (i + 1) * k)]);
    const all = logprobsOf(this.promptTokenIds.subarray(begin), prompt_records, pieces, k);
    // A repeated request gets all of them again.
    this.promptLogprobs.push(...all.slice(Math.max(this.promptLogprobs.length - begin, 0)));
  }

  /** The message that sends it, the first time or behind everything that was received. */
  _message() {
    const asked = { ...this.#request.request };
    this.#numRead = 0;
    if (asked.timeout_s !== null) asked.timeout_s = Math.max(this._leftMs, 1) / 1000;
    if (this.#isPooled) return { ...this.#request, request: asked, credits: 0, received: [] };
    if (this.promptTokenIds !== null) {
      asked.seed = this.seed;
      // A grammar depends on the chat: on its tools, and on whether the model reasons.
      const hasCalls = !NO_CALLS.includes(asked.tool_choice ?? "auto") || isStrict(asked.tools);
      const hasGrammar = hasCalls || CONSTRAINTS.some((name) => asked[name]);
      if (!asked.messages || !hasGrammar) {
        for (const name of PROMPT) delete asked[name];
        asked.prompt_token_ids = this.promptTokenIds;
      }
    }
    const received = this.#received.onTheWire(this.#lacksPrompt);
    return { ...this.#request, request: asked, credits: WINDOW - this.#deltas.length, received };
  }

  /** Until its `timeoutS` is over, counted from the first time that it was sent. */
  get _leftMs() {
    const { timeout_s } = this.#request.request;
    return timeout_s === null ? Infinity : this.#sentMs + timeout_s * 1000 - Date.now();
  }

  get #lacksPrompt() {
    return this.#promptNumTop !== null && (this.promptLogprobs?.length ?? 0) < (this.promptTokenIds?.length ?? 1);
  }

  /** The connection is lost, and another one will be made. */
  _lost(error) {
    this.#numLosses += 1;
    if (!this._settle() && this.#numLosses >= MAX_LOSSES) {
      const times = `${this.#numLosses} connections were lost without output of this request`;
      this._fail(new ConnectionLost(`${error.message}; ${times}, which may be the cause`));
    }
  }

  /** End it if it was aborted, or if nothing is missing. Returns whether it has ended. */
  _settle() {
    const isWhole = this.#received.hasAllEnds && (this.#received.isAborted || !this.#lacksPrompt);
    if (!this.isClosed && (this.#isAborted || isWhole)) this.#endHere();
    return this.isClosed;
  }

  /** Its time is up while no server works on it. */
  _expire() {
    if (this.isClosed) return;
    if (this.#received.numIds) this.#endHere();
    else this._fail(new RequestError({ status: 504, message: "the request timed out", code: "timeout" }));
  }

  get #isPooled() {
    const { task, pooling } = this.#request.request;
    return (task ?? pooling ?? null) !== null;
  }

  #endHere() {
    if (this.#isPooled) {
      const message = "the request was aborted before its embedding was computed";
      this._fail(new RequestError({ status: 503, message, param: null, code: "ended" }));
      return;
    }
    this.#deltas.push(this.#received.aborted());
    const [num_prompt_tokens, num_output_tokens] = [this.promptTokenIds?.length ?? 0, this.#received.numIds];
    this.usage = { num_prompt_tokens, num_output_tokens, num_cached_tokens: null };
    this.isClosed = true;
    this.#wake();
  }

  _fail(error) {
    if (this.isClosed) return;
    this.#error = error;
    this.isClosed = true;
    this.#wake();
  }
}

/** float32, little-endian. */
function floatsOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

function isStrict(tools) {
  return (typeof tools === "string" ? tools : JSON.stringify(tools ?? null)).includes('"strict"');
}

function logprobsOf(ids, records, pieces, k) {
  return recordsOf(records, k).map(({ logprob, topIds, topLogprobs }, place) => {
    const at = place * (1 + k);
    const named = (tokenId, i) => ({ tokenId, logprob: topLogprobs[i], piece: pieces[at + 1 + i] });
    return { tokenId: ids[place], logprob, piece: pieces[at], top: Array.from(topIds, named) };
  });
}
