/**
 * The panel of a request's settings: system prompt and sampling.
 * @module
 */

import { el } from "../common/dom.js";
import { load, save } from "../common/store.js";
import { CONTROLS, read, readAll, startValues } from "./sampling.js";

export class SettingsPanel {
  /** @type {Record<string, string>} */
  #texts;
  /** @type {Record<string, string>} */
  #start = startValues({});
  /** @type {Map<string, HTMLInputElement>} */
  #fields = new Map();
  /** Each shows the start value of a control. @type {(() => void)[]} */
  #shows = [];
  close = el("button", { class: "quiet strong close", type: "button" }, "Close");
  #system = el("textarea", { id: "system", rows: 3, placeholder: "None" });

  constructor() {
    const stored = load("settings", { texts: this.#start, system: "" });
    this.#texts = { ...(stored?.texts ?? this.#start) };
    this.#system.value = String(stored?.system ?? "");
    this.#system.addEventListener("input", () => this.#save());
    this.element = el(
      "aside",
      { class: "settings", id: "settings", "aria-label": "Settings of the next reply", hidden: true },
      this.close,
      el(
        "label",
        { class: "control wide", for: "system" },
        el("span", { class: "name" }, "System prompt"),
        this.#system,
      ),
      ...CONTROLS.map((control) => this.#control(control)),
      el("button", { class: "quiet", type: "button", onclick: () => this.#reset() }, "Back to the standard values"),
    );
  }

  /** @param {Record<string, number>} recommended what the model recommends, by name of control */
  setRecommended(recommended) {
    this.#start = startValues(recommended);
    if (load("settings", null) === null) this.#shows.forEach((show) => show());
  }

  get system() {
    return this.#system.value;
  }

  /** What the controls add to a request, and what is wrong with them. */
  read() {
    return readAll(this.#texts);
  }

  /** @param {string} name of a control, which gets the focus */
  focus(name) {
    this.element.hidden = false;
    (this.#fields.get(name) ?? this.#system).focus();
  }

  /** @param {import("./sampling.js").Control} control */
  #control(control) {
    const { name, label, help, hasSlider, standard, min, max, step } = control;
    const field = el("input", {
      id: `set-${name}`,
      inputmode: control.isWhole ? "numeric" : "decimal",
      autocomplete: "off",
      placeholder: control.isModels ? "default" : standard,
      "aria-describedby": `help-${name}`,
      spellcheck: "false",
    });
    const slider = hasSlider ? el("input", { type: "range", min, max, step, "aria-label": label, tabindex: -1 }) : null;
    const words = el("p", { class: "help soft", id: `help-${name}` }, help);
    const show = () => {
      const { value, problem } = read(control, field.value);
      if (slider) slider.value = String(value ?? standard);
      field.setAttribute("aria-invalid", String(problem !== undefined));
      words.textContent = problem ?? help;
      words.classList.toggle("problem", problem !== undefined);
    };
    const changed = () => {
      this.#texts[name] = field.value;
      show();
      this.#save();
    };
    this.#shows.push(() => {
      field.value = this.#texts[name] = this.#start[name] ?? "";
      show();
    });
    field.addEventListener("input", changed);
    slider?.addEventListener("input", () => {
      field.value = slider.value;
      changed();
    });
    field.value = String(this.#texts[name] ?? "");
    show();
    this.#fields.set(name, field);
    return el("div", { class: "control" }, el("label", { class: "name", for: field.id }, label), field, slider, words);
  }

  #reset() {
    this.#system.value = "";
    for (const [name, field] of this.#fields) {
      field.value = this.#start[name] ?? "";
      field.dispatchEvent(new Event("input"));
    }
    this.#save();
  }

  #save() {
    save("settings", { texts: this.#texts, system: this.#system.value });
  }
}
