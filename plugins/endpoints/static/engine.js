// The live view of the engine: asks for /stats once a second while it is seen, and draws the last two minutes.

import { call } from "./api.js";

const SECONDS = 120;
const CARDS = [
  { id: "running", title: "Running", unit: "requests", of: (now) => now.running, digits: 0 },
  { id: "waiting", title: "Waiting", unit: "requests", of: (now) => now.waiting, digits: 0 },
  { id: "output", title: "Output", unit: "tokens/s", of: rate("generated_tokens"), digits: 0 },
  { id: "prompt", title: "Prompts", unit: "tokens/s", of: rate("prompt_tokens"), digits: 0 },
  { id: "kv", title: "KV cache", unit: "% in use", of: (now) => 100 * now.kv_usage, digits: 1, most: 100, lasts: true },
  { id: "hits", title: "Prefix hits", unit: "% of prompt tokens", of: hits, digits: 0, most: 100 },
  { id: "step", title: "Step", unit: "ms", of: stepTime, digits: 2 },
  { id: "preempted", title: "Preemptions", unit: "since the start", of: (now) => now.preemptions, digits: 0, lasts: true },
];

function rate(name) {
  return (now, before, seconds) => (before ? Math.max(0, now[name] - before[name]) / seconds : 0);
}

/** Mean over what was looked up since the last look; null when nothing was. */
function hits(now, before) {
  const queries = now.prefix_queries - (before?.prefix_queries ?? 0);
  return queries > 0 ? (100 * (now.prefix_hits - (before?.prefix_hits ?? 0))) / queries : null;
}

function stepTime(now, before) {
  const steps = now.steps - (before?.steps ?? 0);
  return steps > 0 ? (1000 * (now.busy_seconds - (before?.busy_seconds ?? 0))) / steps : null;
}

/** Fewer digits for larger numbers. */
function shown(value, digits) {
  const most = value < 10 ? digits : Math.min(digits, value < 100 ? 1 : 0);
  return value.toLocaleString("en", { maximumFractionDigits: most });
}

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(value) {
  const place = value < 1 ? 0 : Math.min(SIZES.length - 1, Math.floor(Math.log2(value) / 10));
  return `${shown(value / 1024 ** place, 1)} ${SIZES[place]}`;
}

/** What was moved one way: bytes and blocks, as far as the connector counts them, and how fast. */
function moved(tier, way) {
  const [size, seconds, blocks] = ["bytes", "seconds", "blocks"].map((name) => tier[`${way}_${name}`]);
  const parts = [];
  if (size !== undefined) parts.push(bytes(size));
  if (blocks !== undefined) parts.push(`${shown(blocks, 0)} blocks`);
  if (seconds) parts.push(`${shown(seconds, 2)} s`);
  if (size && seconds) parts.push(`${bytes(size / seconds)}/s`);
  return parts.join(", ") || "–";
}

function occupancy(tier) {
  if (tier.used_bytes === undefined) return "–";
  if (!tier.size_bytes) return bytes(tier.used_bytes);
  return `${bytes(tier.used_bytes)} of ${bytes(tier.size_bytes)} (${shown((100 * tier.used_bytes) / tier.size_bytes, 1)} %)`;
}

function found(tier) {
  return tier.lookup_tokens ? `${shown((100 * (tier.hit_tokens ?? 0)) / tier.lookup_tokens, 0)} % of tokens` : "–";
}

function failures(tier) {
  const ways = [["load", "loads"], ["save", "saves"]];
  const texts = ways.filter(([way]) => tier[`${way}_failed_blocks`]).map(([way, name]) => `${shown(tier[`${way}_failed_blocks`], 0)} ${name}`);
  return texts.join(", ") || "0";
}

export class EngineView {
  constructor(onState) {
    this.onState = onState;
    this.before = null;
    this.series = new Map(CARDS.map((card) => [card.id, []]));
    this.shown = false;
    this.places = new Map(CARDS.map((card) => [card.id, this.makeCard(card)]));
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  show(shown) {
    this.shown = shown;
    if (shown) this.started = false;
    this.wake();
  }

  /** Looks now, then every second while the view is seen, else every ten, for the state in the bar. */
  wake() {
    clearTimeout(this.timer);
    if (!document.hidden) this.look();
  }

  async look() {
    clearTimeout(this.timer);
    try {
      if (this.shown && !this.started) await this.recall();
      const response = await call("stats");
      this.take(await response.json());
    } catch (error) {
      this.problem(error.message);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.look(), this.shown ? 1000 : 10000);
  }

  /** Draws what the server remembers of the last two minutes, so that a view that opens late shows it too. */
  async recall() {
    const samples = await (await call("stats/history")).json();
    this.started = true;
    this.before = null;
    for (const series of this.series.values()) series.length = 0;
    for (const sample of samples) this.place(sample.time, sample);
  }

  take(stats) {
    if (this.shown) this.place(stats.time, stats.engine);
    this.problem(stats.problem);
    this.list(stats.engine.ranks);
    this.listTiers(stats.tiers);
    const version = `frame ${stats.version}, ${stats.engine.num_blocks} KV blocks, ${stats.engine.steps} steps since the engine started. `;
    document.getElementById("engine-note").textContent = `${version}Lines show the last two minutes.`;
    this.onState(stats.problem ? "away" : "serving", stats.problem ?? `serving ${stats.models[0]}`);
  }

  /** Draws counters of one moment; seconds without a sample were idle. */
  place(time, engine) {
    const seconds = this.before ? time - this.before.time : 1;
    const before = this.before && engine.steps >= this.before.engine.steps ? this.before.engine : null;
    const idle = Math.min(SECONDS, Math.round(seconds)) - 1;
    for (const card of CARDS) {
      for (let second = 0; second < idle; second += 1) this.draw(card, card.lasts ? card.of(before ?? engine) : 0);
      this.draw(card, card.of(engine, before, Math.max(seconds - Math.max(idle, 0), 0.5)));
    }
    this.before = { time, engine };
  }

  /** A row for each engine, where several serve the model. */
  list(ranks) {
    const table = document.getElementById("ranks");
    table.hidden = ranks.length < 2;
    const kv = (one) => `${shown(100 * one.kv_usage, 1)} %`;
    this.fill(
      table,
      ranks.map((one) => [one.rank, one.running, one.waiting, kv(one), shown(one.generated_tokens, 0), one.problem ?? "serving"]),
    );
  }

  /** A row for each tier of the KV connector, once it has reported something. */
  listTiers(tiers) {
    const table = document.getElementById("tiers");
    table.hidden = tiers.length === 0;
    const held = (tier) => (tier.held_blocks === undefined ? "–" : `${shown(tier.held_blocks, 0)} blocks`);
    this.fill(
      table,
      tiers.map((tier) => [
        tier.connector, tier.tier, occupancy(tier), found(tier), moved(tier, "load"), moved(tier, "save"), held(tier), failures(tier),
      ]),
    );
  }

  fill(table, texts) {
    const rows = texts.map((cells) => {
      const row = document.createElement("tr");
      for (const text of cells) row.insertCell().textContent = text;
      return row;
    });
    table.tBodies[0].replaceChildren(...rows);
  }

  problem(text) {
    const place = document.getElementById("engine-problem");
    place.hidden = !text;
    place.textContent = text ?? "";
    if (text) this.onState("away", text);
  }

  makeCard(card) {
    const box = document.createElement("section");
    box.className = "card";
    const [title, value, unit] = ["h2", "p", "p"].map((kind) => document.createElement(kind));
    const peak = document.createElement("span");
    peak.className = "peak";
    title.append(card.title, peak);
    value.className = "number";
    value.id = `live-${card.id}`;
    value.textContent = "–";
    unit.className = "unit";
    unit.textContent = card.unit;
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    picture.setAttribute("viewBox", `0 0 ${SECONDS} 32`);
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("aria-hidden", "true");
    const [area, line] = ["polygon", "polyline"].map((kind) => document.createElementNS("http://www.w3.org/2000/svg", kind));
    picture.append(area, line);
    box.append(title, value, unit, picture);
    document.getElementById("cards").append(box);
    return { value, peak, area, line };
  }

  draw(card, value) {
    const series = this.series.get(card.id);
    const { value: place, peak, area, line } = this.places.get(card.id);
    series.push(value ?? series.at(-1) ?? 0);
    if (series.length > SECONDS) series.shift();
    if (value !== null) place.textContent = shown(value, card.digits);
    const highest = series.reduce((most, one) => Math.max(most, one));
    peak.textContent = `peak ${shown(highest, card.digits)}`;
    const most = card.most ?? Math.max(1e-9, highest);
    const start = SECONDS - series.length;
    const points = series.map((one, index) => `${start + index},${31 - (29 * one) / most}`).join(" ");
    line.setAttribute("points", points);
    area.setAttribute("points", `${start},32 ${points} ${SECONDS - 1},32`);
  }
}
