/**
 * A conversation as data: its messages, what a stream adds to them, and the request that continues it. Pure.
 * @module
 */

/**
 * @typedef {{token: string, logprob: number}} Candidate
 * @typedef {Candidate & {top: Candidate[]}} Token with the likeliest tokens at its place
 * @typedef {{kind: "image" | "audio", name: string, url?: string, preview?: string}} Attachment
 *   `url` is a data: URL and `preview` a blob: URL; both are missing after a reload, since files are not stored
 * @typedef {{message: string, status: number, code: string | null, param: string | null, retryAfterS: number | null}} Failure
 * @typedef {{promptTokens: number, cachedTokens: number, outputTokens: number, totalMs: number, firstMs: number,
 *   hopsMs: Record<string, number>, id: string}} Timings
 * @typedef {{role: "user" | "assistant", text: string, id?: string, reasoning?: string, attachments?: Attachment[],
 *   tokens?: Token[], finish?: string | null, failure?: Failure, timings?: Timings}} Message
 */

/**
 * @param {Message[]} messages
 * @param {number} index of a user's message
 * @param {string} text
 * @returns {Message[]} with the new text, and without what followed
 */
export function edited(messages, index, text) {
  return [...messages.slice(0, index), { ...messages[index], text }];
}

/**
 * @param {Message[]} messages
 * @param {number} index of a reply
 * @returns {Message[]} what it replied to
 */
export function before(messages, index) {
  return messages.slice(0, index);
}

/**
 * @param {Message[]} messages
 * @param {string} system the system prompt; may be empty
 * @returns {{role: string, content: unknown}[]} messages of a request; failed and empty replies are left out
 */
export function requestMessages(messages, system) {
  const found = messages
    .filter(({ role, text }) => role === "user" || text)
    .map((message) => ({ role: message.role, content: contentOf(message) }));
  return system.trim() ? [{ role: "system", content: system }, ...found] : found;
}

/**
 * @param {Message} message
 * @returns {unknown} a text, or parts if it has files
 */
export function contentOf({ text, attachments = [] }) {
  const files = attachments.filter(({ url }) => url);
  return files.length ? [...files.map(partOf), { type: "text", text }] : text;
}

/**
 * @param {Attachment} file
 * @returns {unknown} as in OpenAI's API
 */
function partOf({ kind, url = "", name }) {
  if (kind === "image") return { type: "image_url", image_url: { url } };
  const format = name.split(".").pop()?.toLowerCase() ?? "";
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
}

/**
 * Adds a chunk of a stream to a reply.
 * @param {Message} message
 * @param {any} chunk of /v1/chat/completions
 */
export function apply(message, chunk) {
  const choice = chunk.choices?.[0];
  if (chunk.id && !message.finish) message.id = chunk.id;
  if (choice) {
    const delta = choice.delta ?? {};
    if (delta.content) message.text += delta.content;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const entry of choice.logprobs?.content ?? []) (message.tokens ??= []).push(tokenOf(entry));
    if (choice.finish_reason) {
      message.finish = choice.finish_reason;
      delete message.id; // it is that of a reply that is being written
    }
  }
  if (chunk.timings) message.timings = timingsOf(chunk.timings);
}

/**
 * @param {any} entry of `logprobs.content`
 * @returns {Token}
 */
function tokenOf({ token, logprob, top_logprobs }) {
  const top = (top_logprobs ?? []).map((/** @type {Candidate} */ one) => ({
    token: one.token,
    logprob: rounded(one.logprob),
  }));
  return { token, logprob: rounded(logprob), top };
}

/** @param {number} logprob */
const rounded = (logprob) => Math.round(logprob * 1e4) / 1e4;

/**
 * @param {any} timings of a response
 * @returns {Timings | undefined}
 */
function timingsOf(timings) {
  const choice = timings.choices?.[0];
  if (!choice) return undefined;
  const hops = Object.entries(/** @type {Record<string, {ms: number}>} */ (choice.hops));
  return {
    id: choice.request_id,
    promptTokens: choice.prompt_tokens,
    cachedTokens: choice.cached_tokens,
    outputTokens: choice.output_tokens,
    totalMs: timings.total_ms,
    firstMs: choice.time_to_first_token_ms,
    hopsMs: Object.fromEntries(hops.map(([name, { ms }]) => [name, ms])),
  };
}

/**
 * @param {Timings} timings
 * @returns {number | null} tokens per second after the first token
 */
export function tokensPerSecond({ outputTokens, hopsMs }) {
  return outputTokens > 1 && hopsMs.decode > 0 ? (1000 * (outputTokens - 1)) / hopsMs.decode : null;
}

/**
 * What is stored: everything but files, which may be large.
 * @param {Message[]} messages
 * @param {number} numWithTokens how many of the last messages keep their tokens
 * @returns {Message[]}
 */
export function stored(messages, numWithTokens) {
  return messages.map((message, index) => {
    const { tokens, attachments, ...kept } = message;
    return {
      ...kept,
      ...(attachments ? { attachments: attachments.map(({ kind, name }) => ({ kind, name })) } : {}),
      ...(tokens && index >= messages.length - numWithTokens ? { tokens } : {}),
    };
  });
}

/**
 * @param {unknown} value from the storage
 * @returns {Message[]} empty unless it is a list of messages
 */
export function restored(value) {
  if (!Array.isArray(value)) return [];
  const isMessage = (/** @type {any} */ one) =>
    (one?.role === "user" || one?.role === "assistant") && typeof one.text === "string";
  return value.every(isMessage) ? value : [];
}
