/** The page: rail of views, top bar, the view itself. Everything shown follows the address (state.js). */
import { computed, html, render, signal, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { api, ApiError } from "./api.js";
import { Button, Choice, TextField, Toggle } from "./components/controls.js";
import { Loading, Notice } from "./components/frame.js";
import { count } from "./format.js";
import { language, LANGUAGES, loadTexts, preferredLanguage, setLanguage, stored, t } from "./i18n.js";
import { alerts, dismiss, follow, go, linkTo, model, pending, report, route, run, setParams, typedParams } from "./state.js";
import { setTheme, theme, THEMES } from "./theme.js";

/** In the order of the rail; the keys 1 to 9 and 0 choose them. */
export const VIEWS = ["overview", "tokens", "steps", "attention", "residual", "next", "cache", "teaching", "ledger", "compare"];

const FIRST_PROMPT = "The capital of France is";

/** @type {Map<string, any>} view modules that have been loaded, with their texts */
const loaded = new Map();
/** The view on the page: its module, or null while it is loaded. */
const shown = signal(null);

async function showView(id) {
  const known = VIEWS.includes(id) ? id : "overview";
  try {
    const [module] = await Promise.all([import(`./views/${known}.js`), loadTexts([known])]);
    loaded.set(known, module);
    if (route.peek().view === id) shown.value = module;
  } catch (error) {
    report(error);
  }
}

/** The parts whose texts are on the page, to fetch when the language changes. */
const textParts = () => ["shell", ...loaded.keys()];

function Rail() {
  const { view } = route.value;
  const rail = useRef(null);
  useEffect(() => {
    const current = rail.current.querySelector("[aria-current]");
    if (current) rail.current.scrollLeft = current.offsetLeft - rail.current.clientWidth / 3;
  }, [view, language.value]);
  return html`<nav class="rail" ref=${rail} aria-label=${t("shell.views")}>
    <ol>
      ${VIEWS.map((id, i) => html`<li key=${id}>
        <a href=${linkTo(id)} class=${id === view ? "on" : ""} aria-current=${id === view ? "page" : undefined} data-testid="rail-${id}">
          <span class="key number" aria-hidden="true">${(i + 1) % 10}</span><span>${t(`shell.view_${id}`)}</span>
        </a>
      </li>`)}
    </ol>
  </nav>`;
}

function ModelButton({ onClick }) {
  const open = model.value;
  return html`<button type="button" class="button model-button" data-testid="model-button" onClick=${onClick} title=${t("shell.choose_model")}>
    <span class="model-name">${open ? open.name : route.value.model || t("shell.no_model")}</span>
    ${open && html`<span class="muted number">${count(open.params)}</span>`}
  </button>`;
}

function PromptForm() {
  const { run: asked, chat, system, ablate } = route.value;
  const open = model.value;
  const [text, setText] = useState(asked ?? FIRST_PROMPT);
  const field = useRef(null);
  useEffect(() => { if (asked !== null) setText(asked); }, [asked]);
  useEffect(() => { if (open && !open.has_tokenizer && asked === null) setText("1 2 3 4 5 6 7"); }, [open]);
  const able = open?.has_weights;
  const submit = (event) => {
    event.preventDefault();
    if (!able) return;
    const most = open.limits?.prompt_chars ?? Infinity;
    const typed = field.current.value;
    if (typed.length > most) report(new ApiError({ what: t("shell.too_long"), why: t("shell.too_long_why", { n: typed.length, most }), next: t("shell.too_long_next") }));
    else go({ run: typed });
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="prompt" onSubmit=${submit} role="search" aria-label=${t("shell.prompt")}>
    <textarea ref=${field} rows="1" data-testid="prompt" value=${text} disabled=${open && !able} spellcheck="false"
      aria-label=${open && !open.has_tokenizer ? t("shell.prompt_ids") : t("shell.prompt")}
      placeholder=${t("shell.prompt_hint")} onInput=${(e) => setText(e.target.value)} onKeyDown=${keys}></textarea>
    ${open?.has_chat && html`<${Toggle} label=${t("shell.chat")} help=${t("shell.chat_help")} checked=${chat} onChange=${(on) => go({ chat: on, system: on ? system : "" })} testid="chat" />`}
    ${ablate.length > 0 && html`<button type="button" class="button quiet" data-testid="ablated" title=${t("shell.ablated_help")} onClick=${() => go({ ablate: [] })}>${t("shell.ablated", { n: ablate.length })} ×</button>`}
    <button type="submit" class="button primary" data-testid="run" disabled=${!able || pending.value !== ""}>${pending.value === "run" ? t("shell.running") : t("shell.run")}</button>
  </form>`;
}

function Settings() {
  return html`<div class="settings">
    <label><span class="hidden">${t("shell.language")}</span>
      <select data-testid="language" value=${language.value} onChange=${(e) => { stored("language", e.target.value); setLanguage(e.target.value, textParts()).catch(report); }}>
        ${LANGUAGES.map((tag) => html`<option key=${tag} value=${tag} lang=${tag} selected=${tag === language.value}>${{ en: "English", "zh-CN": "简体中文" }[tag]}</option>`)}
      </select></label>
    <label><span class="hidden">${t("shell.theme")}</span>
      <select data-testid="theme" value=${theme.value} onChange=${(e) => setTheme(e.target.value)}>
        ${THEMES.map((name) => html`<option key=${name} value=${name} selected=${name === theme.value}>${t(`shell.theme_${name}`)}</option>`)}
      </select></label>
    <button type="button" class="button quiet" data-testid="keys-button" aria-label=${t("shell.keys")} title=${t("shell.keys")} onClick=${() => (dialog.value = "keys")}>?</button>
  </div>`;
}

/** Which dialog is open: "" | "model" | "keys". */
const dialog = signal("");

function Dialog({ name, title, children }) {
  const element = useRef(null);
  const open = dialog.value === name;
  useLayoutEffect(() => {
    if (open && !element.current.open) element.current.showModal();
    if (!open && element.current.open) element.current.close();
  }, [open]);
  return html`<dialog ref=${element} aria-label=${title} data-testid="dialog-${name}" onClose=${() => { if (dialog.peek() === name) dialog.value = ""; }}
    onClick=${(e) => { if (e.target === element.current) dialog.value = ""; }}>
    ${open && html`<div class="dialog">
      <header><h2>${title}</h2><button type="button" class="button quiet" data-testid="close" aria-label=${t("shell.close")} onClick=${() => (dialog.value = "")}>×</button></header>
      ${children}
    </div>`}
  </dialog>`;
}

function Models({ onChoose }) {
  const [state, setState] = useState(null);
  const [path, setPath] = useState("");
  useEffect(() => { api.get("/api/state").then(setState, report); }, []);
  if (!state) return html`<${Loading} />`;
  const choose = (name) => { onChoose?.(); go({ model: name, run: null, ablate: [], chat: false, system: "", params: {} }); };
  const names = new Set();
  const all = [...state.models.map((m) => ({ name: m.name, kind: "open" })), ...state.available]
    .filter(({ name }) => !names.has(name) && names.add(name));
  const groups = [["open", (m) => m.kind === "open"], ["fetched", (m) => m.kind !== "open" && m.has_weights], ["preset", (m) => m.kind !== "open" && !m.has_weights]];
  return html`<div class="models">
    ${groups.map(([group, belongs]) => all.some(belongs) && html`<section key=${group}>
      <h3>${t(`shell.models_${group}`)}</h3>
      <p class="note">${t(`shell.models_${group}_note`)}</p>
      <ul class="model-list">
        ${all.filter(belongs).map(({ name }) => html`<li key=${name}><button type="button" class="button" data-testid="model-${name}" onClick=${() => choose(name)}>${name}</button></li>`)}
      </ul>
    </section>`)}
    <form onSubmit=${(e) => { e.preventDefault(); if (path.trim()) choose(path.trim()); }}>
      <${TextField} label=${t("shell.model_path")} value=${path} onInput=${setPath} onChange=${setPath} testid="model-path" placeholder=${t("shell.model_path_hint")} />
      <button type="submit" class="button" data-testid="model-open">${t("shell.open")}</button>
    </form>
  </div>`;
}

const KEYS = [["1 … 9, 0", "views"], ["/", "prompt"], ["?", "keys"], ["m", "models"], ["← → ↑ ↓", "arrows"], ["Home End", "ends"], ["Enter", "enter"], ["Space", "space"], ["[ ]", "layer"], ["Esc", "escape"]];

const Keys = () => html`<dl class="keys">${KEYS.map(([key, name]) => html`<div key=${name}><dt><kbd>${key}</kbd></dt><dd>${t(`shell.key_${name}`)}</dd></div>`)}</dl>`;

const Alerts = () => html`<div class="alerts" role="alert" data-testid="alerts">
  ${alerts.value.map(({ what, why, next, key }) => html`<div class="alert" key=${key} data-testid="alert">
    <p><strong>${what}</strong>${why && html` ${why}`}</p>
    ${next && html`<p>${next}</p>`}
    <button type="button" class="button quiet" aria-label=${t("shell.dismiss")} onClick=${() => dismiss(key)}>×</button>
  </div>`)}
</div>`;

/** What has to be there first, or null if the view can be shown. */
function missing(needs) {
  const open = model.value;
  if (needs === null) return null;
  if (pending.value === "open") return html`<${Loading} label=${t("shell.opening", { name: route.value.model })} />`;
  if (!open) return html`<section class="welcome" data-testid="welcome"><h1 id="view-title" tabindex="-1">${t("shell.welcome")}</h1><p>${t("shell.welcome_text")}</p><${Models} /></section>`;
  if (needs === "model") return null;
  if (!open.has_weights) return html`<${Notice} testid="needs-weights"><p>${t("shell.needs_weights", { name: open.name })}</p><p>${t("shell.needs_weights_next")} <code>openbook models get smollm2-135m</code></p>
    <${Button} kind="primary" testid="choose-weights" onClick=${() => (dialog.value = "model")}>${t("shell.choose_model")}</${Button}></${Notice}>`;
  if (needs === "weights" || run.value) return null;
  if (pending.value === "run") return html`<${Loading} label=${t("shell.computing")} />`;
  const prompt = open.has_tokenizer ? FIRST_PROMPT : "1 2 3 4 5 6 7";
  return html`<${Notice} testid="needs-run"><p>${t("shell.needs_run")}</p>
    <${Button} kind="primary" testid="run-first" onClick=${() => go({ run: route.peek().run ?? prompt })}>${t("shell.run_this", { text: route.value.run ?? prompt })}</${Button}></${Notice}>`;
}

function Main() {
  const module = shown.value;
  const main = useRef(null);
  useLayoutEffect(() => { if (main.current.dataset.view && module) main.current.querySelector("#view-title")?.focus({ preventScroll: true }); main.current.dataset.view = module?.id ?? ""; window.scrollTo(0, 0); }, [module]);
  if (!module) return html`<main ref=${main} id="content" tabindex="-1"><${Loading} /></main>`;
  const lack = missing(module.needs);
  return html`<main ref=${main} id="content" tabindex="-1" aria-busy=${String(pending.value !== "")}>
    ${lack ? html`<div class="view">${lack.type === "section" ? lack : html`<h1 id="view-title" tabindex="-1">${t(`shell.view_${module.id}`)}</h1>${lack}`}</div>`
      : html`<${module.View} key=${module.id} model=${model.value} run=${run.value} params=${paramsOf(module)} setParams=${(patch) => setParams(patch, module.defaults)} t=${t} lang=${language.value} />`}
  </main>`;
}

/** @type {Map<string, any>} a signal for each view, of its own keys of the address */
const paramSignals = new Map();
function paramsOf({ id, defaults }) {
  if (!paramSignals.has(id)) paramSignals.set(id, computed(() => typedParams(route.value.view === id ? route.value.params : {}, defaults)));
  return paramSignals.get(id);
}

function App() {
  return html`<a class="skip" href="#content" onClick=${(e) => { e.preventDefault(); document.getElementById("content").focus(); }}>${t("shell.skip")}</a>
    <header class="top">
      <a class="brand" href=${linkTo("overview")} data-testid="brand">Openbook</a>
      <${ModelButton} onClick=${() => (dialog.value = "model")} />
      <${PromptForm} />
      <${Settings} />
    </header>
    <div class="page"><${Rail} /><${Main} /></div>
    <${Alerts} />
    <${Dialog} name="model" title=${t("shell.choose_model")}><${Models} onChoose=${() => (dialog.value = "")} /></${Dialog}>
    <${Dialog} name="keys" title=${t("shell.keys")}><${Keys} /></${Dialog}>`;
}

/** Keys that work wherever no field has the focus. */
function shortcuts(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || dialog.peek()) return;
  if (event.target.closest?.("input:not([type=radio], [type=checkbox], [type=range]), textarea")) return;
  const digit = /^[0-9]$/.test(event.key) ? (Number(event.key) + 9) % 10 : -1;
  if (digit >= 0) go({ view: VIEWS[digit], params: {} });
  else if (event.key === "?") dialog.value = "keys";
  else if (event.key === "m") dialog.value = "model";
  else if (event.key === "/") document.querySelector("[data-testid=prompt]").focus();
  else return;
  event.preventDefault();
}

/** No model in the address: the one that the server was started with. */
async function firstModel() {
  if (route.peek().model) return;
  const { models } = await api.get("/api/state");
  if (models.length && !route.peek().model) go({ model: models[0].name }, false);
}

async function start() {
  setTheme(stored("theme") ?? "auto");
  await setLanguage(preferredLanguage(), ["shell"]);
  render(html`<${App} />`, document.getElementById("app"));
  addEventListener("keydown", shortcuts);
  route.subscribe(({ view }) => { if (shown.peek()?.id !== view) showView(view); });
  follow();
  await firstModel();
}

start().catch(report);
