// The client wire, version 2, as docs/protocol.md has it: messages as objects, to and from MessagePack.
//
// An object has `kind` and its fields by name. Ids and seeds of 64 bits are BigInt, packed token ids are Int32Array, other
// binary is Uint8Array.

import { decode as unpack, encode as pack } from "@msgpack/msgpack";

export const VERSION = 2;

// How a field is written and read. A field that may be left out at the end has a default.
const plain = { write: (value) => value, read: (value) => value };
const u64 = {
  write: (value) => (value === null ? null : BigInt(value)),
  read: (value) => (value === null ? null : BigInt(value)),
};
const ids = { write: packIds, read: unpackIds };
const list = (of) => ({ write: (values) => values.map(of.write), read: (values) => values.map(of.read) });
const part = (name) => ({ write: (value) => toArray(PARTS[name], value), read: (value) => fromArray(PARTS[name], value) });
const optional = (name) => ({
  write: (value) => (value === null ? null : part(name).write(value)),
  read: (value) => (value === null ? null : part(name).read(value)),
});
const NO_BYTES = new Uint8Array(0);
// What a client asks: a map with the fields of the HTTP API, of which those that are null or missing are not written.
const request = { write: (value) => asked(value), read: (value) => unasked(value) };

// Each field: its name, how it is written, and its default where it has one.
const PARTS = {
  failure: [
    ["status", plain],
    ["message", plain],
    ["param", plain, null],
    ["code", plain, null],
    ["retry_after_s", plain, null],
  ],
  output: [
    ["index", plain],
    ["text", plain],
    ["token_ids", ids],
    ["text_offset", plain],
    ["token_offset", plain],
    ["finish_reason", plain, null],
    ["stop_reason", plain, null],
    ["records", plain, NO_BYTES],
    ["pieces", plain, []],
  ],
};
const MESSAGES = {
  hello: [
    ["min_version", plain],
    ["max_version", plain],
    ["client", plain, ""],
    ["api_key", plain, null],
    ["model", plain, null],
  ],
  generate: [
    ["request_id", u64],
    ["request", request],
    ["credits", plain],
    ["received", list(ids), []],
    ["name", plain, null],
  ],
  abort: [["request_id", u64]],
  credit: [["request_id", u64], ["num_deltas", plain]],
  ping: [["nonce", u64, 0n]],
  set_sleep: [
    ["nonce", u64],
    ["sleeps", plain],
    ["wakes_on_request", plain, false],
  ],
  ask_sleep: [["nonce", u64]],
  bye: [],
  welcome: [
    ["version", plain],
    ["server", plain],
    ["model", plain],
    ["max_model_len", plain],
    ["vocab_size", plain],
    ["max_open_requests", plain],
    ["max_message_bytes", plain],
    ["max_credits", plain],
    ["heartbeat_s", plain],
    ["silence_s", plain],
    ["defaults", plain, {}],
    ["addresses", plain, []],
    ["gateway", plain, 0],
    ["poolings", plain, []],
    ["tasks", plain, []],
    ["takes_sleep", plain, false],
  ],
  accepted: [
    ["request_id", u64],
    ["prompt_token_ids", ids],
    ["seed", u64],
    ["id", plain, ""],
    ["prompt_pieces", plain, []],
  ],
  delta: [
    ["request_id", u64],
    ["outputs", list(part("output"))],
    ["prompt_records", plain, NO_BYTES],
    ["prompt_record_offset", plain, 0],
    ["prompt_record_pieces", plain, []],
  ],
  finished: [
    ["request_id", u64],
    ["num_prompt_tokens", plain],
    ["num_output_tokens", plain],
    ["timings", plain, null],
    ["num_cached_tokens", plain, []],
    ["embedding", plain, NO_BYTES],
  ],
  failed: [["request_id", u64], ["failure", part("failure")]],
  pong: [["nonce", u64, 0n]],
  sleep_state: [
    ["nonce", u64],
    ["is_sleeping", plain, false],
    ["failure", optional("failure"), null],
  ],
  error: [["failure", part("failure")]],
};

/** The bytes of a message. Throws TypeError where a field is missing or unknown. */
export function encode(message) {
  const { kind, ...fields } = message;
  const names = new Set((MESSAGES[kind] ?? []).map(([name]) => name));
  const unknown = Object.keys(fields).filter((name) => !names.has(name));
  if (!(kind in MESSAGES) || unknown.length) throw new TypeError(`no message has ${kind} ${unknown}`);
  return pack(toArray(MESSAGES[kind], message, kind), { useBigInt64: true });
}

/** The message in these bytes. Throws Error where they are none. */
export function decode(data) {
  const values = unpack(data, { useBigInt64: true });
  if (!Array.isArray(values) || !Object.hasOwn(MESSAGES, values[0])) throw new Error("these bytes are no message");
  return { kind: values[0], ...fromArray(MESSAGES[values[0]], values.slice(1)) };
}

function toArray(fields, object, kind) {
  const values = fields.map(([name, type, fallback]) => {
    const value = object[name] ?? fallback;
    if (value === undefined) throw new TypeError(`${kind ?? "a part"} needs ${name}`);
    return type.write(value);
  });
  return kind === undefined ? values : [kind, ...values];
}

// What stands behind the fields that we know is newer than we are.
function fromArray(fields, values) {
  if (!Array.isArray(values)) throw new Error("a part of this message is no array");
  return Object.fromEntries(
    fields.map(([name, type, fallback], place) => {
      if (place < values.length) return [name, type.read(plainInteger(values[place], type))];
      if (fallback === undefined) throw new Error(`this message has no ${name}`);
      return [name, fallback];
    }),
  );
}

/** Fields of a request that are JSON text: objects and arrays in them are written so. */
const JSON_FIELDS = new Set([
  ...["tools", "tool_choice", "documents", "chat_template_kwargs", "guided_json"],
  ...["json", "structural_tag", "schema", "structures", "triggers", "format"],
]);

function asked(value, name = "") {
  if (name === "seed") return BigInt(value);
  if (name === "prompt_token_ids") return packIds(value);
  if (value === null || typeof value !== "object") return value;
  if (JSON_FIELDS.has(name)) return JSON.stringify(value);
  if (Array.isArray(value)) return value.map((one) => asked(one));
  const given = Object.entries(value).filter(([, one]) => one !== null && one !== undefined);
  return Object.fromEntries(given.map(([key, one]) => [key, asked(one, key)]));
}

function unasked(value, name = "") {
  if (name === "seed") return BigInt(value);
  if (typeof value === "bigint") return Number(value);
  if (name === "prompt_token_ids") return unpackIds(value);
  if (Array.isArray(value)) return value.map((one) => unasked(one));
  if (value === null || typeof value !== "object" || value instanceof Uint8Array) return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, unasked(one, key)]));
}

// A server may write any integer in 64 bits; only ids and seeds need them.
function plainInteger(value, type) {
  return typeof value === "bigint" && type !== u64 ? Number(value) : value;
}

function packIds(values) {
  const bytes = new Uint8Array(values.length * 4);
  const view = new DataView(bytes.buffer);
  values.forEach((value, place) => {
    if (!Number.isInteger(value) || value !== (value | 0)) throw new TypeError(`${value} is no token id`);
    view.setInt32(place * 4, value, true);
  });
  return bytes;
}

function unpackIds(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Int32Array.from({ length: bytes.byteLength >> 2 }, (_, place) => view.getInt32(place * 4, true));
}

/**
 * The records of log probabilities in `bytes`, each with the `numTop` likeliest ids: an array of {logprob, topIds,
 * topLogprobs}.
 */
export function recordsOf(bytes, numTop) {
  const width = 4 + 8 * numTop;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: Math.floor(bytes.byteLength / width) }, (_, place) => {
    const at = place * width;
    return {
      logprob: view.getFloat32(at, true),
      topIds: Int32Array.from({ length: numTop }, (_, k) => view.getInt32(at + 4 + 4 * k, true)),
      topLogprobs: Float32Array.from({ length: numTop }, (_, k) => view.getFloat32(at + 4 + 4 * (numTop + k), true)),
    };
  });
}
