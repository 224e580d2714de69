// Shows what /fleet says, once a second. The key is kept for this tab only.

const KEY = "frame.key";
const $ = (id) => document.getElementById(id);
let before = null;

async function fetchFleet() {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  return fetch(new URL("fleet", document.baseURI), { headers, cache: "no-store", credentials: "omit" });
}

async function look() {
  let answer;
  try {
    answer = await fetchFleet();
  } catch {
    say("The front cannot be reached.");
    return;
  }
  $("ask").hidden = answer.status !== 401;
  if (!answer.ok) {
    say(answer.status === 401 ? "A key is needed." : `The front answered with status ${answer.status}.`);
    return;
  }
  show(await answer.json());
}

function say(text) {
  $("state").textContent = text;
}

function show(fleet) {
  const ready = fleet.servers.filter((server) => server.state === "ready").length;
  say(`${ready} of ${fleet.servers.length} servers ready, policy ${fleet.policy}${fleet.draining ? ", stopping" : ""}`);
  $("problem").hidden = fleet.problem === null;
  $("problem").textContent = fleet.problem ?? "";
  const figures = Object.entries(fleet.figures).map(([name, value]) => `${name.replaceAll("_", " ")} ${value.toLocaleString()}`);
  $("figures").hidden = figures.length === 0;
  $("figures").textContent = figures.join(", ");
  $("servers").replaceChildren(...fleet.servers.map((server) => row(server, fleet.time)));
  before = fleet;
}

function row(server, now) {
  const line = document.createElement("tr");
  line.className = server.state;
  const answers = total(server);
  const earlier = before?.servers.find((other) => other.url === server.url);
  const rate = earlier === undefined ? "" : ((answers - total(earlier)) / (now - before.time)).toFixed(1);
  const state = server.problem === null ? server.state : `${server.state}: ${server.problem}`;
  const usage = server.kv_usage === null ? "" : `${(100 * server.kv_usage).toFixed(0)} %`;
  const errors = server.answers["5xx"] + server.broken;
  const cells = [server.url, server.role, state, server.in_flight, server.other, usage, answers, rate, errors, server.failures];
  line.append(...cells.map((text, place) => cell(text, place > 2)));
  return line;
}

function total(server) {
  return Object.values(server.answers).reduce((sum, count) => sum + count, 0);
}

function cell(text, isNumber) {
  const made = document.createElement("td");
  made.textContent = text;
  if (isNumber) made.className = "number";
  return made;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  look();
});

async function run() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

run();
