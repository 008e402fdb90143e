// openai from npm: chats, streams, tools, structured output, embeddings, errors.

import assert from "node:assert/strict";
import { before, test } from "node:test";
import OpenAI from "openai";

const { PIPELINE_URL: url, PIPELINE_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What is the capital of Greece?" }];
const ask = { model, messages, temperature: 0, max_tokens: 60 };

const visit = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Athens", "Cairo", "Oslo"] },
    num_nights: { type: "integer", minimum: 1, maximum: 9 },
    by_train: { type: "boolean" },
  },
  required: ["city", "num_nights", "by_train"],
  additionalProperties: false,
};
const tools = [
  { type: "function", function: { name: "plan_visit", description: "Plan one.", parameters: visit, strict: true } },
  { type: "function", function: { name: "list_visits", parameters: { type: "object", properties: {}, additionalProperties: false } } },
];
const named = { type: "function", function: { name: "plan_visit" } };

function isVisit(value) {
  assert.deepEqual(Object.keys(value).sort(), ["by_train", "city", "num_nights"]);
  assert.ok(visit.properties.city.enum.includes(value.city));
  assert.ok(Number.isInteger(value.num_nights) && value.num_nights >= 1 && value.num_nights <= 9);
  assert.equal(typeof value.by_train, "boolean");
}

before(() => client.chat.completions.create(ask)); // from here on all find the same prefix

test("the model is listed", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("a stream says what the whole reply says", async () => {
  const whole = await client.chat.completions.create(ask);
  assert.match(whole.choices[0].message.content, /Athens/);
  assert.equal(whole.choices[0].finish_reason, "stop");
  let text = "";
  let last;
  let num = 0;
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
    num += 1;
  }
  assert.ok(num > 3);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
});

test("the stream's own reader has the reply at its end", async () => {
  const runner = client.chat.completions.stream(ask);
  const pieces = [];
  runner.on("content", (delta) => pieces.push(delta));
  const final = await runner.finalChatCompletion();
  assert.ok(pieces.length > 3);
  assert.equal(pieces.join(""), final.choices[0].message.content);
  assert.equal(final.choices[0].message.role, "assistant");
});

test("a stream that is left ends the call", async () => {
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 4000, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("each of n choices ends at a stop string", async () => {
  const reply = await client.completions.create({ model, prompt: "One, two, three, four,", temperature: 0, max_tokens: 40, n: 2, stop: [" seven"] });
  assert.deepEqual(reply.choices.map((one) => [one.index, one.text, one.finish_reason]), [0, 1].map((i) => [i, " five, six,", "stop"]));
});

test("log probabilities have the bytes of the text", async () => {
  const reply = await client.chat.completions.create({ ...ask, max_tokens: 6, logprobs: true, top_logprobs: 3 });
  const { content } = reply.choices[0].logprobs;
  assert.equal(content.length, 6);
  assert.equal(Buffer.from(content.flatMap((one) => one.bytes)).toString(), reply.choices[0].message.content);
  for (const one of content) {
    assert.equal(one.top_logprobs.length, 3);
    assert.ok(one.top_logprobs.every((other, i, all) => i === 0 || other.logprob <= all[i - 1].logprob));
  }
});

test("a tool by its name is called as its schema says, whole and streamed", async () => {
  const call = { ...ask, tools: [tools[0]], tool_choice: named };
  const whole = await client.chat.completions.parse(call);
  const [one] = whole.choices[0].message.tool_calls;
  assert.equal(one.function.name, "plan_visit");
  isVisit(one.function.parsed_arguments);

  const runner = client.chat.completions.stream(call);
  let num = 0;
  let done;
  runner.on("tool_calls.function.arguments.delta", () => (num += 1));
  runner.on("tool_calls.function.arguments.done", (event) => (done = event));
  const final = await runner.finalChatCompletion();
  assert.ok(num > 1, "arguments come as they are written");
  assert.equal(done.name, "plan_visit");
  assert.deepEqual(final.choices[0].message.tool_calls[0].function.parsed_arguments, JSON.parse(done.arguments));
  isVisit(JSON.parse(done.arguments));
});

test("a call that is required begins with its id and name, and goes on with arguments alone", async () => {
  const deltas = [];
  let finish = null;
  for await (const chunk of await client.chat.completions.create({ ...ask, tools, tool_choice: "required", parallel_tool_calls: false, stream: true })) {
    deltas.push(...(chunk.choices[0].delta.tool_calls ?? []));
    finish = chunk.choices[0].finish_reason ?? finish;
  }
  const [first, ...rest] = deltas;
  assert.equal(finish, "tool_calls");
  assert.ok(first.id && first.type === "function" && tools.some((one) => one.function.name === first.function.name));
  assert.ok(rest.every((one) => one.index === 0 && one.id === undefined && one.function.name === undefined));
  JSON.parse(deltas.map((one) => one.function.arguments ?? "").join(""));
});

test("a function is run with the arguments that the model gives", async () => {
  let given;
  const plan = { ...tools[0].function, parse: JSON.parse, function: (args) => ((given = args), "done") };
  const runner = client.chat.completions.runTools({ ...ask, tools: [{ type: "function", function: plan }], tool_choice: named });
  await runner.done();
  isVisit(given);
});

test("content is as the schema says, parsed and streamed", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "visit", schema: visit, strict: true } };
  const whole = await client.chat.completions.create({ ...ask, response_format, temperature: 1, n: 2, seed: 3 });
  for (const choice of whole.choices) isVisit(JSON.parse(choice.message.content));
  const parsed = await client.chat.completions.parse({ ...ask, response_format, tools: undefined });
  isVisit(JSON.parse(parsed.choices[0].message.content));
  const streamed = await client.chat.completions.stream({ ...ask, response_format }).finalContent();
  isVisit(JSON.parse(streamed));
});

test("vectors are the same as numbers and as base64", async () => {
  const input = ["The sea is calm.", "Tax returns are due."];
  const packed = await client.embeddings.create({ model, input }); // base64 on the wire, which the client unpacks
  const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
  assert.deepEqual(packed.data.map((one) => one.index), [0, 1]);
  packed.data.forEach(({ embedding }, i) => {
    assert.equal(embedding.length, plain.data[i].embedding.length);
    embedding.forEach((number, j) => assert.ok(Math.abs(number - plain.data[i].embedding[j]) < 1e-3));
    assert.ok(Math.abs(Math.hypot(...embedding) - 1) < 1e-3);
  });
  const short = await client.embeddings.create({ model, input, dimensions: 8 });
  assert.deepEqual(short.data.map((one) => one.embedding.length), [8, 8]);
});

test("a response is the same whole and streamed, and continues a stored one", async () => {
  const request = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 16 };
  const whole = await client.responses.create(request);
  assert.equal(whole.status, "completed");
  const stream = client.responses.stream(request);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const last = await stream.finalResponse();
  assert.deepEqual([text, last.output_text], [whole.output_text, whole.output_text]);
  const next = await client.responses.create({ ...request, input: "And of Spain?", previous_response_id: whole.id });
  assert.equal(next.previous_response_id, whole.id);
  assert.ok(next.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
});

test("errors are of the classes of their status", async () => {
  const headers = { "X-Request-Id": "mine-1" };
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }, { headers }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.status, error.param, error.type], [400, "temperature", "invalid_request_error"]);
    assert.equal(error.requestID, "mine-1");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...ask, model: "another" }), OpenAI.NotFoundError);
  await assert.rejects(client.images.generate({ model, prompt: "Hi" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...ask, max_tokens: 4000, ignore_eos: true }, { timeout: 200 }), OpenAI.APIConnectionTimeoutError);
});
