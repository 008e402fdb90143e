// Replays the test vectors: node replay.mjs ../../tests/protocol/vectors.json
//
// Each message's bytes must be read as its object, and what is written from the object must be read as the same again.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { decode, encode, VERSION } from "./wire.mjs";

const document = JSON.parse(readFileSync(process.argv[2], "utf8"));
assert.equal(document.version, VERSION);
for (const { name, hex, message } of document.vectors) {
  const read = decode(Buffer.from(hex, "hex"));
  assert.deepEqual(asJson(read), message, name);
  assert.deepEqual(asJson(decode(encode(read))), message, `${name}, written again`);
}
for (const hex of ["", "c1", "90", "91a473696e67", "81a46b696e64a5", "92a561626f7274", "92a664656c746101"]) {
  assert.throws(() => decode(Buffer.from(hex, "hex")), Error, hex);
}
console.log(`${document.vectors.length} vectors are read and written`);

function asJson(value) {
  if (typeof value === "bigint") return String(value);
  if (value instanceof Int32Array) return Array.from(value);
  if (value instanceof Uint8Array) return Buffer.from(value).toString("hex");
  if (Array.isArray(value)) return value.map(asJson);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, asJson(one)]));
}
