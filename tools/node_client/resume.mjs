// Requests of several kinds at once, over connections that may end: node resume.mjs ADDRESS [API_KEY].
//
// Prints the line "moment" when 60 outputs have come, which is the moment to kill the server or a gateway, and at the end
// as JSON what was received and how often streams were sent again.

import { Client } from "./pipeline-client.mjs";

const MOMENT = 60;
const STORY = "Once upon a time, in a village by the sea, there lived a fisherman who";
const QUESTION = [{ role: "user", content: "Name three colours, with an emoji each." }];
const TOOL = { type: "function", function: { name: "look", parameters: { type: "object", properties: {} } } };
const CALL = { messages: QUESTION, tools: [TOOL], tool_choice: "required" };
const sampled = { temperature: 1, seed: 7, max_tokens: 32, ignore_eos: true };
const requests = {
  greedy: [STORY, { ...sampled, temperature: 0 }],
  unseeded: [STORY, { ...sampled, seed: null }],
  chat: [QUESTION, { ...sampled, temperature: 1.4 }],
  "n = 3": [STORY, { ...sampled, n: 3 }],
  logprobs: [QUESTION, { ...sampled, logprobs: 3 }],
  prompt_logprobs: [STORY, { ...sampled, logprobs: 1, prompt_logprobs: 2 }],
  "tool call": [CALL, { ...sampled, ignore_eos: false }],
  best_of: [STORY, { ...sampled, best_of: 3 }],
  "stop string": [STORY, { ...sampled, temperature: 0, stop: ["fish", " sea ", " an"], min_tokens: 8 }],
};

const client = await Client.connect(process.argv[2], { apiKey: process.argv[3] ?? null });
let numOutputs = 0;
let numRepeats = 0;
const received = Object.fromEntries(
  await Promise.all(Object.entries(requests).map(async ([kind, [prompt, params]]) => [kind, await read(prompt, params)])),
);
console.log(JSON.stringify({ received, numRepeats }));
await client.close();

async function read(prompt, params) {
  const stream = client.generate(prompt, params, { timeoutS: 60 });
  const sequences = await all(stream, () => {
    numOutputs += 1;
    if (numOutputs === MOMENT) console.log("moment");
  });
  numRepeats += stream.numRepeats;
  if (params.seed !== null) return { sequences, prompt: stream.promptLogprobs?.map((one) => one && one.logprob) };
  // The server's seed gives the same output.
  const again = await all(client.generate(prompt, { ...params, seed: stream.seed }), () => {});
  return { same: JSON.stringify(again) === JSON.stringify(sequences) };
}

/** By sequence, everything that came. Nothing may be repeated or missing. */
async function all(stream, onOutput) {
  const sequences = {};
  for await (const { index, text, token_ids, text_offset, token_offset, finish_reason, logprobs } of stream) {
    onOutput();
    const one = (sequences[index] ??= { text: "", ids: [], logprobs: [], finish: null });
    if (text_offset !== [...one.text].length || token_offset !== one.ids.length) throw new Error("a gap, or a repetition");
    one.text += text;
    one.ids.push(...token_ids);
    one.logprobs.push(...(logprobs ?? []).map(({ logprob, top }) => [logprob, ...top.map(({ tokenId }) => tokenId)]));
    one.finish = finish_reason;
  }
  return sequences;
}
