// ollama from npm: chats, streams, structured output, embeddings, the model's description, errors.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Ollama } from "ollama";

const { PIPELINE_URL: url, PIPELINE_MODEL: model } = process.env;
const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "What is the capital of Greece?" }];
const ask = { model, messages, options: { temperature: 0, num_predict: 40 } };

test("the model is listed under the name that chats accept", async () => {
  const { models } = await client.list();
  assert.deepEqual(models.map((one) => one.model), [`${model}:latest`]);
  assert.deepEqual((await client.ps()).models.map((one) => one.digest), [models[0].digest]);
  const shown = await client.show({ model: models[0].model });
  assert.deepEqual([shown.details.family, shown.capabilities], ["llama", ["completion", "tools"]]);
  assert.ok((await client.chat({ ...ask, model: models[0].model })).done);
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
});

test("a chat is the same whole and streamed, with figures at the end", async () => {
  const whole = await client.chat(ask);
  assert.match(whole.message.content, /Athens/);
  assert.equal(whole.done_reason, "stop");
  let text = "";
  let last;
  for await (const part of await client.chat({ ...ask, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, whole.message.content);
  assert.deepEqual([last.done, last.prompt_eval_count, last.eval_count], [true, whole.prompt_eval_count, whole.eval_count]);
  assert.ok(last.total_duration >= last.eval_duration && last.eval_duration > 0);
});

test("generate renders the template, unless the prompt is raw", async () => {
  const text = await client.generate({ model, prompt: messages[0].content, options: ask.options });
  assert.equal(text.response, (await client.chat(ask)).message.content);
  const raw = await client.generate({ model, prompt: "One, two, three,", raw: true, options: { temperature: 0, num_predict: 3 } });
  assert.deepEqual([raw.eval_count, raw.done_reason], [3, "length"]);
});

test("content is as the schema says", async () => {
  const format = { type: "object", properties: { city: { enum: ["Athens", "Oslo"] } }, required: ["city"] };
  const { message } = await client.chat({ ...ask, format });
  assert.ok(["Athens", "Oslo"].includes(JSON.parse(message.content).city));
});

test("vectors of several inputs", async () => {
  const { embeddings } = await client.embed({ model, input: ["The sea is calm.", "Tax returns are due."] });
  assert.equal(embeddings.length, 2);
  for (const one of embeddings) assert.ok(Math.abs(Math.hypot(...one) - 1) < 1e-3);
});

test("a stream can be aborted", async () => {
  const stream = await client.chat({ ...ask, options: { temperature: 0, num_predict: 4000 }, stream: true });
  await assert.rejects(async () => {
    for await (const _ of stream) stream.abort();
  }, { name: "AbortError" });
});

test("errors have the status and the message", async () => {
  const tool = { type: "function", function: { name: "f", parameters: { type: "object" } } };
  const cases = [
    [404, /model 'other' not found/, { model: "other" }],
    [400, /'options.temperature' must be a number/, { options: { temperature: 9 } }],
    [400, /tools\[1\]\.function\.name/, { tools: [tool, tool] }],
    [400, /does not support thinking/, { think: true }],
  ];
  for (const [status, words, fields] of cases) {
    for (const stream of [false, true]) {
      await assert.rejects(client.chat({ ...ask, ...fields, stream }), (error) => {
        assert.equal(error.status_code, status);
        assert.match(error.message, words);
        return true;
      });
    }
  }
});
