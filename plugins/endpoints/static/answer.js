// One message of the conversation on the page: its text, tokens, reasoning, tool calls, figures or error.

import { lastBlock, render } from "./markdown.js";
import { TokenView } from "./tokens.js";

const ROLES = { user: "You", assistant: "Model", tool: "Tool" };

function make(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** The element of a message that a person wrote. */
export function written(role, content, name) {
  const box = make("article", `message ${role}`);
  box.setAttribute("aria-label", ROLES[role]);
  box.append(make("h2", "role", name ? `${ROLES[role]}: ${name}` : ROLES[role]), make("div", "text", content));
  return box;
}

/** An answer that is being streamed: `box` is its element, `message()` what goes into the next request. */
export class Answer {
  constructor(model, withTokens) {
    this.box = make("article", "message assistant");
    this.box.setAttribute("aria-label", ROLES.assistant);
    this.box.setAttribute("aria-busy", "true");
    this.box.append(make("h2", "role", model || ROLES.assistant));
    this.withTokens = withTokens;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.started = performance.now();
    this.first = null;
    this.finish = null;
    this.usage = null;
    this.timing = null;
  }

  /** Takes one event of the stream. */
  add(event) {
    this.usage = event.usage ?? this.usage;
    this.timing = event.timing ?? this.timing;
    for (const choice of event.choices) {
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning ?? delta.reasoning_content;
      if (reasoning) this.addReasoning(reasoning);
      if (delta.content) this.addText(delta.content);
      if (this.withTokens) this.addTokens(choice.logprobs?.content ?? [], delta.content ?? "");
      for (const call of delta.tool_calls ?? []) this.addCall(call);
      this.finish = choice.finish_reason ?? this.finish;
    }
  }

  touch() {
    this.first ??= performance.now();
  }

  addReasoning(text) {
    this.touch();
    this.reasoning += text;
    if (!this.thoughts) {
      const details = make("details", "reasoning");
      details.open = true;
      this.thoughts = make("div", "text");
      details.append(make("summary", "", "Reasoning"), this.thoughts);
      this.box.append(details);
    }
    this.thoughts.append(text);
  }

  addText(text) {
    this.touch();
    this.content += text;
    if (this.withTokens) return; // the tokens show it
    if (!this.text) {
      this.text = make("div", "text markdown");
      this.last = make("div", "last"); // the blocks that may still change
      this.settled = 0; // characters of the text before them
      this.text.append(this.last);
      this.box.append(this.text);
    }
    if (!this.drawing) this.drawing = requestAnimationFrame(() => this.draw());
  }

  /** Shows the text as Markdown: blocks that are complete once, the last one anew. */
  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = null;
    if (!this.text) return;
    const stuck = this.log && this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    const cut = this.settled + lastBlock(this.content.slice(this.settled));
    this.last.before(render(this.content.slice(this.settled, cut)));
    this.settled = cut;
    this.last.replaceChildren(render(this.content.slice(cut)));
    if (stuck) this.log.scrollTop = this.log.scrollHeight;
  }

  /** Tokens with their probabilities; those that are no text of the answer (special tokens, calls) are left out. */
  addTokens(entries, text) {
    if (entries.length === 0 && text === "") return;
    this.touch();
    if (!this.tokens) {
      const box = make("div", "text tokens");
      this.box.append(box);
      this.tokens = new TokenView(box);
    }
    this.tokens.add(entries, text);
  }

  addCall(delta) {
    this.touch();
    const index = delta.index ?? this.calls.length;
    let call = this.calls[index];
    if (!call) {
      call = this.calls[index] = { id: "", type: "function", function: { name: "", arguments: "" } };
      call.box = make("div", "call");
      call.title = make("h3", "");
      call.code = make("pre", "code");
      call.box.append(call.title, call.code);
      this.box.append(call.box);
    }
    call.id += delta.id ?? "";
    call.function.name += delta.function?.name ?? "";
    call.function.arguments += delta.function?.arguments ?? "";
    call.title.textContent = `calls ${call.function.name}`;
    call.code.textContent = call.function.arguments;
  }

  /** Ends the answer. `result(call, text)` is called when a person answers a tool call. */
  end({ error, stopped, result }) {
    this.box.setAttribute("aria-busy", "false");
    this.draw();
    this.tokens?.end();
    for (const call of this.calls) {
      call.code.textContent = pretty(call.function.arguments);
      if (!error && !stopped) call.box.append(resultForm(call, result));
    }
    if (error) {
      const line = make("p", "error", error.message);
      line.setAttribute("role", "alert");
      if (error.param) line.append(make("span", "param", ` (field ${error.param})`));
      this.box.append(line);
    }
    if (this.first !== null) this.box.append(make("p", "figures", this.figures(stopped)));
  }

  figures(stopped) {
    const seconds = (performance.now() - this.first) / 1000;
    const parts = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens !== undefined) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    const wait = this.timing?.first_token_seconds ?? (this.first - this.started) / 1000;
    parts.push(`${Math.round(1000 * wait)} ms to the first`);
    const decode = this.timing?.decode_seconds ?? seconds;
    if (tokens > 1 && decode > 0) parts.push(`${((tokens - 1) / decode).toFixed(1)} tokens/s`);
    if (this.usage) parts.push(`prompt of ${this.usage.prompt_tokens}`);
    parts.push(stopped ? "stopped" : REASONS[this.finish] ?? this.finish ?? "");
    return parts.filter(Boolean).join(" · ");
  }

  message() {
    const message = { role: "assistant", content: this.content };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, type, function: called }) => ({ id, type, function: called }));
    }
    return message;
  }
}

const REASONS = { stop: "ended by itself", length: "cut at the limit", tool_calls: "called a tool", abort: "aborted" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function resultForm(call, result) {
  const form = make("form", "result");
  const id = `result-${Math.random().toString(36).slice(2)}`;
  const label = make("label", "", `Result of ${call.function.name}`);
  const input = make("textarea", "code");
  const button = make("button", "main", "Send the result");
  label.htmlFor = input.id = id;
  input.rows = 2;
  button.type = "submit";
  form.append(label, input, button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.remove();
    result(call, input.value);
  });
  return form;
}
