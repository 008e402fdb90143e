// What a stream has received of its sequences: where a repeated request continues, and which of its output is new.

import { ConnectionLost } from "./errors.mjs";

export class Received {
  #numTop;
  #isBestOf;

  /** `given` are the ids of each sequence that the caller has from another stream. */
  constructor({ n, best_of, logprobs, logprob_token_ids }, given) {
    const num = n ?? 1;
    this.#numTop = logprob_token_ids?.length || (logprobs ?? null);
    this.#isBestOf = (best_of ?? num) > num;
    // `numChars` counts code points; null if the caller has the text from another stream.
    this.sequences = Array.from({ length: num }, (_, index) => {
      const ids = Array.from(given[index] ?? []);
      return { ids, numChars: ids.length ? null : 0, finishReason: null };
    });
  }

  get numIds() {
    return this.sequences.reduce((sum, one) => sum + one.ids.length, 0);
  }

  /** Whether only `finished` is missing. */
  get hasAllEnds() {
    return this.sequences.every((one) => one.finishReason !== null);
  }

  get isAborted() {
    return this.sequences.some((one) => one.finishReason === "abort");
  }

  /** `received` of the repeated request. With `best_of`, the server sends all or nothing. With `lacksPrompt`, the log
   * probabilities of the prompt are computed again, together with the first sequence: unless that is complete. */
  onTheWire(lacksPrompt) {
    if (this.#isBestOf) return [];
    const each = this.sequences.map((one) => one.ids);
    if (lacksPrompt && this.sequences[0].finishReason !== null) each[0] = [];
    return each.some((ids) => ids.length) ? each : [];
  }

  /** The part of a delta's outputs that is new. Throws ConnectionLost if something between is missing. */
  new(outputs) {
    return outputs.map((output) => this.#newOutput(output)).filter((output) => output !== null);
  }

  #newOutput(output) {
    const have = this.sequences[output.index];
    if (have === undefined) throw new ConnectionLost(`the server sent output of sequence ${output.index}`);
    if (have.finishReason !== null) return null;
    const numChars = have.numChars ?? output.text_offset;
    const [oldIds, oldChars] = [have.ids.length - output.token_offset, numChars - output.text_offset];
    if (oldIds < 0 || oldChars < 0) {
      const where = `sequence ${output.index}: ${have.ids.length} ids and ${numChars} characters were received`;
      const next = `the server went on after ${output.token_offset} ids and ${output.text_offset} characters`;
      throw new ConnectionLost(`the request can't be continued: of ${where}, and ${next}`);
    }
    if (oldIds || oldChars) output = this.#without(output, oldIds, oldChars);
    for (const id of output.token_ids) have.ids.push(id);
    have.numChars = numChars + [...output.text].length;
    have.finishReason = output.finish_reason;
    return output.text || output.token_ids.length || output.finish_reason ? output : null;
  }

  #without(output, numIds, numChars) {
    const k = this.#numTop;
    return {
      ...output,
      text: [...output.text].slice(numChars).join(""),
      token_ids: output.token_ids.subarray(numIds),
      text_offset: output.text_offset + numChars,
      token_offset: output.token_offset + numIds,
      records: k === null ? output.records : output.records.subarray(numIds * (4 + 8 * k)),
      pieces: k === null ? output.pieces : output.pieces.slice(numIds * (1 + k)),
    };
  }

  /** Outputs that end the open sequences with "abort". */
  aborted() {
    const none = { text: "", token_ids: new Int32Array(0), stop_reason: null, records: new Uint8Array(0), pieces: [] };
    return this.sequences.flatMap((one, index) => {
      if (one.finishReason !== null) return [];
      const offsets = { text_offset: one.numChars ?? 0, token_offset: one.ids.length };
      return [{ ...none, ...offsets, index, finish_reason: "abort" }];
    });
  }
}
