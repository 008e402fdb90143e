// @anthropic-ai/sdk from npm: messages, streams, tools, structured output, token counts, errors.

import assert from "node:assert/strict";
import { before, test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const { PIPELINE_URL: url, PIPELINE_MODEL: model } = process.env;
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "What is the capital of Greece?" }];
const ask = { model, messages, temperature: 0, max_tokens: 16 };

const visit = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Athens", "Cairo", "Oslo"] },
    num_nights: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["city", "num_nights"],
  additionalProperties: false,
};
const tools = [{ name: "plan_visit", description: "Plan one.", input_schema: visit }];
const forced = { ...ask, max_tokens: 60, tools, tool_choice: { type: "tool", name: "plan_visit" } };

function isVisit(value) {
  assert.deepEqual(Object.keys(value).sort(), ["city", "num_nights"]);
  assert.ok(visit.properties.city.enum.includes(value.city));
  assert.ok(Number.isInteger(value.num_nights) && value.num_nights >= 1 && value.num_nights <= 9);
}

before(() => client.messages.create(ask)); // from here on all find the same prefix

test("a message has its text, usage and request id", async () => {
  const message = await client.messages.create({ ...ask, system: [{ type: "text", text: "Be brief." }], metadata: { user_id: "u" } });
  assert.deepEqual([message.type, message.role, message.model], ["message", "assistant", model]);
  assert.deepEqual([message.stop_reason, message.stop_sequence], ["end_turn", null]);
  assert.match(message.content[0].text, /Athens/);
  assert.ok(message.usage.output_tokens > 1 && message.usage.output_tokens <= 16);
  assert.equal(message._request_id, message.id);
});

test("a stream says what the whole message says", async () => {
  const whole = await client.messages.create(ask);
  const types = [];
  let text = "";
  for await (const event of await client.messages.create({ ...ask, stream: true })) {
    types.push(event.type);
    if (event.type === "content_block_delta") text += event.delta.text;
  }
  assert.equal(text, whole.content[0].text);
  assert.deepEqual(types.slice(0, 2), ["message_start", "content_block_start"]);
  assert.deepEqual(types.slice(-3), ["content_block_stop", "message_delta", "message_stop"]);
  assert.ok(types.filter((type) => type === "content_block_delta").length > 3);
});

test("the stream's own reader has the message at its end", async () => {
  const whole = await client.messages.create(ask);
  const pieces = [];
  const stream = client.messages.stream(ask).on("text", (delta) => pieces.push(delta));
  const final = await stream.finalMessage();
  assert.ok(pieces.length > 3);
  assert.deepEqual([pieces.join(""), await stream.finalText()], [whole.content[0].text, whole.content[0].text]);
  assert.deepEqual([final.stop_reason, final.usage.output_tokens], ["end_turn", whole.usage.output_tokens]);
});

test("a stream can be aborted", async () => {
  const stream = client.messages.stream({ ...ask, messages: [{ role: "user", content: "Count to a thousand." }], max_tokens: 4000 });
  stream.once("text", () => stream.abort());
  await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
});

test("a stop sequence ends the text before it", async () => {
  const message = await client.messages.create({ ...ask, stop_sequences: [" Athens"] });
  assert.deepEqual([message.stop_reason, message.stop_sequence], ["stop_sequence", " Athens"]);
  assert.ok(!message.content[0].text.includes("Athens"));
});

test("a forced tool call matches its schema, whole and streamed, and its result is accepted", async () => {
  const message = await client.messages.create(forced);
  const [call] = message.content;
  assert.deepEqual([call.type, call.name, message.stop_reason], ["tool_use", "plan_visit", "tool_use"]);
  isVisit(call.input);

  const pieces = [];
  const stream = client.messages.stream(forced).on("inputJson", (delta) => pieces.push(delta));
  const [streamed] = (await stream.finalMessage()).content;
  assert.deepEqual([streamed.input, JSON.parse(pieces.join(""))], [call.input, call.input]);

  const result = { type: "tool_result", tool_use_id: call.id, content: [{ type: "text", text: "Booked." }] };
  const more = [...messages, { role: "assistant", content: message.content }, { role: "user", content: [result] }];
  const answer = await client.messages.create({ ...ask, messages: more, tools, tool_choice: { type: "none" } });
  assert.equal(answer.content[0].type, "text");
});

test("the tool runner runs a function with the input that the model gives", async () => {
  let given;
  const runnable = { ...tools[0], parse: (value) => value, run: (input) => ((given = input), "Booked.") };
  const runner = client.beta.messages.toolRunner({ ...forced, tools: [runnable], max_iterations: 2 });
  await runner.runUntilDone();
  isVisit(given);
});

test("the text matches an output format", async () => {
  const output_config = { format: { type: "json_schema", schema: visit } };
  const message = await client.messages.create({ ...ask, max_tokens: 60, output_config });
  isVisit(JSON.parse(message.content[0].text));
});

test("countTokens returns the number of input tokens of the message", async () => {
  for (const more of [{}, { system: "Be brief." }]) {
    const { usage } = await client.messages.create({ ...ask, ...more });
    const { input_tokens } = await client.messages.countTokens({ model, messages, ...more });
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  }
});

test("errors have the class of their status and the message", async () => {
  const cases = [
    [Anthropic.NotFoundError, "not_found_error", /'another' does not exist/, { model: "another" }],
    [Anthropic.BadRequestError, "invalid_request_error", /'temperature' must be/, { temperature: 9 }],
    [Anthropic.BadRequestError, "invalid_request_error", /exceed context limit: 37 \+ 20000 > 8192/, { max_tokens: 20_000 }],
  ];
  for (const [kind, type, words, fields] of cases) {
    for (const stream of [false, true]) {
      await assert.rejects(client.messages.create({ ...ask, ...fields, stream }), (error) => {
        assert.ok(error instanceof kind, error);
        assert.deepEqual([error.error.type, error.error.error.type, error.type], ["error", type, type]);
        assert.match(error.error.error.message, words);
        return true;
      });
    }
  }
  await assert.rejects(client.models.retrieve("another"), Anthropic.NotFoundError);
});
