// The settings form: reads it into the fields of a chat request, says what is wrong, and remembers it for this tab.

const SAVED = "frame.settings";
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const TEXTS = ["system", "stop_texts", "format", "constraint", "tools", "extra"];
const LABELS = {
  json_schema: "JSON schema", regex: "Regular expression", choice: "Choices, one a line", grammar: "Grammar",
};
const EXAMPLES = {
  json_schema: { type: "object", properties: { city: { type: "string" }, people: { type: "integer" } },
    required: ["city", "people"], additionalProperties: false },
};
const TOOL = [{ type: "function", function: { name: "get_weather", description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

const element = (id) => document.getElementById(id);

/** A field of the form that cannot be used; `id` is its element. */
export class FieldError extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

export class Settings {
  constructor() {
    this.form = element("fields");
    this.restore();
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("reset", () => setTimeout(() => this.changed()));
    element("tools-example").addEventListener("click", () => {
      element("tools").value = JSON.stringify(TOOL, null, 2);
      this.changed();
      element("tools").focus();
    });
    element("format").addEventListener("change", () => this.showConstraint(true));
    this.showConstraint(false);
  }

  get system() { return element("system").value.trim(); }

  get showsProbabilities() { return element("logprobs").checked; }

  /** What differs from the model's defaults, in a few words each, for the line beside the message. */
  active() {
    const filled = (name) => element(name).value.trim() !== "";
    const words = NUMBERS.filter(filled).map((name) => `${labelOf(element(name))} ${element(name).value}`);
    if (this.system) words.push("system prompt");
    if (filled("stop_texts")) words.push("stop texts");
    if (this.showsProbabilities) words.push("probabilities");
    const format = element("format");
    if (format.value) words.push(`answers: ${format.selectedOptions[0].textContent}`);
    if (filled("tools")) words.push(toolWords(element("tools").value));
    if (filled("extra")) words.push("other fields");
    return words;
  }

  showActive() {
    const words = this.active();
    element("active").replaceChildren(...words.map((word) => {
      const item = document.createElement("li");
      item.textContent = word;
      return item;
    }));
    element("active").hidden = words.length === 0;
  }

  /** The fields of the request besides messages. Throws `FieldError`. */
  request() {
    this.clearErrors();
    const fields = { model: element("model").value };
    for (const name of NUMBERS) {
      const input = element(name);
      if (!input.checkValidity()) throw new FieldError(name, `${labelOf(input)}: ${input.validationMessage}`);
      if (input.value !== "") fields[name] = Number(input.value);
    }
    const stop = lines(element("stop_texts").value);
    if (stop.length) fields.stop = stop;
    if (this.showsProbabilities) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
    this.addFormat(fields);
    const tools = parse("tools", "a JSON list", Array.isArray);
    if (tools !== undefined && tools.length) fields.tools = tools;
    const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
    return Object.assign(fields, parse("extra", "a JSON object", isObject));
  }

  addFormat(fields) {
    const format = element("format").value;
    const text = element("constraint").value;
    if (format === "json_object") fields.response_format = { type: "json_object" };
    if (format === "json_schema") {
      const schema = parse("constraint", "a JSON schema", (value) => typeof value === "object" && value !== null);
      if (schema === undefined) throw new FieldError("constraint", "Write the schema that answers must fit.");
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (format in LABELS && format !== "json_schema") {
      if (text.trim() === "") throw new FieldError("constraint", "Write what answers must fit.");
      fields.structured_outputs = { [format]: format === "choice" ? lines(text) : text };
    }
  }

  show(error) {
    const place = element(`${error.id}-error`);
    if (place) place.textContent = error.message;
    const input = element(error.id);
    input.setAttribute("aria-invalid", "true");
    for (let box = input.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    input.focus();
  }

  clearErrors() {
    for (const place of this.form.querySelectorAll(".error")) place.textContent = "";
    for (const input of this.form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  }

  changed() {
    this.clearErrors();
    this.showConstraint(false);
    const saved = { logprobs: element("logprobs").checked };
    for (const name of [...NUMBERS, ...TEXTS]) saved[name] = element(name).value;
    sessionStorage.setItem(SAVED, JSON.stringify(saved));
  }

  restore() {
    const saved = JSON.parse(sessionStorage.getItem(SAVED) ?? "{}");
    for (const name of [...NUMBERS, ...TEXTS]) element(name).value = saved[name] ?? "";
    element("logprobs").checked = saved.logprobs ?? false;
  }

  showConstraint(offer) {
    const format = element("format").value;
    element("constraint-field").hidden = !(format in LABELS);
    element("constraint-label").textContent = LABELS[format] ?? "";
    if (offer && format in EXAMPLES && element("constraint").value.trim() === "") {
      element("constraint").value = JSON.stringify(EXAMPLES[format], null, 2);
    }
    element("scale").hidden = !this.showsProbabilities;
    this.showActive();
  }
}

function toolWords(text) {
  try {
    const count = JSON.parse(text).length;
    return `${count} ${count === 1 ? "tool" : "tools"}`;
  } catch {
    return "tools";
  }
}

function labelOf(input) {
  return input.labels[0].textContent;
}

function lines(text) {
  return text.split("\n").filter((line) => line !== "");
}

function parse(id, wanted, accepts) {
  const text = element(id).value.trim();
  if (text === "") return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(id, `This is not JSON: ${error.message}`);
  }
  if (!accepts(value)) throw new FieldError(id, `This must be ${wanted}.`);
  return value;
}
