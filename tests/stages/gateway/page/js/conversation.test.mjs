// Conversations, requests, settings and the stream that a reply comes in.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Attachments, kindsOf } from "../page/chat/attachments.js";
import {
  apply,
  before,
  edited,
  requestMessages,
  restored,
  stored,
  tokensPerSecond,
} from "../page/chat/conversation.js";
import { CONTROLS, isLimitTooHigh, read, readAll, startValues, withinContext } from "../page/chat/sampling.js";
import { surprise, visible } from "../page/chat/token_view.js";
import { ApiError, errorOf } from "../page/common/api.js";
import { EventParser } from "../page/common/sse.js";

const user = (text, more = {}) => ({ role: "user", text, ...more });
const reply = (text, more = {}) => ({ role: "assistant", text, ...more });

test("events are read however the stream is cut", () => {
  const stream = 'data: {"a":1}\n\ndata: {"b":"x\\n"}\r\n\r\n: comment\n\ndata: one\ndata: two\n\ndata: [DONE]\n\n';
  const expected = ['{"a":1}', '{"b":"x\\n"}', "one\ntwo", "[DONE]"];
  for (let cut = 0; cut <= stream.length; cut += 1) {
    const parser = new EventParser();
    assert.deepEqual([...parser.push(stream.slice(0, cut)), ...parser.push(stream.slice(cut))], expected, `${cut}`);
  }
});

test("a stream's chunks make a reply", () => {
  const message = reply("");
  const logprobs = {
    content: [{ token: "Hi", logprob: -0.123456, bytes: [72], top_logprobs: [{ token: "Hi", logprob: -0.123456 }] }],
  };
  apply(message, { id: "chatcmpl-1", choices: [{ delta: { role: "assistant", content: "" }, finish_reason: null }] });
  assert.equal(message.id, "chatcmpl-1");
  apply(message, { choices: [{ delta: { reasoning_content: "Hm" } }] });
  apply(message, { choices: [{ delta: { content: "Hi" }, logprobs }] });
  apply(message, { choices: [{ delta: {}, finish_reason: "stop" }] });
  const hops = { prefill: { ms: 2, share: 0.2 }, decode: { ms: 8, share: 0.8 } };
  const choice = {
    request_id: "1f",
    prompt_tokens: 5,
    cached_tokens: 4,
    output_tokens: 5,
    time_to_first_token_ms: 3,
    hops,
  };
  apply(message, { id: "chatcmpl-1", choices: [], timings: { total_ms: 10, choices: [choice] } });
  assert.deepEqual(message, {
    role: "assistant",
    text: "Hi",
    reasoning: "Hm",
    tokens: [{ token: "Hi", logprob: -0.1235, top: [{ token: "Hi", logprob: -0.1235 }] }],
    finish: "stop",
    timings: {
      id: "1f",
      promptTokens: 5,
      cachedTokens: 4,
      outputTokens: 5,
      totalMs: 10,
      firstMs: 3,
      hopsMs: { prefill: 2, decode: 8 },
    },
  });
  assert.equal(tokensPerSecond(message.timings), 500);
  assert.equal(tokensPerSecond({ ...message.timings, outputTokens: 1 }), null);
});

test("a request has the system prompt, and no failed or empty reply", () => {
  const messages = [user("a"), reply("", { failure: {} }), user("b"), reply("c"), user("d")];
  assert.deepEqual(requestMessages(messages, " "), [
    { role: "user", content: "a" },
    { role: "user", content: "b" },
    { role: "assistant", content: "c" },
    { role: "user", content: "d" },
  ]);
  assert.deepEqual(requestMessages([user("a")], "Be brief.")[0], { role: "system", content: "Be brief." });
});

test("files are parts of a message, as in OpenAI's API", () => {
  const attachments = [
    { kind: "image", name: "a.png", url: "data:image/png;base64,AA==" },
    { kind: "audio", name: "b.WAV", url: "data:audio/wav;base64,BB==" },
    { kind: "image", name: "forgotten.png" },
  ];
  assert.deepEqual(requestMessages([user("what?", { attachments })], ""), [
    {
      role: "user",
      content: [
        { type: "image_url", image_url: { url: "data:image/png;base64,AA==" } },
        { type: "input_audio", input_audio: { data: "BB==", format: "wav" } },
        { type: "text", text: "what?" },
      ],
    },
  ]);
});

test("an edit drops what followed, and leaves the original alone", () => {
  const messages = [user("a"), reply("b"), user("c"), reply("d")];
  assert.deepEqual(edited(messages, 2, "e"), [user("a"), reply("b"), user("e")]);
  assert.deepEqual(before(messages, 1), [user("a")]);
  assert.equal(messages.length, 4);
});

test("a stored conversation has no files, and only the newest tokens", () => {
  const tokens = [{ token: "x", logprob: 0, top: [] }];
  const messages = [
    user("a", { attachments: [{ kind: "image", name: "n", url: "data:," }] }),
    reply("b", { tokens }),
    reply("c", { tokens }),
  ];
  assert.deepEqual(stored(messages, 1), [
    user("a", { attachments: [{ kind: "image", name: "n" }] }),
    reply("b"),
    reply("c", { tokens }),
  ]);
  assert.deepEqual(restored(JSON.parse(JSON.stringify(stored(messages, 9)))).length, 3);
  for (const wrong of [null, {}, "x", [1], [{ role: "user" }], [{ role: "tool", text: "" }]])
    assert.deepEqual(restored(wrong), []);
});

test("controls are read within their limits", () => {
  const control = (name) => CONTROLS.find((one) => one.name === name);
  assert.deepEqual(readAll({ temperature: " 0.5 ", top_k: "", max_tokens: "7", seed: "-3" }), {
    fields: { temperature: 0.5, max_tokens: 7, seed: -3 },
    problems: {},
  });
  assert.deepEqual(Object.keys(readAll({ temperature: "3", top_k: "1.5", min_p: "x" }).problems), [
    "temperature",
    "min_p",
    "top_k",
  ]);
  assert.equal(read(control("temperature"), "2.1").problem, "Temperature must be a number from 0 to 2.");
  assert.equal(read(control("top_p"), "0").problem, "Top p must be a number from 0.01 to 1.");
  assert.equal(read(control("max_tokens"), "0").problem, "Max tokens must be a whole number from 1.");
  assert.equal(read(control("seed"), "1e99").problem, "Seed must be a whole number.");
});

test("white space of tokens is seen, and unlikely tokens are marked", () => {
  assert.deepEqual(["\n", " a", "a\n\n", "", "b"].map(visible), ["⏎", "·a", "a⏎⏎", "∅", "b"]);
  assert.deepEqual([0, -0.2, -0.7, -2, -5].map(surprise), [0, 1, 2, 3, 4]);
});

test("errors keep what the server says", () => {
  const body = JSON.stringify({
    error: { message: "'temperature' must be <= 2", type: "x", param: "temperature", code: "invalid_value" },
  });
  const error = errorOf(400, body);
  assert.ok(error instanceof ApiError);
  assert.deepEqual(
    [error.status, error.message, error.param, error.code],
    [400, "'temperature' must be <= 2", "temperature", "invalid_value"],
  );
  assert.equal(errorOf(503, body, "7").retryAfterS, 7);
  assert.equal(errorOf(502, "").message, "The server answered 502.");
  assert.equal(errorOf(502, "<html>").message, "<html>");
});

test("only the kinds of files that the model takes have a button", () => {
  const kinds = (...capabilities) => kindsOf(capabilities).map(({ kind }) => kind);
  assert.deepEqual(kinds("completion", "tools"), []);
  assert.deepEqual(kinds("completion", "vision"), ["image"]);
  assert.deepEqual(kinds("audio", "vision"), ["image", "audio"]);
});

test("a new page samples as chats do, unless the model recommends something else", () => {
  assert.deepEqual(startValues({}), { temperature: "0.7", top_p: "0.95" });
  assert.deepEqual(startValues({ temperature: 0.2, top_k: 40 }), { top_p: "0.95" });
  for (const [name, text] of Object.entries(startValues({}))) {
    const control = CONTROLS.find((one) => one.name === name);
    assert.equal(read(control, text).problem, undefined, name);
  }
});

test("a model that takes no files has no button for them", () => {
  const element = () => {
    const made = { attributes: {}, children: [], addEventListener() {} };
    made.setAttribute = (name, value) => (made.attributes[name] = value);
    made.append = made.replaceChildren = (...children) => (made.children = children);
    return made;
  };
  globalThis.document = { createElement: element };
  const attachments = new Attachments(() => "tiny");
  attachments.setCapabilities(["completion"]);
  assert.deepEqual(attachments.buttons.children, []);
  attachments.setCapabilities(["vision"]);
  assert.equal(attachments.buttons.children.length, 1);
  assert.equal(attachments.buttons.children[0].children[0].attributes.disabled, undefined);
  delete globalThis.document;
});

test("no more tokens are asked for than the context has", () => {
  assert.deepEqual(startValues({}).max_tokens, undefined);
  assert.deepEqual(withinContext({ seed: 1, max_tokens: 1024 }, 256), { seed: 1 });
  assert.deepEqual(withinContext({ seed: 1, max_tokens: 255 }, 256), { seed: 1, max_tokens: 255 });
  assert.deepEqual(withinContext({ max_tokens: 1024 }, 0), { max_tokens: 1024 });
  assert.deepEqual(withinContext({ seed: 1 }, 256), { seed: 1 });
});

test("a limit that a long chat leaves no room for is left out", () => {
  const error = { status: 400, param: "max_tokens", code: "context_length_exceeded" };
  assert.equal(isLimitTooHigh(error, { max_tokens: 100 }), true);
  assert.equal(isLimitTooHigh(error, {}), false);
  assert.equal(isLimitTooHigh({ ...error, param: "messages" }, { max_tokens: 100 }), false);
  assert.equal(isLimitTooHigh({ ...error, status: 503 }, { max_tokens: 100 }), false);
});
