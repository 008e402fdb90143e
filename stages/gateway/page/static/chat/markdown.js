/**
 * Markdown as models write it, parsed into a tree of plain objects: the blocks; inline.js parses what is in them. Pure;
 * markdown_view.js builds DOM nodes from the tree.
 *
 * Every text is valid, also half of one while it streams: an open code block reaches to the end.
 * @module
 */

import { inline } from "./inline.js";

/** @typedef {import("./inline.js").Inline} Inline */
/**
 * @typedef {{type: "paragraph", children: Inline[]}
 *   | {type: "heading", level: number, children: Inline[]}
 *   | {type: "fence", language: string, text: string}
 *   | {type: "list", ordered: boolean, start: number, items: Block[][]}
 *   | {type: "quote", children: Block[]}
 *   | {type: "table", head: Inline[][], align: string[], rows: Inline[][][]}
 *   | {type: "rule"}} Block
 * @typedef {{source: string, block: Block}} Part a block with the lines that it was made of
 */

const MAX_DEPTH = 6;
/** Of a table: browsers take minutes to lay out ten thousand. */
const MAX_COLUMNS = 256;
/** No two parts of a pattern that stand side by side take the same characters, so each is linear in its line. */
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const LANGUAGE = /^[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]([^]*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*(?:\|[ \t]*)?$/;

/**
 * @param {string} text
 * @returns {Part[]} its top-level blocks, so that a view redraws only those whose source has changed
 */
export function parse(text) {
  return blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

/**
 * @param {string[]} lines
 * @param {number} depth of nesting
 * @returns {Part[]}
 */
function blocks(lines, depth) {
  /** @type {Part[]} */
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    found.push({ source: lines.slice(at, end).join("\n"), block });
    at = end;
  }
  return found;
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {[Block, number]} the block that begins at a line, and the line after it
 */
function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenceAt(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const words = (heading[2] ?? "").trim().replace(/(^| )#+$/, "");
    return [{ type: "heading", level: heading[1].length, children: inline(words) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quoteAt(lines, at, depth);
    if (ITEM.test(line)) return listAt(lines, at, depth);
  }
  if (isTableAt(lines, at)) return tableAt(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  return [{ type: "paragraph", children: inline(lines.slice(at, end).join("\n").trim()) }, end];
}

/**
 * Whether a line ends the paragraph before it.
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 */
function interrupts(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTableAt(lines, at)) return true;
  return depth < MAX_DEPTH && (QUOTE.test(line) || ITEM.test(line));
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {RegExpExecArray} fence
 * @returns {[Block, number]}
 */
function fenceAt(lines, at, fence) {
  const [, mark, rest] = fence;
  const language = LANGUAGE.exec(rest)?.[1] ?? "";
  const indent = lines[at].length - lines[at].trimStart().length;
  let end = at + 1;
  const isClosing = (/** @type {string} */ line) => {
    const words = line.trim();
    return words.length >= mark.length && words === mark[0].repeat(words.length);
  };
  while (end < lines.length && !isClosing(lines[end])) end += 1;
  const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return [{ type: "fence", language: language.toLowerCase(), text: body.join("\n") }, Math.min(end + 1, lines.length)];
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {[Block, number]}
 */
function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", children: blocks(inner, depth + 1).map(({ block }) => block) }, end];
}

/**
 * @param {string[]} lines
 * @param {number} at
 * @param {number} depth
 * @returns {[Block, number]}
 */
function listAt(lines, at, depth) {
  const first = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
  const ordered = /\d/.test(first[2]);
  /** @type {Block[][]} */
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || /\d/.test(item[2]) !== ordered || item[1].length > first[1].length + 1 || RULE.test(lines[end])) break;
    const width = item[0].length;
    const body = [lines[end].slice(width)];
    end += 1;
    while (end < lines.length && belongs(lines, end, item[1].length)) {
      body.push(lines[end].slice(Math.min(width, indentOf(lines[end]))));
      end += 1;
    }
    items.push(blocks(body, depth + 1).map(({ block }) => block));
    while (end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) end += 1;
  }
  return [{ type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items }, end];
}

/**
 * Whether a line is part of the list item whose mark has an indent: it is indented more, or continues its paragraph.
 * @param {string[]} lines
 * @param {number} at
 * @param {number} indent
 */
function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) return indentOf(lines[at + 1] ?? "") > indent + 1 && Boolean((lines[at + 1] ?? "").trim());
  if (indentOf(line) > indent + 1) return true;
  return Boolean(lines[at - 1].trim()) && !interrupts(lines, at, 0);
}

/** @param {string} line */
const indentOf = (line) => line.length - line.trimStart().length;

/**
 * @param {string[]} lines
 * @param {number} at
 */
function isTableAt(lines, at) {
  const isRuled = lines[at].includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1]);
  return isRuled && cells(lines[at]).length <= MAX_COLUMNS;
}

/**
 * A row has at most the columns of the head, and no cells besides its own: filled up, short rows below a wide head would
 * make a million cells of a few kilobytes.
 * @param {string[]} lines
 * @param {number} at
 * @returns {[Block, number]}
 */
function tableAt(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((rule) => {
    if (rule.startsWith(":") && rule.endsWith(":")) return "center";
    return rule.endsWith(":") ? "end" : "start";
  });
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map((line) =>
    cells(line)
      .slice(0, head.length)
      .map((cell) => inline(cell)),
  );
  return [{ type: "table", head: head.map((cell) => inline(cell)), align, rows }, end];
}

/**
 * @param {string} line
 * @returns {string[]}
 */
function cells(line) {
  return line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));
}
