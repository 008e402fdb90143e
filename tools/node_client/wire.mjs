// The client wire, version 2, as docs/protocol.md has it: messages as objects, to and from MessagePack.
//
// An object has `kind` and its fields by name. Ids and seeds of 64 bits are BigInt, packed token ids are Int32Array, other
// binary is Uint8Array.

import { decode as unpack, encode as pack } from "@msgpack/msgpack";

import { checkItems } from "./items.mjs";

export const VERSION = 2;

// How a field is written and read. A field that may be left out at the end has a default.
const plain = { write: (value) => value, read: (value) => value };
// A field of which a server may send only what `isRight` takes. Throws Error for others.
const checked = (what, isRight) => ({ write: (value) => value, read: (value) => required(value, what, isRight) });
const isText = (value) => typeof value === "string";
const isBytes = (value) => value instanceof Uint8Array;
const text = checked("text", isText);
const textOrNull = checked("text or null", (value) => value === null || isText(value));
const integer = checked("an integer", Number.isSafeInteger);
const number = checked("a number", Number.isFinite);
const numberOrNull = checked("a number or null", (value) => value === null || Number.isFinite(value));
const bool = checked("true or false", (value) => typeof value === "boolean");
const bytes = checked("bytes", isBytes);
const isInteger64 = (value) => value === null || typeof value === "bigint" || Number.isSafeInteger(value);
const u64 = {
  write: (value) => (value === null ? null : BigInt(value)),
  read: (value) => (required(value, "an integer", isInteger64) === null ? null : BigInt(value)),
};
const ids = {
  write: packIds,
  read: (value) => unpackIds(required(value, "bytes of ids", (one) => isBytes(one) && one.byteLength % 4 === 0)),
};
const list = (of) => ({
  write: (values) => values.map(of.write),
  read: (values) => required(values, "an array", Array.isArray).map((value) => of.read(plainInteger(value, of))),
});
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
    ["status", integer],
    ["message", text],
    ["param", textOrNull, null],
    ["code", textOrNull, null],
    ["retry_after_s", numberOrNull, null],
  ],
  output: [
    ["index", integer],
    ["text", text],
    ["token_ids", ids],
    ["text_offset", integer],
    ["token_offset", integer],
    ["finish_reason", textOrNull, null],
    ["stop_reason", plain, null],
    ["records", bytes, NO_BYTES],
    ["pieces", list(bytes), []],
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
    ["version", integer],
    ["server", text],
    ["model", text],
    ["max_model_len", integer],
    ["vocab_size", integer],
    ["max_open_requests", integer],
    ["max_message_bytes", integer],
    ["max_credits", integer],
    ["heartbeat_s", number],
    ["silence_s", number],
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
    ["id", text, ""],
    ["prompt_pieces", list(bytes), []],
  ],
  delta: [
    ["request_id", u64],
    ["outputs", list(part("output"))],
    ["prompt_records", bytes, NO_BYTES],
    ["prompt_record_offset", integer, 0],
    ["prompt_record_pieces", list(bytes), []],
  ],
  finished: [
    ["request_id", u64],
    ["num_prompt_tokens", integer],
    ["num_output_tokens", integer],
    ["timings", textOrNull, null],
    ["num_cached_tokens", list(integer), []],
    ["embedding", bytes, NO_BYTES],
  ],
  failed: [["request_id", u64], ["failure", part("failure")]],
  pong: [["nonce", u64, 0n]],
  sleep_state: [
    ["nonce", u64],
    ["is_sleeping", bool, false],
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
  checkItems(data);
  const values = unpack(data, { useBigInt64: true });
  if (!Array.isArray(values) || !Object.hasOwn(MESSAGES, values[0])) throw new Error("these bytes are no message");
  return { kind: values[0], ...fromArray(MESSAGES[values[0]], values.slice(1)) };
}

function required(value, what, isRight) {
  if (!isRight(value)) throw new Error(`a field of this message is not ${what}`);
  return value;
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
