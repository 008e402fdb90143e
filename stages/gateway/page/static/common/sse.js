/**
 * Server-sent events, as far as chat streams use them: the `data` of each event.
 * @module
 */

export class EventParser {
  #rest = "";

  /**
   * @param {string} text the next part of the stream, cut anywhere
   * @returns {string[]} the data of each event that is complete now
   */
  push(text) {
    const events = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = events.pop() ?? "";
    return events.map(dataOf).filter((data) => data !== "");
  }
}

/**
 * @param {string} event
 * @returns {string}
 */
function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(line.startsWith("data: ") ? 6 : 5)).join("\n");
}
