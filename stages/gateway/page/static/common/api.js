/**
 * Requests to the server, and its errors. The API key, if the server needs one, is kept until the tab is closed.
 * @module
 */

import { EventParser } from "./sse.js";
import { load, save } from "./store.js";

/** An error of the server, or of the way to it (status 0). */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {{param?: string | null, code?: string | null, retryAfterS?: number}} [details]
   */
  constructor(status, message, details = {}) {
    super(message);
    this.status = status;
    this.param = details.param ?? null;
    this.code = details.code ?? null;
    this.retryAfterS = details.retryAfterS ?? null;
  }
}

/** @type {() => void} */
let onKeyNeeded = () => {};

/**
 * @param {() => void} listener called when the server answers 401
 */
export function whenKeyNeeded(listener) {
  onKeyNeeded = listener;
}

/** @returns {string} the key; empty if there is none */
export function apiKey() {
  const key = load("key", "", sessionStorage);
  return typeof key === "string" ? key : "";
}

/** @param {string} key empty to forget it */
export function setApiKey(key) {
  save("key", key || undefined, sessionStorage);
}

/**
 * @param {string} path relative to the page, without a leading slash
 * @param {{body?: unknown, signal?: AbortSignal}} [options] with a body it is a POST
 * @returns {Promise<Response>} with a status below 400
 * @throws {ApiError}
 */
export async function send(path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const key = apiKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  const init = {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    credentials: /** @type {const} */ ("omit"),
  };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), init);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const error = errorOf(response.status, await response.text().catch(() => ""), response.headers.get("Retry-After"));
  if (error.status === 401) onKeyNeeded();
  throw error;
}

/**
 * @param {number} status
 * @param {string} text the body
 * @param {string | null} [retryAfter]
 * @returns {ApiError}
 */
export function errorOf(status, text, retryAfter = null) {
  const retryAfterS = retryAfter === null ? undefined : Number(retryAfter);
  try {
    const { message, param, code } = JSON.parse(text).error;
    return new ApiError(status, String(message), { param, code, retryAfterS });
  } catch {
    return new ApiError(status, text.slice(0, 300) || `The server answered ${status}.`, { retryAfterS });
  }
}

/**
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<any>} the JSON of the response
 * @throws {ApiError}
 */
export async function getJson(path, options) {
  return (await send(path, options)).json();
}

/**
 * Ends the reasoning of a chat completion that is streamed: its answer follows.
 * @param {string} id of the reply
 * @throws {ApiError}
 */
export async function endReasoning(id) {
  await send(`v1/chat/completions/${encodeURIComponent(id)}/control`, { body: { action: "reasoning_end" } });
}

/**
 * The chunks of a streamed chat completion.
 * @param {Record<string, unknown>} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 * @throws {ApiError} also for an error event inside the stream
 */
export async function* streamChat(body, signal) {
  const more = { stream: true, reasoning_control: true }; // for endReasoning
  const response = await send("v1/chat/completions", { body: { ...body, ...more }, signal });
  if (!response.body) throw new ApiError(0, "The response has no body.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The connection ended before the reply did.");
      for (const data of parser.push(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw errorOf(500, data);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError(0, "The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
