// The server's API from the page: the key, errors as sentences, and events of a stream. Knows no element.

const KEY = "frame.key";

export class ApiError extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param ?? null;
  }
}

/** What asks a person for the key; set by the page. Gives a promise of text. */
let askForKey = null;
let asking = null;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

/** Fetches a path of this server; asks for the key when it is needed. Throws `ApiError`. */
export async function call(path, { body, signal } = {}) {
  for (let wrong = false; ; wrong = true) {
    const key = sessionStorage.getItem(KEY);
    const response = await send(path, key, body, signal);
    if (response.ok) return response;
    if (response.status !== 401 || askForKey === null) throw await failure(response);
    if (sessionStorage.getItem(KEY) === key) {
      // several calls may be refused at once: one question serves them all
      asking ??= askForKey(wrong || key !== null).finally(() => { asking = null; });
      sessionStorage.setItem(KEY, await asking);
    }
  }
}

async function send(path, key, body, signal) {
  const headers = {};
  if (key !== null) headers["Authorization"] = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers, signal, cache: "no-store", credentials: "omit",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
}

async function failure(response) {
  try {
    return errorOf(await response.json(), response.status);
  } catch {
    return new ApiError(response.status, `The server answered with status ${response.status}.`);
  }
}

function errorOf(body, status) {
  const { message, param } = body.error;
  return new ApiError(status, message, param);
}

/** The JSON of each server-sent event until `[DONE]`. Throws `ApiError` for an error event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The connection to the server broke before the answer was complete.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw errorOf(event, event.error.code);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
