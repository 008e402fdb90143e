import assert from "node:assert/strict";
import { test } from "node:test";

import { chosen, isLoaded, label, modelsOf, stateOf } from "../page/model_choice.js";

const model = (id, value, more = {}) => ({ id, status: { value, ...more } });
const VECTORS = { ...model("vectors", "loaded"), tasks: ["embed"] };
const CHAT = { ...model("chat", "loaded", { since: 1 }), tasks: ["generate"] };
const WAITS = model("coder", "unloaded", { position: 2, waits_for: ["chat", "vectors"] });

test("the only model of a server without states is chosen, and is loaded", () => {
  const [only] = modelsOf([{ id: "a" }, { id: "adapter", parent: "a" }]);
  assert.equal(chosen([only], "other"), only);
  assert.ok(isLoaded(only));
  assert.equal(label(only), "a");
});

test("the reader's choice comes first, then a model that is loaded and generates text", () => {
  assert.equal(chosen([WAITS, VECTORS, CHAT], "coder"), WAITS);
  assert.equal(chosen([WAITS, VECTORS, CHAT], ""), CHAT);
  assert.equal(chosen([WAITS, VECTORS], "gone"), VECTORS);
  assert.equal(chosen([WAITS], ""), WAITS);
});

test("the label says what a model that is not loaded waits for", () => {
  assert.equal(label(CHAT), "chat");
  assert.equal(label(WAITS), "coder (waits: 2, after chat, vectors)");
  assert.equal(label(model("coder", "failed")), "coder (failed)");
  assert.notEqual(stateOf(CHAT), stateOf(model("chat", "loaded", { since: 2 })));
});
