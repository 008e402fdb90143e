/**
 * Which of several models the page is about, and what is said of each. Pure; main.js shows the choice.
 * @module
 */

import { uptime } from "./common/format.js";

/**
 * @typedef {{id: string, parent?: string | null, max_model_len?: number, tasks?: string[],
 *   default_sampling_params?: Record<string, number>,
 *   status?: {value: string, position?: number, waits_for?: string[], since?: number, waits_since?: number,
 *     memory_bytes?: number, pinned?: boolean}}} Model an entry of v1/models
 */

/**
 * @param {readonly Model[]} entries of v1/models
 * @returns {Model[]} the models: adapters are chosen by requests
 */
export function modelsOf(entries) {
  return entries.filter((one) => !one.parent);
}

/**
 * @param {Model} model
 * @returns {boolean} whether it answers at once; a server of one model lists it only then
 */
export function isLoaded(model) {
  return (model.status?.value ?? "loaded") === "loaded";
}

/**
 * @param {readonly Model[]} models
 * @param {string} wanted the one that the reader has chosen; empty if none
 * @returns {Model} it, or the first one that is loaded and generates text, or that is loaded
 */
export function chosen(models, wanted) {
  const loaded = models.filter(isLoaded);
  return (
    models.find((one) => one.id === wanted) ??
    loaded.find((one) => one.tasks?.includes("generate")) ??
    loaded[0] ??
    models[0]
  );
}

/**
 * @param {Model} model
 * @returns {string} its name, and its state if it is not loaded
 */
export function label(model) {
  if (isLoaded(model)) return model.id;
  const { value, position, waits_for: others = [] } = /** @type {NonNullable<Model["status"]>} */ (model.status);
  if (!position) return `${model.id} (${value})`;
  return `${model.id} (waits: ${position}${others.length ? `, after ${others.join(", ")}` : ""})`;
}

/**
 * @param {Model} model
 * @returns {string} its state
 */
export function stateWords(model) {
  const { value = "loaded", pinned = false } = model.status ?? {};
  return pinned ? `${value}, pinned` : value;
}

/**
 * @param {Model} model
 * @param {number} nowS in Unix time
 * @returns {string} what it waits for to be loaded or woken, and how long it has; "–" if it does not wait
 */
export function waitingWords(model, nowS) {
  const { position = 0, waits_for: others = [], waits_since: since = nowS } = model.status ?? {};
  if (!position) return "–";
  const names = others.length ? `, after ${others.join(", ")}` : "";
  return `place ${position}${names}, for ${uptime(Math.max(0, nowS - since))}`;
}

/**
 * @param {Model} model
 * @returns {string} changes if what is known about it may have changed
 */
export function stateOf(model) {
  return `${model.id} ${model.status?.value ?? ""} ${model.status?.since ?? ""}`;
}
