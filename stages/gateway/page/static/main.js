/**
 * The page: two views, the model's name, the API key and the theme.
 * @module
 */

import { Chat } from "./chat/chat.js";
import { ApiError, apiKey, getJson, whenKeyNeeded } from "./common/api.js";
import { byId } from "./common/dom.js";
import { load, save } from "./common/store.js";
import { KeyDialog } from "./key_dialog.js";
import { PipelineView } from "./pipeline/view.js";

const RETRY_MS = 3000;
const NO_ANSWER = "no answer";
const THEMES = /** @type {const} */ (["system", "light", "dark"]);

const chat = new Chat(byId("chat-view"));
const pipeline = new PipelineView(byId("pipeline-view"), showAnswers);
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
  try {
    const [model] = (await getJson("v1/models")).data;
    const { capabilities } = await getJson("api/show", { body: { model: model.id } });
    line.textContent = model.id;
    document.title = `${model.id} – Pipeline`;
    chat.setModel(model.id, capabilities, model.default_sampling_params, model.max_model_len ?? 0);
  } catch (error) {
    line.textContent = error instanceof ApiError && error.status === 401 ? "needs an API key" : "not ready";
    if (!(error instanceof ApiError && error.status === 401)) setTimeout(findModel, RETRY_MS);
  }
}

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
