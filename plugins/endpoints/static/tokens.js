// Answers token by token: the colour says how likely a token was, a tip shows what else could have stood there.

const LEVELS = [0.2, 0.5, 0.8, 0.95]; // p0 below the first, p4 above the last
const tip = document.getElementById("tip");

/** Shows tokens in `box` as they come. Arrow keys move between them. */
export class TokenView {
  constructor(box) {
    this.box = box;
    this.decoder = new TextDecoder();
    this.pending = [];
    this.waiting = [];
    this.content = "";
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Answer, token by token: arrow keys move, the tip shows alternatives");
    box.addEventListener("keydown", (event) => this.move(event));
    for (const kind of ["pointerover", "focusin"]) {
      box.addEventListener(kind, (event) => event.target.token && showTip(event.target));
    }
    for (const kind of ["pointerout", "focusout"]) box.addEventListener(kind, hideTip);
  }

  /**
   * Adds entries of `logprobs.content` and the content that came with them. A character may be spread over several
   * tokens, and a token's text may come later than the token, so both wait until they agree.
   */
  add(entries, content) {
    this.content += content;
    for (const entry of entries) {
      this.pending.push(entry);
      const text = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
      if (text === "") continue;
      this.waiting.push({ text, entries: this.pending });
      this.pending = [];
    }
    this.settle(false);
  }

  /** No more will come: shows what is text of the answer. */
  end() {
    this.settle(true);
  }

  settle(ended) {
    while (this.waiting.length) {
      const { text, entries } = this.waiting[0];
      if (this.content.startsWith(text)) {
        this.append(text, entries);
        this.content = this.content.slice(text.length);
      } else if (!ended && text.startsWith(this.content)) {
        return; // the rest of its text may be on its way
      }
      this.waiting.shift(); // a token that is no text of the answer: special, or part of a call or of reasoning
    }
    if (ended && this.content) this.append(this.content, []);
    this.content = ended ? "" : this.content;
  }

  append(text, entries) {
    const span = document.createElement("span");
    span.textContent = text;
    if (entries.length) {
      const probability = entries.reduce((product, entry) => product * Math.exp(entry.logprob), 1);
      span.className = `token p${LEVELS.filter((level) => probability >= level).length}`;
      span.token = { text, probability, entry: entries.at(-1) };
      span.tabIndex = this.box.childElementCount === 0 ? 0 : -1;
    }
    this.box.append(span);
  }

  move(event) {
    const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    const here = document.activeElement;
    if (event.key === "Escape") hideTip();
    const ends = { Home: this.box.firstElementChild, End: this.box.lastElementChild };
    const next = event.key in steps ? here[steps[event.key]] : ends[event.key];
    if (!next || here.parentElement !== this.box) return;
    event.preventDefault();
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function percent(probability) {
  const value = 100 * probability;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value >= 99.95 ? "100" : value.toFixed(1)} %`;
}

function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";
}

function showTip(span) {
  const { text, probability, entry } = span.token;
  const rows = (entry.top_logprobs ?? []).map((one) => [one.token, Math.exp(one.logprob), one.token === entry.token]);
  if (!rows.some(([, , chosen]) => chosen)) rows.push([text, probability, true]);
  tip.replaceChildren();
  for (const [name, share, chosen] of rows) tip.append(row(name, share, chosen));
  tip.hidden = false;
  span.setAttribute("aria-describedby", "tip");
  const place = span.getBoundingClientRect();
  const left = Math.min(place.left, innerWidth - tip.offsetWidth - 8);
  const below = place.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? place.bottom + 6 : place.top - tip.offsetHeight - 6}px`;
}

function row(name, share, chosen) {
  const line = document.createElement("div");
  line.className = chosen ? "row chosen" : "row";
  const [token, bar, value] = ["code", "span", "span"].map((kind) => document.createElement(kind));
  token.textContent = visible(name);
  bar.className = "share";
  bar.style.setProperty("--share", share);
  value.className = "value";
  value.textContent = percent(share);
  line.append(token, bar, value);
  return line;
}

function hideTip() {
  tip.hidden = true;
  for (const span of document.querySelectorAll("[aria-describedby=tip]")) span.removeAttribute("aria-describedby");
}

addEventListener("scroll", hideTip, true);
addEventListener("resize", hideTip);
