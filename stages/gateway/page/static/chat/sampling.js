/**
 * The controls of a request: their limits, and how what is typed becomes fields of a request. Pure.
 * @module
 */

/**
 * @typedef {{name: string, label: string, help: string, min: number, max: number, step: number, isWhole?: boolean,
 *   hasSlider?: boolean, isModels?: boolean, standard: string}} Control `standard` is what an empty field means; with
 *   `isModels` only if the model recommends nothing else
 */

/** @type {Control[]} */
export const CONTROLS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    hasSlider: true,
    isModels: true,
    standard: "1",
    help: "0 always takes the likeliest token.",
  },
  {
    name: "top_p",
    label: "Top p",
    min: 0.01,
    max: 1,
    step: 0.01,
    hasSlider: true,
    isModels: true,
    standard: "1",
    help: "Only the likeliest tokens that make up this share.",
  },
  {
    name: "min_p",
    label: "Min p",
    min: 0,
    max: 1,
    step: 0.01,
    hasSlider: true,
    isModels: true,
    standard: "0",
    help: "Only tokens this likely, relative to the likeliest.",
  },
  {
    name: "top_k",
    label: "Top k",
    min: 0,
    max: 2 ** 31 - 1,
    step: 1,
    isWhole: true,
    isModels: true,
    standard: "off",
    help: "Only this many of the likeliest tokens.",
  },
  {
    name: "max_tokens",
    label: "Max tokens",
    min: 1,
    max: 2 ** 31 - 1,
    step: 1,
    isWhole: true,
    isModels: true,
    standard: "no limit",
    help: "The reply ends after this many tokens.",
  },
  {
    name: "seed",
    label: "Seed",
    min: -(2 ** 53) + 1,
    max: 2 ** 53 - 1,
    step: 1,
    isWhole: true,
    standard: "random",
    help: "The same seed gives the same reply.",
  },
];

/** @type {Record<string, string>} */
const START_VALUES = { temperature: "0.7", top_p: "0.95" };

/**
 * Values of a new page. What the model recommends stays with the server.
 * @param {Record<string, number>} recommended by name of control
 * @returns {Record<string, string>}
 */
export function startValues(recommended) {
  return Object.fromEntries(Object.entries(START_VALUES).filter(([name]) => !(name in recommended)));
}

/**
 * The fields without a limit of tokens that the model's context is too short for: the reply ends there in any case, and
 * the server refuses such a limit.
 * @param {Record<string, number>} fields
 * @param {number} contextTokens the model's context; 0 if it is not known
 * @returns {Record<string, number>}
 */
export function withinContext(fields, contextTokens) {
  const { max_tokens: maxTokens, ...others } = fields;
  return maxTokens === undefined || (contextTokens && maxTokens >= contextTokens) ? others : fields;
}

/**
 * Whether a request failed only because its prompt leaves less room than its limit of tokens: without the limit, the
 * reply ends where the context does.
 * @param {{status: number, param: string | null, code: string | null}} error
 * @param {Record<string, unknown>} fields of the request
 */
export function isLimitTooHigh({ status, param }, fields) {
  return status === 400 && param === "max_tokens" && fields.max_tokens !== undefined;
}

/**
 * @param {Control} control
 * @param {string} text what is typed; empty for the standard value
 * @returns {{value?: number, problem?: string}} neither if the text is empty
 */
export function read(control, text) {
  const words = text.trim();
  if (!words) return {};
  const value = Number(words);
  const isRight = Number.isFinite(value) && value >= control.min && value <= control.max;
  if (isRight && (!control.isWhole || Number.isInteger(value))) return { value };
  const kind = control.isWhole ? "a whole number" : "a number";
  const limits =
    control.max >= 2 ** 31 - 1 ? `from ${Math.max(control.min, 0)}` : `from ${control.min} to ${control.max}`;
  return { problem: `${control.label} must be ${kind}${control.name === "seed" ? "" : ` ${limits}`}.` };
}

/**
 * @param {Record<string, string>} texts by name of control
 * @returns {{fields: Record<string, number>, problems: Record<string, string>}}
 */
export function readAll(texts) {
  /** @type {Record<string, number>} */
  const fields = {};
  /** @type {Record<string, string>} */
  const problems = {};
  for (const control of CONTROLS) {
    const { value, problem } = read(control, String(texts[control.name] ?? ""));
    if (value !== undefined) fields[control.name] = value;
    if (problem !== undefined) problems[control.name] = problem;
  }
  return { fields, problems };
}
