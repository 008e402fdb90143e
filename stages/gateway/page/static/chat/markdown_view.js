/**
 * DOM nodes of parsed Markdown. Only text nodes contain what the model wrote.
 * @module
 */

import { copyButton } from "../common/copy.js";
import { el } from "../common/dom.js";
import { highlight } from "./highlight.js";
import { parse } from "./markdown.js";

/** @typedef {import("./markdown.js").Block} Block */
/** @typedef {import("./inline.js").Inline} Inline */

/** An element that shows a growing text: it redraws only the blocks that have changed. */
export class MarkdownView {
  /** @type {string[]} */
  #sources = [];
  /** Its children: their live collection is counted anew after each change. @type {Element[]} */
  #nodes = [];

  constructor() {
    this.element = el("div", { class: "prose" });
  }

  /** @param {string} text all of it */
  update(text) {
    const parts = parse(text);
    parts.forEach(({ source, block }, place) => {
      if (this.#sources[place] === source) return;
      const node = blockNode(block);
      if (place < this.#nodes.length) this.#nodes[place].replaceWith(node);
      else this.element.append(node);
      this.#nodes[place] = node;
    });
    for (const node of this.#nodes.splice(parts.length)) node.remove();
    this.#sources = parts.map(({ source }) => source);
  }
}

/**
 * @param {Block} block
 * @returns {HTMLElement}
 */
function blockNode(block) {
  switch (block.type) {
    case "paragraph":
      return el("p", {}, block.children.map(inlineNode));
    case "heading":
      return el(headingTag(block.level), {}, block.children.map(inlineNode));
    case "fence":
      return codeNode(block.text, block.language);
    case "list": {
      const items = block.items.map((item) => el("li", {}, tight(item)));
      return block.ordered ? el("ol", { start: block.start }, items) : el("ul", {}, items);
    }
    case "quote":
      return el("blockquote", {}, block.children.map(blockNode));
    case "table":
      return tableNode(block);
    case "rule":
      return el("hr");
  }
}

/**
 * The page's own headings come first, so a reply's begin at the third level.
 * @param {number} level
 */
const headingTag = (level) => /** @type {const} */ (["h3", "h4", "h5", "h6"])[Math.min(level, 4) - 1];

/**
 * The nodes of a list item: a first paragraph stands without an element of its own.
 * @param {Block[]} item
 * @returns {Node[]}
 */
function tight(item) {
  const [first, ...rest] = item;
  if (first?.type !== "paragraph") return item.map(blockNode);
  return [...first.children.map(inlineNode), ...rest.map(blockNode)];
}

/**
 * @param {string} text
 * @param {string} language
 * @returns {HTMLElement}
 */
function codeNode(text, language) {
  const parts = highlight(text, language).map(({ kind, text: part }) =>
    kind ? el("span", { class: kind }, part) : part,
  );
  return el(
    "figure",
    { class: "code" },
    el(
      "figcaption",
      {},
      el("span", {}, language || "code"),
      copyButton(() => text, "Copy the code"),
    ),
    el("pre", { tabindex: 0, "aria-label": language ? `Code in ${language}` : "Code" }, el("code", {}, parts)),
  );
}

/**
 * @param {Extract<Block, {type: "table"}>} table
 * @returns {HTMLElement}
 */
function tableNode({ head, align, rows }) {
  const cell = (/** @type {"th" | "td"} */ tag, /** @type {Inline[]} */ children, /** @type {number} */ place) =>
    el(tag, { class: align[place] === "start" ? undefined : `to-${align[place]}` }, children.map(inlineNode));
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, head.map((children, place) => cell("th", children, place)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((children, place) => cell("td", children, place))))),
    ),
  );
}

/**
 * @param {Inline} node
 * @returns {Node}
 */
function inlineNode(node) {
  switch (node.type) {
    case "text":
      return document.createTextNode(node.text);
    case "code":
      return el("code", {}, node.text);
    case "break":
      return el("br");
    case "link": {
      const props = { href: node.href, rel: "noopener noreferrer nofollow", target: "_blank", title: node.href };
      return el("a", props, node.children.map(inlineNode));
    }
    default:
      return el(node.type, {}, node.children.map(inlineNode));
  }
}
