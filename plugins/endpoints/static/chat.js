// The conversation: what was said, the request for the next answer, and its stream.

import { call, events } from "./api.js";
import { Answer, written } from "./answer.js";
import { FieldError, Settings } from "./settings.js";

const element = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.settings = new Settings();
    this.messages = [];
    this.running = null;
    this.log = element("log");
    this.question = element("question");
    element("ask").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    element("stop").addEventListener("click", () => this.stop());
    element("again").addEventListener("click", () => this.again());
    element("clear").addEventListener("click", () => this.clear());
    element("copy").addEventListener("click", () => this.copy());
    this.question.addEventListener("input", () => this.fit());
    this.question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask();
    });
    addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  ask() {
    const text = this.question.value.trim();
    if (this.running) return;
    if (text === "") return this.question.focus();
    if (!this.request()) return;
    this.say({ role: "user", content: text });
    this.question.value = "";
    this.fit();
    this.answer();
  }

  /** Adds a message of a person to the conversation. */
  say(message, name) {
    element("empty").hidden = true;
    const box = written(message.role, message.content, name);
    this.messages.push({ message, box });
    this.log.append(box);
    box.scrollIntoView({ block: "end" });
  }

  /** The body of the next request; shows what is wrong and gives null when a setting cannot be used. */
  request() {
    try {
      const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
      const messages = [...system, ...this.messages.map(({ message }) => message)];
      return { ...this.settings.request(), messages };
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      this.onFieldError?.();
      this.settings.show(error);
      return null;
    }
  }

  async answer() {
    const body = this.request();
    if (!body) return;
    const abort = this.running = new AbortController();
    const answer = new Answer(body.model, this.settings.showsProbabilities);
    answer.log = this.log;
    this.log.append(answer.box);
    this.update();
    this.follow(true);
    let error = null;
    try {
      const more = { stream: true, stream_options: { include_usage: true }, return_timing: true };
      const response = await call("v1/chat/completions", { body: { ...body, ...more }, signal: abort.signal });
      for await (const event of events(response)) {
        const stuck = this.atEnd();
        answer.add(event);
        this.follow(stuck);
      }
    } catch (caught) {
      error = caught.name === "AbortError" ? null : caught;
      if (!error) answer.stopped = true;
    }
    this.running = null;
    const stuck = this.atEnd();
    answer.end({ error, stopped: abort.signal.aborted, result: (made, text) => this.answerCall(made, text) });
    this.follow(stuck);
    this.messages.push({ message: answer.message(), box: answer.box, failed: error !== null });
    this.update();
  }

  answerCall(made, text) {
    if (this.running) return;
    this.say({ role: "tool", tool_call_id: made.id, content: text }, made.function.name);
    const answered = new Set(this.messages.map(({ message }) => message.tool_call_id));
    const open = this.messages.flatMap(({ message }) => message.tool_calls ?? []).some(({ id }) => !answered.has(id));
    if (!open) this.answer();
    this.update();
  }

  stop() {
    this.running?.abort();
  }

  /** Forgets the last answer and asks for another. */
  again() {
    if (this.running) return;
    while (this.messages.length && this.messages.at(-1).message.role === "assistant") this.messages.pop().box.remove();
    if (this.messages.length) this.answer();
  }

  clear() {
    this.stop();
    for (const { box } of this.messages) box.remove();
    this.messages = [];
    element("empty").hidden = false;
    this.update();
    this.question.focus();
  }

  async copy() {
    const body = this.request();
    if (!body) return;
    const json = JSON.stringify(body).replaceAll("'", "'\\''");
    const url = new URL("v1/chat/completions", document.baseURI);
    const text = `curl ${url} -H 'Content-Type: application/json' -H "Authorization: Bearer $KEY" -d '${json}'`;
    await navigator.clipboard?.writeText(text);
    element("copy").textContent = navigator.clipboard ? "Copied" : "No clipboard here";
    setTimeout(() => { element("copy").textContent = "Copy as curl"; }, 1500);
  }

  update() {
    const running = this.running !== null;
    if (!running) this.dropFailed();
    element("stop").hidden = !running;
    element("send").hidden = running;
    element("again").disabled = running || this.messages.length === 0;
    element("clear").disabled = this.messages.length === 0;
    this.log.setAttribute("aria-busy", String(running));
  }

  /** An answer that failed stays on the page, not in the conversation. */
  dropFailed() {
    const last = this.messages.at(-1);
    const empty = last && last.message.role === "assistant" && !last.message.content && !last.message.tool_calls;
    if (last?.failed || empty) {
      this.messages.pop();
      this.leftovers = [...(this.leftovers ?? []), last.box];
    } else if (!last) {
      for (const box of this.leftovers ?? []) box.remove();
      this.leftovers = [];
    }
  }

  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight + 2, 240)}px`;
  }

  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  follow(stuck) {
    if (stuck) this.log.scrollTop = this.log.scrollHeight;
  }
}
