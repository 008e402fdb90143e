/**
 * The page: two views, the model's name, the API key and the theme.
 * @module
 */

import { Chat } from "./chat/chat.js";
import { ApiError, apiKey, getJson, whenKeyNeeded } from "./common/api.js";
import { byId, el, replace } from "./common/dom.js";
import { load, save } from "./common/store.js";
import { KeyDialog } from "./key_dialog.js";
import { chosen, isLoaded, label, modelsOf, stateOf } from "./model_choice.js";
import { LiveView } from "./pipeline/view.js";

const RETRY_MS = 3000;
const MODELS_MS = 3000;
const UNKNOWN = { capabilities: [] };
const NO_ANSWER = "no answer";
const THEMES = /** @type {const} */ (["system", "light", "dark"]);

let modelsTimer = 0;
let shown = "";
const chat = new Chat(byId("chat-view"));
const pipeline = new LiveView(byId("pipeline-view"), showAnswers);
const keys = new KeyDialog(() => findModel());

whenKeyNeeded(() => {
  byId("key-button").hidden = false;
  keys.open(true);
});
byId("key-button").addEventListener("click", () => keys.open());

/**
 * The model's name is shown only while the server answers.
 * @param {boolean} isAnswering
 */
function showAnswers(isAnswering) {
  const line = byId("model");
  if (!isAnswering) line.textContent = NO_ANSWER;
  else if (line.textContent === NO_ANSWER) findModel();
}

async function findModel() {
  const line = byId("model");
  byId("key-button").hidden = !apiKey();
  clearTimeout(modelsTimer);
  try {
    const models = modelsOf((await getJson("v1/models")).data);
    const model = chosen(models, load("model", ""));
    const areSeveral = models.length > 1;
    if (!areSeveral || stateOf(model) !== shown) {
      // To ask more about a model that is not loaded would load it: its first message does.
      const { capabilities } = isLoaded(model) ? await getJson("api/show", { body: { model: model.id } }) : UNKNOWN;
      shown = stateOf(model);
      document.title = `${model.id} – Pipeline`;
      chat.setModel(model.id, capabilities, model.default_sampling_params ?? {}, model.max_model_len ?? 0);
    }
    line.textContent = model.id;
    line.hidden = areSeveral;
    showModels(models, model);
    pipeline.setModels(models, model.id);
    if (areSeveral) modelsTimer = setTimeout(findModel, MODELS_MS);
  } catch (error) {
    line.textContent = error instanceof ApiError && error.status === 401 ? "needs an API key" : "not ready";
    if (!(error instanceof ApiError && error.status === 401)) setTimeout(findModel, RETRY_MS);
  }
}

/**
 * Shows several models with their states, to choose one.
 * @param {readonly import("./model_choice.js").Model[]} models
 * @param {import("./model_choice.js").Model} model the chosen one
 */
function showModels(models, model) {
  const select = /** @type {HTMLSelectElement} */ (byId("models"));
  select.hidden = models.length < 2;
  const options = models.map((one) => ({ value: one.id, text: label(one) }));
  const isSame = [...select.options].map((one) => one.text).join("\n") === options.map((one) => one.text).join("\n");
  if (!isSame) replace(select, ...options.map(({ value, text }) => el("option", { value }, text)));
  select.value = model.id;
}

byId("models").addEventListener("change", (event) => {
  save("model", /** @type {HTMLSelectElement} */ (event.target).value);
  findModel();
});

function showView() {
  const isPipeline = location.hash === "#pipeline";
  byId("chat-view").hidden = isPipeline;
  byId("pipeline-view").hidden = !isPipeline;
  byId("to-chat").setAttribute("aria-current", isPipeline ? "false" : "page");
  byId("to-pipeline").setAttribute("aria-current", isPipeline ? "page" : "false");
  pipeline.show(isPipeline);
}

/** @param {(typeof THEMES)[number]} theme */
function setTheme(theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const button = byId("theme");
  const words = { system: "Auto", light: "Light", dark: "Dark" };
  button.textContent = `Theme: ${words[theme]}`;
}

/** @type {(typeof THEMES)[number]} */
let theme = THEMES.find((one) => one === load("theme", /** @type {string} */ ("system"))) ?? "system";
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  save("theme", theme === "system" ? undefined : theme);
  setTheme(theme);
});

addEventListener("hashchange", showView);
setTheme(theme);
showView();
findModel();
