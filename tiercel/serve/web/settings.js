/**
 * The settings panel: system prompt, sampling fields, tools.
 *
 * An empty field is not sent, so the default of the model and its server applies; if the server
 * names none, `FALLBACKS` are sent instead. An invalid field is reported immediately and blocks the next
 * message.
 */

import { element, setText } from "./dom.js";

const STORAGE_KEY = "tiercel.settings";
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, hint: "0 takes the likeliest" },
  { name: "top_p", label: "Top p", above: 0, max: 1, hint: "share of probability kept" },
  { name: "top_k", label: "Top k", min: 0, isInteger: true, hint: "tokens kept; 0 keeps all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, hint: "relative to the likeliest" },
  { name: "max_tokens", label: "Max tokens", min: 1, isInteger: true, hint: "length of an answer" },
  { name: "seed", label: "Seed", isInteger: true, hint: "same seed, same answer" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, hint: "once per token" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, hint: "per use" },
  { name: "repetition_penalty", label: "Repetition penalty", above: 0, max: 10, hint: "1 is none" },
];

// Defaults of the command line: at the API's temperature of 1 small models write nonsense.
const FALLBACKS = new Map([
  ["temperature", 0.7],
  ["top_p", 0.95],
]);

/** The error in the text of a field, in words; null if there is none. */
function problemOf(field, text) {
  const value = Number(text.replace(",", "."));
  if (Number.isNaN(value)) return "Enter a number.";
  if (field.isInteger && !Number.isSafeInteger(value)) return "Enter a whole number.";
  if (field.min !== undefined && value < field.min) return `Use ${rangeOf(field)}.`;
  if (field.above !== undefined && value <= field.above) return `Use ${rangeOf(field)}.`;
  if (field.max !== undefined && value > field.max) return `Use ${rangeOf(field)}.`;
  return null;
}

function rangeOf({ min, above, max }) {
  if (max === undefined) return `${min} or more`;
  return above === undefined ? `${min} to ${max}` : `more than ${above}, up to ${max}`;
}

/** The tools of a request: {tools, problem}. */
function readTools(text) {
  if (!text.trim()) return { tools: null, problem: null };
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch {
    return { tools: null, problem: "This is not valid JSON." };
  }
  if (!Array.isArray(tools)) return { tools: null, problem: "Enter a list: [ … ]." };
  const isComplete = tools.every((tool) => typeof tool?.function?.name === "string");
  if (!isComplete) return { tools: null, problem: "Each tool needs a function with a name." };
  return { tools: tools.length ? tools : null, problem: null };
}

export class Settings {
  #storage;
  #values; // field name -> text
  #inputs = new Map(); // field name -> {field, input, message}
  #defaults = new Map(); // field name -> the server's default
  #tools = document.getElementById("tools");
  #toolsError = document.getElementById("tools-error");
  #system = document.getElementById("system");

  /** `systemChanged` is called with each new system prompt. */
  constructor(storage, systemChanged) {
    this.#storage = storage;
    this.#values = storage.readObject(STORAGE_KEY) ?? {};
    const list = document.getElementById("sampling");
    list.append(...FIELDS.map((field) => this.#makeField(field)));
    this.showDefaults(this.#defaults);
    this.#tools.value = this.#textOf("tools");
    this.#tools.addEventListener("input", () => {
      this.#checkTools();
      this.#keep("tools", this.#tools.value);
    });
    this.#checkTools();
    this.#system.addEventListener("input", () => systemChanged(this.#system.value));
    document.getElementById("reset-sampling").addEventListener("click", () => this.#reset());
  }

  showSystem(text) {
    this.#system.value = text;
  }

  /** Shows what an empty field means: the server's defaults by field name, or ours. */
  showDefaults(defaults) {
    this.#defaults = defaults;
    for (const [name, { input }] of this.#inputs) {
      input.placeholder = defaults.get(name) ?? FALLBACKS.get(name) ?? "default";
    }
  }

  /** The fields of a request: {body}, or {problem: the invalid field}. */
  read() {
    const body = {};
    for (const [name, { field, input }] of this.#inputs) {
      const text = input.value.trim();
      if (text && problemOf(field, text)) return { problem: input };
      if (text) body[name] = Number(text.replace(",", "."));
      else if (FALLBACKS.has(name) && !this.#defaults.has(name)) body[name] = FALLBACKS.get(name);
    }
    const { tools, problem } = readTools(this.#tools.value);
    if (problem) return { problem: this.#tools };
    if (tools) body.tools = tools;
    return { body };
  }

  #textOf(name) {
    const value = this.#values[name];
    return typeof value === "string" ? value : "";
  }

  #makeField(field) {
    const id = `sampling-${field.name}`;
    const input = element("input", {
      id,
      name: field.name,
      inputmode: field.isInteger ? "numeric" : "decimal",
      autocomplete: "off",
      spellcheck: "false",
      "aria-describedby": `${id}-note`,
      input: () => this.#changed(field.name),
    });
    input.value = this.#textOf(field.name);
    const message = element("small", { id: `${id}-note` }, field.hint);
    this.#inputs.set(field.name, { field, input, message });
    this.#check(field.name);
    const label = element("label", { for: id }, field.label);
    return element("div", { class: "field" }, label, input, message);
  }

  #changed(name) {
    this.#check(name);
    this.#keep(name, this.#inputs.get(name).input.value);
  }

  #check(name) {
    const { field, input, message } = this.#inputs.get(name);
    const text = input.value.trim();
    const problem = text ? problemOf(field, text) : null;
    input.setAttribute("aria-invalid", String(problem !== null));
    message.classList.toggle("problem", problem !== null);
    setText(message, problem ?? field.hint);
  }

  #checkTools() {
    const { problem } = readTools(this.#tools.value);
    this.#tools.setAttribute("aria-invalid", String(problem !== null));
    setText(this.#toolsError, problem ?? "");
  }

  #keep(name, text) {
    this.#values[name] = text;
    this.#storage.write(STORAGE_KEY, JSON.stringify(this.#values));
  }

  #reset() {
    for (const [name, { input }] of this.#inputs) {
      input.value = "";
      this.#changed(name);
    }
  }
}
