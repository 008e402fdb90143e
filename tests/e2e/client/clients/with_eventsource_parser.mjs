// The bytes of a stream, parsed by eventsource-parser: which events they are, in which order, however they are cut.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createParser } from "eventsource-parser";
import { EventSourceParserStream } from "eventsource-parser/stream";

const { PIPELINE_URL: url, PIPELINE_MODEL: model } = process.env;

function post(path, body) {
  const headers = { "Content-Type": "application/json" }; // without it fetch declares a string as text/plain
  const content = JSON.stringify({ model, temperature: 0, stream: true, ...body });
  return fetch(`${url}${path}`, { method: "POST", headers, body: content });
}

/** The events of a whole stream, fed to the parser in pieces of so many bytes. */
function parsed(bytes, size) {
  const events = [];
  const parser = createParser({
    onEvent: (event) => events.push(event),
    onError: (error) => assert.fail(`${error.message}: ${error.line}`),
    onComment: (comment) => assert.fail(`a comment: ${comment}`),
    onRetry: (ms) => assert.fail(`retry: ${ms}`),
  });
  const decoder = new TextDecoder(); // a character may be cut, too
  for (let i = 0; i < bytes.length; i += size) parser.feed(decoder.decode(bytes.subarray(i, i + size), { stream: true }));
  return events;
}

test("a chat is events of data alone, the last of them [DONE]", async () => {
  const content = "Write a haiku about rain, with an emoji ☔.";
  const body = { messages: [{ role: "user", content }], max_tokens: 40, n: 2, stream_options: { include_usage: true } };
  const response = await post("/v1/chat/completions", body);
  assert.equal(response.status, 200);
  assert.match(response.headers.get("content-type"), /^text\/event-stream/);
  const bytes = new Uint8Array(await response.arrayBuffer());
  const events = parsed(bytes, bytes.length);
  for (const size of [1, 7]) assert.deepEqual(parsed(bytes, size), events);

  assert.ok(events.every((event) => event.event === undefined && event.id === undefined));
  assert.equal(events.at(-1).data, "[DONE]");
  const chunks = events.slice(0, -1).map((event) => JSON.parse(event.data));
  assert.equal(new Set(chunks.map((chunk) => chunk.id)).size, 1);
  assert.ok(chunks.every((chunk) => chunk.object === "chat.completion.chunk" && chunk.model === model));
  const usage = chunks.pop();
  assert.deepEqual(usage.choices, []);
  assert.ok(usage.usage.completion_tokens > 0);
  for (const index of [0, 1]) {
    const own = chunks.map((chunk) => chunk.choices[0]).filter((choice) => choice.index === index);
    assert.equal(own[0].delta.role, "assistant");
    assert.ok(own.slice(1).every((choice) => choice.delta.role === undefined));
    assert.deepEqual(own.map((choice) => choice.finish_reason !== null), own.map((_, i) => i === own.length - 1), "the last ends it");
    assert.ok(own.map((choice) => choice.delta.content ?? "").join("").length > 0);
  }
});

test("events come as they are written, through a stream of the platform's", async () => {
  const response = await post("/v1/completions", { prompt: "One, two, three, four,", max_tokens: 6 });
  const events = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream({ onError: "terminate" }));
  const texts = [];
  let isDone = false;
  for await (const { data } of events) {
    assert.ok(!isDone, "nothing comes after [DONE]");
    if (data === "[DONE]") isDone = true;
    else texts.push(JSON.parse(data).choices[0].text);
  }
  assert.ok(isDone && texts.length > 2);
  assert.match(texts.join(""), /^ five, six/);
});

test("text comes as it is, with characters of many bytes and the protocol's own line ends in it", async () => {
  const body = { prompt: "☔ 🌊\r\n\r\ndata: x\n\n", echo: true, max_tokens: 1 };
  const events = parsed(new Uint8Array(await (await post("/v1/completions", body)).arrayBuffer()), 1);
  const text = events.slice(0, -1).map(({ data }) => JSON.parse(data).choices[0].text).join("");
  assert.ok(text.startsWith(body.prompt));
});

test("what is wrong before a stream begins is no stream", async () => {
  const response = await post("/v1/chat/completions", { messages: [] });
  assert.equal(response.status, 400);
  assert.match(response.headers.get("content-type"), /^application\/json/);
  assert.equal((await response.json()).error.param, "messages");
});
