import assert from "node:assert/strict";
import { test } from "node:test";

import { kindsOf, taken } from "../page/chat/attachments.js";
import { within } from "../page/chat/photos.js";

test("of pasted and dropped files, those of the kinds that the model takes remain", () => {
  const files = ["image/png", "text/plain", "audio/wav", ""].map((type) => ({ type }));
  const found = (capabilities) => taken(files, kindsOf(capabilities)).map(({ kind, file }) => [kind, file.type]);
  assert.deepEqual(found(["completion", "vision"]), [["image", "image/png"]]);
  assert.deepEqual(found(["vision", "audio"]), [["image", "image/png"], ["audio", "audio/wav"]]);
  assert.deepEqual(found(["completion"]), []);
});

test("a photo becomes smaller in its own proportions", () => {
  assert.deepEqual(within(4000, 3000, 2048), [2048, 1536]);
  assert.deepEqual(within(3000, 4000, 2048), [1536, 2048]);
  assert.deepEqual(within(90, 60, 2048), [90, 60]);
  assert.deepEqual(within(100000, 1, 2048), [2048, 1]);
});
