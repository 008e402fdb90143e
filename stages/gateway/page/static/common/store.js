/**
 * Values in the browser's storage. A page without storage (a private window, a full disk) works, and forgets.
 * @module
 */

const PREFIX = "pipeline.";

/**
 * @template T
 * @param {string} name
 * @param {T} fallback
 * @param {Storage} [storage]
 * @returns {T} of whatever type was saved: check what matters
 */
export function load(name, fallback, storage = localStorage) {
  try {
    const text = storage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/**
 * @param {string} name
 * @param {unknown} value undefined removes it
 * @param {Storage} [storage]
 * @returns {boolean} whether it was saved
 */
export function save(name, value, storage = localStorage) {
  try {
    if (value === undefined) storage.removeItem(PREFIX + name);
    else storage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
