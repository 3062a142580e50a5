/**
 * What the page shows, all of it in its address: `#/VIEW?model=NAME&run=PROMPT&chat=1&ablate=3.2,4.0&key=value`.
 *
 * The address is the state; `model` and `run` follow it (they are opened and computed anew when the page is loaded
 * elsewhere). The keys that are not the page's are the view's own.
 */
import { batch, computed, effect, signal, untracked } from "./html.js";
import { api, ApiError } from "./api.js";

const OWN = ["model", "run", "chat", "system", "ablate"];

/**
 * @typedef {object} Route
 * @property {string} view @property {string} model name as the person gave it, "" if none
 * @property {string | null} run the prompt: text, or ids "1 2 3" of a model without a tokenizer; null: none yet
 * @property {boolean} chat @property {string} system @property {[number, number][]} ablate layers and heads
 * @property {Record<string, string>} params of the view
 */

/** @param {string} hash @returns {Route} */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  const all = new URLSearchParams(query);
  const params = Object.fromEntries([...all].filter(([key]) => !OWN.includes(key)));
  const ablate = (all.get("ablate") ?? "").split(",").filter((pair) => /^\d+\.\d+$/.test(pair));
  return {
    view: path || "overview",
    model: all.get("model") ?? "",
    run: all.get("run"),
    chat: all.get("chat") === "1",
    system: all.get("system") ?? "",
    ablate: ablate.map((pair) => /** @type {[number, number]} */ (pair.split(".").map(Number))),
    params,
  };
}

/** @param {Route} route */
export function routeHash({ view, model, run, chat, system, ablate, params }) {
  const all = new URLSearchParams();
  if (model) all.set("model", model);
  if (run !== null) all.set("run", run);
  if (chat) all.set("chat", "1");
  if (system) all.set("system", system);
  if (ablate.length) all.set("ablate", ablate.map((pair) => pair.join(".")).join(","));
  for (const [key, value] of Object.entries(params)) all.set(key, value);
  const query = all.toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

export const route = signal(parseRoute(location.hash));
addEventListener("hashchange", () => (route.value = parseRoute(location.hash)));

/**
 * Changes the address: a new entry of the history if `push`, else in place (sliders, cursors). A browser may
 * refuse an address that is megabytes long, or changes too often; the page then goes on without it.
 */
export function go(patch, push = true) {
  const next = { ...route.peek(), ...patch };
  const hash = routeHash(next);
  try {
    if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
  } catch (error) {
    console.info(error.message);
  }
  route.value = next;
}

/** The address of a view, as a link has it: the same model and run, only these keys of its own. */
export const linkTo = (view, params = {}) =>
  routeHash({ ...route.value, view, params: Object.fromEntries(Object.entries(params).map(([k, v]) => [k, String(v)])) });

/** A view's own keys with its defaults; each is of its default's type. */
export function typedParams(params, defaults) {
  return Object.fromEntries(
    Object.entries(defaults).map(([key, value]) => {
      const given = params[key];
      if (given === undefined) return [key, value];
      if (typeof value === "boolean") return [key, given === "1"];
      if (typeof value !== "number") return [key, given];
      return [key, given !== "" && Number.isFinite(Number(given)) ? Number(given) : value];
    }),
  );
}

/** Changes some of the current view's keys; what equals the default is left out of the address. */
export function setParams(patch, defaults) {
  const params = { ...route.peek().params };
  for (const [key, value] of Object.entries(patch)) {
    if (value === defaults[key] || value === undefined || value === null) delete params[key];
    else params[key] = typeof value === "boolean" ? (value ? "1" : "0") : String(value);
  }
  go({ params }, false);
}

/** The open model (API's `Model`), null: none. */
export const model = signal(null);
/** The run on the page (API's `Run`), null: none. */
export const run = signal(null);
/** What is being done: "" | "open" | "run". */
export const pending = signal("");
/** Errors not yet put away, newest last. @type {import("./html.js").Signal} of {what, why, next, key}[] */
export const alerts = signal([]);

let alertKey = 0;

/** Shows an error to the person. What was given up on purpose (an abort) is none. */
export function report(error) {
  if (error?.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  const shown = { what: error?.what ?? String(error), why: error?.why ?? "", next: error?.next ?? "", key: ++alertKey };
  const same = alerts.peek().filter((other) => other.what !== shown.what || other.why !== shown.why);
  alerts.value = [...same, shown].slice(-3);
}

export const dismiss = (key) => (alerts.value = alerts.peek().filter((alert) => alert.key !== key));

/** @type {Map<string, Promise<any>>} runs by what they are of */
const runs = new Map();

/** The body of `POST /api/models/ID/runs` that the prompt field means, for this model. */
export function runBody(model, { run, chat = false, system = "", ablate = [] }) {
  const body = ablate.length ? { ablate } : {};
  if (!model.has_tokenizer) return { ...body, ids: run.split(/[\s,]+/).filter(Boolean).map(Number) };
  if (!chat) return { ...body, text: run };
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: run }];
  return { ...body, messages, chat: true };
}

/**
 * A run of this prompt by this model, asked for once. For views that need a second run beside the page's.
 * @param {{id: string, has_tokenizer: boolean}} model
 * @param {{run: string, chat?: boolean, system?: string, ablate?: [number, number][]}} what
 */
export function runOf(model, what) {
  const key = JSON.stringify([model.id, runBody(model, what)]);
  if (!runs.has(key)) {
    const made = api.post(`/api/models/${model.id}/runs`, runBody(model, what));
    runs.set(key, made);
    made.catch(() => runs.delete(key));
  }
  return runs.get(key);
}

/** The server let a run go: make it anew from its prompt. */
api.onRunGone = async (id) => {
  for (const [key, made] of runs) {
    if ((await made.catch(() => null))?.id !== id) continue;
    const [modelId, body] = JSON.parse(key);
    const again = api.post(`/api/models/${modelId}/runs`, body);
    runs.set(key, again);
    again.catch(() => runs.delete(key));
    const fresh = await again;
    if (run.peek()?.id === id) run.value = fresh;
    return fresh.id;
  }
  return null;
};

/** Opens a model by name or path without showing it: for views that compare. */
export const openModel = (name) => api.post("/api/models", { name });

const wantedModel = computed(() => route.value.model);
const wantedRun = computed(() => {
  const { run, chat, system, ablate } = route.value;
  return run === null ? null : JSON.stringify({ run, chat, system, ablate });
});

/** Lets `model` and `run` follow the address. */
export function follow() {
  effect(() => {
    const name = wantedModel.value;
    untracked(() => showModel(name));
  });
  effect(() => {
    const [what, of] = [wantedRun.value, model.value];
    untracked(() => showRun(of, what));
  });
}

async function showModel(name) {
  batch(() => {
    model.value = null;
    run.value = null;
  });
  if (!name) return;
  pending.value = "open";
  try {
    const opened = await openModel(name);
    if (wantedModel.peek() === name) model.value = opened;
  } catch (error) {
    if (wantedModel.peek() === name) report(error);
  } finally {
    if (wantedModel.peek() === name && pending.peek() === "open") pending.value = "";
  }
}

async function showRun(of, what) {
  if (!of?.has_weights || what === null) return void (run.value = null);
  pending.value = "run";
  const current = () => wantedRun.peek() === what && model.peek()?.id === of.id;
  try {
    const made = await runOf(of, JSON.parse(what));
    if (current()) run.value = made;
  } catch (error) {
    if (!current()) return;
    run.value = null;
    report(error);
  } finally {
    if (current() && pending.peek() === "run") pending.value = "";
  }
}
