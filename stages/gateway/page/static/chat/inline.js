/**
 * The text of a block of Markdown: emphasis, code, links. Pure.
 *
 * Each scan for the end of a mark that finds none is remembered, and those for the parts of a link are short, so no text
 * takes long, whatever is in it.
 * @module
 */

/**
 * @typedef {{type: "text", text: string}
 *   | {type: "code", text: string}
 *   | {type: "break"}
 *   | {type: "strong" | "em" | "del", children: Inline[]}
 *   | {type: "link", href: string, children: Inline[]}} Inline
 */

const MAX_DEPTH = 6;
const MAX_LINK_TEXT = 500;
const MAX_URL = 2000;
const MARKS = /** @type {const} */ ([
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
]);
const SPECIAL = /[\\`*_~[<\nh]/g;
const WORD = /[\p{L}\p{N}]/u;
/** Of one that is too long, so much that this is seen. */
const URL_START = new RegExp(`https?://[^\\s<>"'\`]{1,${MAX_URL}}`, "y");
const BEHIND_URL = ".,:;!?)]*_~";

/**
 * @param {string} text
 * @param {number} [depth]
 * @returns {Inline[]}
 */
export function inline(text, depth = 0) {
  /** @type {Inline[]} */
  const found = [];
  /** Marks that have no end after here. @type {Set<string>} */
  const unclosed = new Set();
  let plain = "";
  let at = 0;
  const push = (/** @type {Inline} */ node) => {
    if (plain) found.push({ type: "text", text: plain });
    plain = "";
    found.push(node);
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const [node, end] = inlineAt(text, at, depth, unclosed);
    if (typeof node === "string") plain += node;
    else push(node);
    at = end;
  }
  if (plain) found.push({ type: "text", text: plain });
  return found;
}

/**
 * @param {string} text
 * @param {number} at a special character
 * @param {number} depth
 * @param {Set<string>} unclosed
 * @returns {[Inline | string, number]} a node or plain text, and where it ends
 */
function inlineAt(text, at, depth, unclosed) {
  const char = text[at];
  if (char === "\\") {
    const next = text[at + 1] ?? "";
    return /[!-/:-@[-`{-~]/.test(next) ? [next, at + 2] : ["\\", at + 1];
  }
  if (char === "\n") return [{ type: "break" }, at + 1];
  if (char === "h" || char === "<") return urlAt(text, at);
  if (char === "`") return codeAt(text, at, unclosed);
  if (char === "[") return depth < MAX_DEPTH ? linkAt(text, at, depth) : [char, at + 1];
  for (const [mark, type] of MARKS) {
    if (depth >= MAX_DEPTH || !text.startsWith(mark, at) || unclosed.has(mark)) continue;
    const begin = at + mark.length;
    if (/\s/.test(text[begin] ?? " ")) continue;
    if (mark[0] === "_" && WORD.test(text[at - 1] ?? "")) continue; // snake_case
    const end = closing(text, begin, mark);
    if (end < 0) {
      unclosed.add(mark);
      continue;
    }
    return [{ type, children: inline(text.slice(begin, end), depth + 1) }, end + mark.length];
  }
  return [char, at + 1];
}

/**
 * @param {string} text
 * @param {number} begin
 * @param {string} mark
 * @returns {number} where the end of a mark's text is; -1 if nowhere
 */
function closing(text, begin, mark) {
  for (let end = text.indexOf(mark, begin + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    if (mark[0] === "_" && WORD.test(text[end + mark.length] ?? "")) continue;
    if (mark.length === 1 && text[end + 1] === mark) {
      end += 1; // two of them belong to another mark
      continue;
    }
    return mark.length === 2 && text[end + 2] === mark[0] ? end + 1 : end;
  }
  return -1;
}

/**
 * @param {string} text
 * @param {number} at
 * @param {Set<string>} unclosed
 * @returns {[Inline | string, number]}
 */
function codeAt(text, at, unclosed) {
  let begin = at;
  while (text[begin] === "`") begin += 1;
  const mark = text.slice(at, begin);
  if (unclosed.has(mark)) return [mark, begin];
  for (let end = text.indexOf(mark, begin); end >= 0; end = text.indexOf(mark, end + 1)) {
    let after = end;
    while (text[after] === "`") after += 1;
    if (after - end === mark.length) {
      const code = text.slice(begin, end).replaceAll("\n", " ");
      const isPadded = /^ .* $/.test(code) && code.trim() !== "";
      return [{ type: "code", text: isPadded ? code.slice(1, -1) : code }, after];
    }
    end = after;
  }
  unclosed.add(mark);
  return [mark, begin];
}

/**
 * @param {string} text
 * @param {number} at
 * @param {number} depth
 * @returns {[Inline | string, number]}
 */
function linkAt(text, at, depth) {
  const middle = text.slice(at, at + MAX_LINK_TEXT + 2).indexOf("](") + at;
  if (middle < at) return ["[", at + 1];
  const end = text.slice(middle, middle + MAX_URL + 1).indexOf(")") + middle;
  const words = text.slice(at + 1, middle);
  if (end < middle || words.includes("[")) return ["[", at + 1];
  const target = text.slice(middle + 2, end).trim();
  const href = safeUrl(target.split(/\s/, 1)[0]);
  if (href === null || !/^\S+(\s+"[^"]*")?$/.test(target)) return ["[", at + 1];
  return [{ type: "link", href, children: inline(words, MAX_DEPTH) }, end + 1];
}

/**
 * @param {string} text
 * @param {number} at
 * @returns {[Inline | string, number]}
 */
function urlAt(text, at) {
  const begin = text[at] === "<" ? at + 1 : at;
  URL_START.lastIndex = begin;
  const match = WORD.test(text[at - 1] ?? "") ? null : URL_START.exec(text);
  if (!match || match[0].length > MAX_URL) return [text[at], at + 1];
  const isMarked = begin > at && text[begin + match[0].length] === ">";
  let length = match[0].length;
  while (!isMarked && BEHIND_URL.includes(match[0][length - 1])) length -= 1;
  const address = match[0].slice(0, length);
  const href = safeUrl(address);
  if (href === null || (begin > at && !isMarked)) return [text[at], at + 1];
  return [{ type: "link", href, children: [{ type: "text", text: address }] }, begin + length + (isMarked ? 1 : 0)];
}

/**
 * @param {string} address
 * @returns {string | null} null unless it is an absolute address of the web
 */
export function safeUrl(address) {
  if (!/^https?:\/\//i.test(address)) return null;
  try {
    const url = new URL(address);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}
