import assert from "node:assert/strict";
import { test } from "node:test";

import { chosen, isLoaded, label, modelsOf, stateOf, stateWords, waitingWords } from "../page/model_choice.js";

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

test("the table says what a model waits for and how long it has", () => {
  assert.equal(waitingWords(CHAT, 100), "–");
  assert.equal(waitingWords(WAITS, 100), "place 2, after chat, vectors, for 0\u00a0s");
  const sleeps = model("coder", "sleeping", { position: 1, waits_since: 35.5 });
  assert.equal(waitingWords(sleeps, 100), "place 1, for 1\u00a0min 4\u00a0s");
  assert.equal(waitingWords(sleeps, 30), "place 1, for 0\u00a0s", "the reader's clock is late");
  assert.deepEqual([WAITS, sleeps, model("a", "loaded", { pinned: true }), { id: "b" }].map(stateWords), [
    "unloaded",
    "sleeping",
    "loaded, pinned",
    "loaded",
  ]);
});
