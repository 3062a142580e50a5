/** The architecture as a strip of stages, and the steps of one of them with letters and numbers side by side. */
import { html, useRef } from "../html.js";
import { api } from "../api.js";
import { NumberField } from "../components/controls.js";
import { Facts, Loading, Section, Shape, StepLink, useAsync, ViewFrame } from "../components/frame.js";
import { DataTable } from "../components/table.js";
import { FigureTools } from "../components/tools.js";
import { bytes, count, flops, int } from "../format.js";
import { linkTo } from "../state.js";

export const id = "overview";
export const needs = "model";
/** `tokens` 0: as many as the run on the page has, 12 without one. */
export const defaults = { tokens: 0, stage: "" };

const PROMPT_TOKENS = 12;

export function View({ model, run, params, setParams, t }) {
  const tokens = params.value.tokens || run?.ids.length || PROMPT_TOKENS;
  const { value: book } = useAsync((signal) => api.get(`/api/models/${model.id}/overview?tokens=${tokens}`, signal), [model.id, tokens]);
  const toolbar = html`<${NumberField} label=${t("overview.tokens")} value=${tokens} min=${1} max=${1_000_000} onChange=${(n) => setParams({ tokens: n })} testid="overview-tokens" />`;
  return html`<${ViewFrame} id=${id} title=${t("overview.title")} about=${t("overview.about")} toolbar=${toolbar}>
    ${book ? html`<${Book} model=${model} run=${run} book=${book} params=${params.value} setParams=${setParams} t=${t} />` : html`<${Loading} />`}
  </${ViewFrame}>`;
}

function Book({ model, run, book, params, setParams, t }) {
  const chosen = book.stages.find(({ id }) => id === params.stage) ?? book.stages.find(({ kind }) => kind === "layers") ?? book.stages[0];
  const title = (stage) => stageTitle(stage, t);
  const { spec } = model;
  const letters = { ...book.letters, ...sizesOf(chosen) };
  const attention = letters.C ? t("overview.heads_latent", { n: spec.n_heads, rank: letters.C }) : spec.n_kv_heads === spec.n_heads ? t("overview.heads_all", { n: spec.n_heads }) : t("overview.heads_shared", { heads: spec.n_heads, shared: spec.n_kv_heads });
  return html`
    <${Facts} testid="overview-facts" rows=${[
      [t("overview.params"), html`${int(book.totals.params)}`, "overview-params"],
      [t("overview.weights", { dtype: book.dtype }), bytes(book.totals.bytes)],
      [t("overview.flops"), flops(book.totals.flops), "overview-flops"],
      [t("overview.layers"), int(spec.layers)],
      [t("overview.attention"), attention],
      ...(spec.experts ? [[t("overview.experts"), t("overview.experts_of", { active: spec.active_experts, all: spec.experts })]] : []),
      [t("overview.positions"), int(spec.max_positions)],
    ]} />
    <${Strip} model=${model} book=${book} chosen=${chosen} title=${title} onChoose=${(stage) => setParams({ stage: stage.id })} t=${t} />
    <${Section} title=${title(chosen)} note=${stageNote(chosen, t)} testid="overview-stage">
      <${Flow} stage=${chosen} t=${t} linked=${model.has_weights} />
    </${Section}>
    <${Section} title=${t("overview.table")}>
      <${DataTable} testid="overview-steps" height=${900} caption=${`${title(chosen)}: ${t("overview.table")}`} name=${`${model.name}-${chosen.id}`} rows=${chosen.steps.map((step) => ({ ...step, key: step.name, letters: `[${step.axes.join(", ")}]`, numbers: `[${step.shape.join(", ")}]` }))} columns=${[
        { key: "local", label: t("overview.step"), format: (local, row) => (model.has_weights ? html`<${StepLink} name=${row.name} label=${local} />` : html`<code>${local}</code>`) },
        { key: "formula", label: t("overview.formula"), sort: false, format: (formula) => html`<span class="formula" lang="en">${formula}</span>` },
        { key: "letters", label: t("overview.letters"), sort: false, format: (text) => html`<span class="shape">${text}</span>` },
        { key: "numbers", label: t("overview.numbers"), sort: false, format: (text) => html`<span class="shape">${text}</span>` },
        { key: "params", label: t("overview.params"), format: (n, row) => `${int(n)}${row.tied_to ? ` (${t("overview.tied", { name: row.tied_to })})` : ""}` },
        { key: "flops", label: "FLOPs", format: "int" },
        { key: "bytes", label: t("overview.output"), format: "bytes" },
      ]} />
      <p class="note" lang="en">${[book.conventions].flat().join(" · ")}</p>
    </${Section}>
    <${Section} title=${t("overview.legend")}>
      <dl class="letters-list">${Object.entries(letters).map(([letter, number]) => html`<div key=${letter}><dt>${letter}</dt><dd><span class="number">${int(number)}</span> <span class="muted">${letterMeaning(letter, book, t)}</span></dd></div>`)}</dl>
    </${Section}>`;
}

/** The sizes of a stage's single letters: layers may differ from the first. */
function sizesOf(stage) {
  return Object.fromEntries(stage.steps.flatMap(({ axes, shape }) => axes.map((letter, i) => [letter, shape[i]]).filter(([letter]) => /^[A-Z]$/.test(letter))));
}

const letterMeaning = (letter, book, t) => {
  const text = t(`overview.letter_${letter}`);
  return text === `overview.letter_${letter}` ? (book.meanings?.[letter] ?? "") : text;
};

/** "57 equal layers, 3 to 59", "Embedding", ... */
function stageTitle(stage, t) {
  if (stage.kind !== "layers") return t(`overview.stage_${stage.kind}`);
  const { layers } = stage;
  if (layers.length === 1) return t("overview.layers_one", { first: layers[0] });
  const solid = layers.at(-1) - layers[0] === layers.length - 1;
  return t(solid ? "overview.layers_all" : "overview.layers_some", { n: layers.length, first: layers[0], last: layers.at(-1) });
}

function stageNote(stage, t) {
  if (stage.kind !== "layers") return t(`overview.note_${stage.kind}`);
  const has = (end) => stage.steps.some(({ local }) => local.endsWith(end));
  return [t("overview.note_layers"), has("mlp.router") && t("overview.note_experts"), has("attn.kv_down") && t("overview.note_latent")].filter(Boolean).join(" ");
}

const [WIDE, TALL, GAP] = [150, 66, 34];

/** The stages from left to right as boxes on the line of the residual stream. */
function Strip({ model, book, chosen, title, onChoose, t }) {
  const svg = useRef(null);
  const width = book.stages.length * (WIDE + GAP) + GAP;
  const table = () => ({
    columns: [{ key: "stage", label: t("overview.stage") }, { key: "times", label: t("overview.times") }, { key: "params", label: t("overview.params"), format: "int" }, { key: "flops", label: "FLOPs", format: "int" }],
    rows: book.stages.map((stage) => ({ stage: title(stage), times: stage.count, params: stage.params * stage.count, flops: stage.flops * stage.count })),
  });
  const walk = (event, i) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: book.stages.length - 1 }[event.key];
    if (to === undefined || !book.stages[to]) return;
    event.preventDefault();
    onChoose(book.stages[to]);
    event.currentTarget.parentNode.parentNode.children[to]?.firstElementChild.focus();
  };
  return html`<figure class="architecture" data-testid="architecture">
    <div class="figure-head"><figcaption>${t("overview.strip")}</figcaption><${FigureTools} title=${t("overview.strip")} name=${`${model.name}-overview`} table=${table} picture=${() => svg.current} testid="architecture" /></div>
    <div class="stage-scroll">
      <ol class="stage-strip" aria-label=${t("overview.strip")}>
        ${book.stages.map((stage, i) => html`<li key=${stage.id} class="stage-${stage.kind}">
          <button type="button" aria-pressed=${String(stage === chosen)} data-testid="stage-${stage.id}" onClick=${() => onChoose(stage)} onKeyDown=${(e) => walk(e, i)}>
            <strong>${t(`overview.stage_${stage.kind}`)}${stage.kind === "layers" && html` <span class="times number">× ${stage.count}</span>`}</strong>
            <span class="muted number">${stage.kind === "layers" ? layersText(stage) : shapeOf(stage)}</span>
            <span class="number">${paramsText(stage, t)}</span>
          </button>
        </li>`)}
      </ol>
    </div>
    <svg class="offscreen" ref=${svg} viewBox="0 0 ${width} ${TALL + 2 * GAP}" width=${width} height=${TALL + 2 * GAP} aria-hidden="true">
      <line class="axis" x1="0" x2=${width} y1=${GAP + TALL / 2} y2=${GAP + TALL / 2} />
      ${book.stages.map((stage, i) => html`<g key=${stage.id} transform="translate(${GAP + i * (WIDE + GAP)} ${GAP})">
        <rect class="stage-box" width=${WIDE} height=${TALL} />
        <text class="stage-name" x=${WIDE / 2} y="20" text-anchor="middle">${t(`overview.stage_${stage.kind}`)}${stage.kind === "layers" ? ` × ${stage.count}` : ""}</text>
        <text x=${WIDE / 2} y="38" text-anchor="middle">${stage.kind === "layers" ? layersText(stage) : shapeOf(stage)}</text>
        <text x=${WIDE / 2} y="56" text-anchor="middle">${paramsText(stage, t)}</text>
      </g>`)}
    </svg>
  </figure>`;
}

/** What a stage holds of its own; a head may have only what the embedding has. */
function paramsText(stage, t) {
  const tied = stage.steps.find((step) => step.tied_to)?.tied_to;
  return stage.params === 0 && tied ? t("overview.tied", { name: tied }) : t("overview.params_n", { n: count(stage.params * stage.count) });
}

const shapeOf = (stage) => `[${stage.steps.at(-1).shape.join(", ")}]`;

/** [0, 1, 2, 5] → "0–2, 5" */
export function layersText({ layers }) {
  const spans = [];
  for (const layer of layers) {
    if (spans.length && layer === spans.at(-1)[1] + 1) spans.at(-1)[1] = layer;
    else spans.push([layer, layer]);
  }
  const shown = spans.slice(0, 4).map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  return shown.join(", ") + (spans.length > 4 ? ", …" : "");
}

/** Queries, keys and values, and a gate and what it gates, read the same and do not read each other. */
const SIDE_BY_SIDE = /\.(q|k|v|gate|up|[qk]_rope|[qk]_norm)$/;

/** The steps in rows. */
function rowsOf(steps) {
  const rows = [];
  for (const step of steps) {
    const part = step.local.split(".").slice(0, -1).join(".");
    const last = rows.at(-1);
    const beside = last && last.part === part && last.kind === step.kind && SIDE_BY_SIDE.test(step.local) && SIDE_BY_SIDE.test(last.steps[0].local);
    if (beside) last.steps.push(step);
    else rows.push({ part, kind: step.kind, steps: [step] });
  }
  return rows;
}

/** Consecutive rows that leave the residual stream and come back to it. */
function branches(rows) {
  const found = [];
  for (const row of rows) {
    const name = row.steps[0].local.split(/[._]/)[0];
    if (found.at(-1)?.name === name) found.at(-1).rows.push(row);
    else found.push({ name, rows: [row] });
  }
  return found;
}

/** The steps of a stage as they follow each other; the line at the left is the residual stream. */
function Flow({ stage, t, linked }) {
  const box = (step) => {
    const inside = html`<span class="flow-name">${step.local}</span><${Shape} axes=${step.axes} shape=${step.shape} />`;
    return linked ? html`<a key=${step.name} class="flow-step kind-${family(step)}" href=${stepHref(step)} title=${step.formula} data-testid="flow-${step.local}">${inside}</a>`
      : html`<span key=${step.name} class="flow-step kind-${family(step)}" title=${step.formula}>${inside}</span>`;
  };
  return html`<div class="flow" data-testid="flow">
    ${branches(rowsOf(stage.steps)).map((branch, i) => html`<div class="flow-branch" key=${i}>
      ${stage.kind === "layers" && html`<h3>${t(`overview.branch_${branch.name}`)}</h3>`}
      ${branch.rows.map((row, r) => html`<div class="flow-row ${row.kind === "add" ? "adds" : ""}" key=${r}>${row.steps.map(box)}</div>`)}
    </div>`)}
  </div>`;
}

/** Which part of the model a step belongs to, for its colour. */
function family({ local, kind }) {
  if (kind === "add" || kind === "embedding") return "stream";
  if (kind === "norm") return "norm";
  return local.startsWith("attn") ? "attention" : "mlp";
}

const stepHref = (step) => linkTo("steps", { step: step.name });
