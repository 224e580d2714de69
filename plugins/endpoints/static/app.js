// Puts the page together: views, models, the key and the settings drawer.

import { ApiError, call, forgetKey, hasKey, onKeyNeeded } from "./api.js";
import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";

const element = (id) => document.getElementById(id);

function setState(kind, text) {
  element("state").dataset.kind = kind;
  if (element("state-text").textContent !== text) element("state-text").textContent = text;
}

/** Asks for the key until one is given. */
function askForKey(wrong) {
  const dialog = element("key-dialog");
  element("key-error").textContent = wrong ? "The server does not know this key." : "";
  element("key").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    element("key-form").onsubmit = () => {
      element("forget-key").hidden = false;
      resolve(element("key").value.trim());
    };
  });
}

async function loadModels() {
  const response = await call("v1/models");
  const models = (await response.json()).data.map((model) => model.id);
  element("model").replaceChildren();
  for (const name of models) element("model").append(new Option(name, name));
}

/** The server may still be starting: waits for it. */
async function loadModelsUntilThere() {
  for (;;) {
    try {
      return await loadModels();
    } catch (error) {
      if (!(error instanceof ApiError) || ![0, 503].includes(error.status)) {
        setState("away", error.message);
        return;
      }
      setState("away", error.message);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

function setUpTabs(engine) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = (chosen) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      element(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    }
    engine.show(chosen.id === "tab-engine");
    history.replaceState(null, "", chosen.id === "tab-engine" ? "#engine" : location.pathname + location.search);
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
      const next = tabs[(index + (event.key === "ArrowRight" ? 1 : tabs.length - 1)) % tabs.length];
      choose(next);
      next.focus();
    });
  });
  choose(tabs[location.hash === "#engine" ? 1 : 0]);
}

function setUpDrawer(chat) {
  const opener = element("settings-open");
  const toggle = (open) => {
    document.body.classList.toggle("drawer", open);
    opener.setAttribute("aria-expanded", String(open));
    if (open) element("model").focus();
    else opener.focus();
  };
  opener.addEventListener("click", () => toggle(!document.body.classList.contains("drawer")));
  element("settings-close").addEventListener("click", () => toggle(false));
  element("settings").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.body.classList.contains("drawer")) toggle(false);
  });
  chat.onFieldError = () => toggle(true);
}

function start() {
  onKeyNeeded(askForKey);
  element("forget-key").hidden = !hasKey();
  element("forget-key").addEventListener("click", () => { forgetKey(); location.reload(); });
  element("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
  const chat = new Chat();
  setUpTabs(new EngineView(setState));
  setUpDrawer(chat);
  loadModelsUntilThere();
  if (matchMedia("(min-width: 60rem)").matches) element("question").focus();
}

start();
