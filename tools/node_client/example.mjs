// Streams, aborts, resumes: node example.mjs ADDRESS. Prints what came as JSON, one line each.

import { Client, ConnectionLost, RequestError } from "./pipeline-client.mjs";

const QUESTION = [{ role: "user", content: "Name three colours, with an emoji each." }];
const client = await Client.connect(process.argv[2]);
say("info", client.info);

// A whole stream.
const params = { temperature: 0.9, top_p: 0.95, seed: 2n ** 64n - 59n, max_tokens: 24, ignore_eos: true };
const whole = client.generate(QUESTION, params);
const outputs = [];
for await (const output of whole) outputs.push(output);
const text = outputs.map((output) => output.text).join("");
const ids = outputs.flatMap((output) => Array.from(output.token_ids));
say("stream", { text, ids, seed: String(whole.seed), usage: whole.usage, finish: outputs.at(-1).finish_reason });

// The same, cut off in the middle and resumed with the ids received.
for (const cut of [1, 7, 13, 24]) {
  const again = { ...params, seed: whole.seed };
  let resumed = null;
  for await (const output of client.generate(whole.promptTokenIds, again, { received: [ids.slice(0, cut)] })) {
    // Offsets count code points; a JavaScript string is UTF-16.
    resumed ??= [...text].slice(0, output.text_offset).join("");
    resumed += output.text;
  }
  say("resumed", { cut, same: resumed === text });
}

// Several sequences at once, on one connection with another request.
const [two, other] = await Promise.all([
  collect(client.generate("One, two,", { n: 2, max_tokens: 8 })),
  collect(client.generate("Three, four,", { max_tokens: 8 })),
]);
say("n", { indexes: [...new Set(two.map((output) => output.index))].sort(), other: other.length > 0 });

// What the model's pooler makes.
const pooled = await client.pool("One, two,", { dimensions: 4, pooling: "mean" });
const refused = await client.pool({ prompt: "a", pair: "b" }, { task: "score" }).catch((error) => error);
say("pooled", { numbers: Array.from(pooled), tasks: client.info.tasks, refused: refused.code });

// A name of one's own, and where the time went.
const named = client.generate("One, two,", { max_tokens: 4, ignore_eos: true }, { name: "counting/1", timings: true });
await collect(named);
say("name", { id: named.id, tokens: named.timings.choices[0].output_tokens, without: whole.timings });

// Log probabilities of the output and of the prompt.
const asked = { temperature: 0, max_tokens: 4, ignore_eos: true, logprobs: 2, prompt_logprobs: 1 };
const told = client.generate("One, two,", asked);
const told_ids = [];
const told_logprobs = [];
for await (const output of told) {
  told_ids.push(...output.token_ids);
  told_logprobs.push(...output.logprobs);
}
const shown = ({ tokenId, logprob, piece }) => [tokenId, logprob, Buffer.from(piece).toString()];
say("logprobs", {
  ids: told_ids,
  output: told_logprobs.map(({ top, ...own }) => [shown(own), ...top.map(shown)]),
  prompt: told.promptLogprobs.map((one) => one && [shown(one), ...one.top.map(shown)]),
});

// An abort, and a loop that is left early.
const long = client.generate("Once upon a time", { max_tokens: 2000, ignore_eos: true });
let last = null;
for await (const output of long) {
  if (!last) long.abort();
  last = output;
}
say("abort", { finish: last.finish_reason });
for await (const _ of client.generate("Once upon a time", { max_tokens: 2000, ignore_eos: true })) break;

// Errors name the field.
try {
  await collect(client.generate("Hi", { temperature: 3 }));
} catch (error) {
  if (!(error instanceof RequestError)) throw error;
  say("error", { status: error.status, param: error.param });
}
try {
  client.generate("x".repeat(client.info.max_message_bytes));
} catch (error) {
  if (!(error instanceof RangeError)) throw error;
  const after = await collect(client.generate("Hi", { max_tokens: 1 }));
  say("too large", { why: error.message, served: after.length > 0 });
}
await client.close();
try {
  await Client.connect("ipc://@pipeline/absent/zmq", { timeoutMs: 100 });
} catch (error) {
  say("no server", { lost: error instanceof ConnectionLost });
}

async function collect(stream) {
  const outputs = [];
  for await (const output of stream) outputs.push(output);
  return outputs;
}

function say(what, value) {
  console.log(JSON.stringify([what, value]));
}
