/**
 * Builds DOM nodes. Text is always set as text: nothing in this page parses HTML.
 * @module
 */

/** @typedef {Node | string | null | undefined | false} One */
/** @typedef {One | One[]} Child an array where there may be many: arguments are limited, to about a hundred thousand */
/** @typedef {Record<string, string | number | boolean | null | undefined | ((event: any) => void)>} Props */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. A property that begins with "on" is a listener; true sets an empty attribute, and false, null and
 * undefined none.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Props} [props]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/**
 * An SVG element.
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Props} [props]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/**
 * @template {Element} E
 * @param {E} element
 * @param {Props} props
 * @param {Child[]} children
 * @returns {E}
 */
function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  append(element, children);
  return element;
}

/**
 * Replaces what an element contains.
 * @param {Element} element
 * @param {...Child} children
 */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/**
 * @param {Element} element
 * @param {Child[]} children
 */
function append(element, children) {
  for (const child of children.flat()) {
    if (child || child === "") element.append(child);
  }
}

/**
 * The element of index.html with an id.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element has the id ${id}`);
  return found;
}

/**
 * Tells users of screen readers what has happened.
 * @param {string} text
 */
export function announce(text) {
  byId("status").textContent = text;
}

/** Whether the reader asks for less motion. */
export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
