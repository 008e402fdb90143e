/**
 * Copy buttons.
 * @module
 */

import { announce, el } from "./dom.js";

const SHOWN_MS = 1600;

/**
 * @param {() => string} text
 * @param {string} label what it copies, such as "Copy the code"
 * @param {string} [shown] the button's text
 * @returns {HTMLButtonElement}
 */
export function copyButton(text, label, shown = "Copy") {
  const button = el("button", { class: "quiet", type: "button", "aria-label": label }, shown);
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Can't copy";
    announce(done ? "Copied" : "The browser does not allow copying here");
    setTimeout(() => {
      button.textContent = shown;
    }, SHOWN_MS);
  });
  return button;
}

/**
 * @param {string} text
 * @returns {Promise<boolean>} whether it is in the clipboard
 */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text); // over plain HTTP, browsers have no navigator.clipboard
  }
}

/**
 * @param {string} text
 * @returns {boolean}
 */
function copiedBySelection(text) {
  const field = el("textarea", { class: "hidden", "aria-hidden": "true" });
  field.value = text;
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    if (focused instanceof HTMLElement) focused.focus();
  }
}
