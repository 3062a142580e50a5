/** Next token: from logits to one drawn token, every stage beside the others, while the sliders move. */
import { html, useState } from "../html.js";
import { api } from "../api.js";
import { float, int, percent, visible } from "../format.js";
import { Button, NumberField, Slider } from "../components/controls.js";
import { Section, useAsync, ViewFrame } from "../components/frame.js";
import { Loaded, quiet } from "../components/loaded.js";
import { Pieces } from "../components/pieces.js";
import { paintStages } from "../components/stages.js";
import { DataTable } from "../components/table.js";
import { FigureTools } from "../components/tools.js";
import { within } from "./residual.js";

export const id = "next";
export const needs = "run";
export const defaults = { position: -1, temperature: 1, top_k: 0, top_p: 1, min_p: 0, seed: 0, rows: 12 };

const SAMPLING = ["temperature", "top_k", "top_p", "min_p"];
const LISTED = 40; // tokens the server is asked for
const FEW = defaults.rows;

/** What a stage does with the settings asked for, or has drawn with them, as the key of a text and its values. */
export function stageSays(name, { asked, uniform }) {
  const value = asked[name];
  if (name === "logits") return ["next.stage.logits.say", {}];
  if (name === "draw" && !Number.isFinite(uniform)) return ["next.stage.draw.greedy", {}];
  if (name === "draw") return ["next.stage.draw.with", { seed: String(asked.seed), uniform: float(uniform) }];
  if (name === "temperature" && value < 1e-5) return ["next.stage.temperature.greedy", {}];
  if (name === "temperature" && value === 1) return ["next.stage.temperature.off", {}];
  const off = { top_k: value <= 0, top_p: value >= 1, min_p: value <= 0 }[name];
  return off ? ["next.stage.off", {}] : [`next.stage.${name}.say`, { value: String(value) }];
}

/**
 * The last stage's tokens as parts of [0, 1), laid end to end as the sampler does: by likelihood after top-k, else
 * by id. Null where they lie among tokens that are not listed.
 * @param {{ordered: boolean, kept: number, rows: {id: number, text: string, p: number, kept: boolean}[]}} stage
 */
export function laidOut({ ordered, kept, rows }) {
  const left = rows.filter((row) => row.kept && row.p > 0);
  if (!ordered && kept > rows.length) return null;
  const parts = ordered ? left : [...left].sort((a, b) => a.id - b.id);
  return { parts, rest: Math.max(0, 1 - parts.reduce((sum, part) => sum + part.p, 0)) };
}

export function View({ model, run, params: shown, setParams, t }) {
  const params = shown.value;
  const at = within(params.position, run.ids.length);
  const { temperature, top_k, top_p, min_p, seed } = params;
  const [attempt, setAttempt] = useState(0);
  const asked = { position: at, temperature, top_k, top_p, min_p, seed, n: LISTED };
  const result = useAsync(async (signal) => {
    await quiet(120, signal);
    return { ...(await api.post(`/api/runs/${run.id}/next`, asked, signal)), asked };
  }, [run.id, JSON.stringify(asked), attempt]);
  const toolbar = html`<${Sampling} ...${{ params, setParams, t }} />`;
  return html`<${ViewFrame} id=${id} title=${t("next.title")} about=${t("next.about")} toolbar=${toolbar}>
    <p class="note" id="next-position-help">${t("next.position.help")}</p>
    <${Pieces} pieces=${run.pieces} selected=${at} onSelect=${(i) => setParams({ position: i === run.ids.length - 1 ? -1 : i })}
      label=${t("next.position")} testid="next-positions" />
    <${Loaded} of=${result} name="next" again=${() => setAttempt(attempt + 1)}>
      ${(found) => html`<${Stages} ...${{ found, params, setParams, t, vocab: model.spec.vocab_size }} />`}
    <//>
  <//>`;
}

function Sampling({ params, setParams, t }) {
  const slider = (key, min, max, step, format) => html`<${Slider} label=${t(`next.${key}`)} help=${t(`next.${key}.help`)} value=${params[key]}
    min=${min} max=${max} step=${step} format=${format} onInput=${(value) => setParams({ [key]: value })} testid="next-${key}" />`;
  const reset = Object.fromEntries([...SAMPLING, "seed"].map((key) => [key, defaults[key]]));
  return html`
    ${slider("temperature", 0, 2, 0.05, (v) => float(v, 3))} ${slider("top_k", 0, 100, 1, (v) => (v > 0 ? int(v) : t("next.stage.off")))}
    ${slider("top_p", 0, 1, 0.01, (v) => (v < 1 ? float(v, 3) : t("next.stage.off")))}
    ${slider("min_p", 0, 0.5, 0.005, (v) => (v > 0 ? float(v, 3) : t("next.stage.off")))}
    <${NumberField} label=${t("next.seed")} help=${t("next.seed.help")} value=${params.seed} min=${0} max=${2 ** 31 - 1} onChange=${(seed) => setParams({ seed: Math.floor(seed) })} testid="next-seed" />
    <${Button} kind="primary" onClick=${() => setParams({ seed: params.seed + 1 })} testid="next-again">${t("next.again")}<//>
    <${Button} kind="quiet" onClick=${() => setParams(reset)} testid="next-reset">${t("next.reset")}<//>`;
}

function Stages({ found, params, setParams, t, vocab }) {
  const { stages, drawn, uniform, actual, asked } = found;
  const last = stages[stages.length - 1];
  const shown = params.rows > FEW ? LISTED : FEW;
  const first = stages[0].rows[0];
  return html`
    <figure class="stages-figure" data-testid="stages">
      <div class="figure-head"><figcaption>${t("next.picture")}</figcaption>
        <${FigureTools} title=${t("next.picture")} name="next-token" table=${() => asTable(stages)} record=${() => found} testid="stages"
          picture=${() => paintStages(stages.map((stage) => ({ ...stage, title: t(`next.stage.${stage.name}`) })), shown, drawn.id)}>
          <${Button} kind="quiet" onClick=${() => setParams({ rows: shown === FEW ? LISTED : FEW })} testid="stages-more">${t("next.more", { n: shown === FEW ? LISTED : FEW })}<//>
        <//></div>
      <ol class="stages">${stages.map((stage) => html`<${Stage} key=${stage.name} ...${{ stage, found, shown, t }} />`)}</ol>
      <p class="sentence" data-testid="next-sentence">${t("next.sentence", { token: visible(first.text), p: percent(first.p), kept: int(last.kept) })}</p>
    </figure>
    <${Draw} ...${{ last, drawn, uniform, asked, t }} />
    <${Section} title=${t("next.actual.title")} testid="next-actual">
      <p class="sentence" data-testid="actual-sentence">${actual
        ? t("next.actual.sentence", { token: visible(actual.text), rank: int(actual.rank), vocab: int(vocab), p: percent(actual.p), logprob: float(actual.logprob) })
        : t("next.actual.none")}</p>
    <//>
    <details class="more"><summary data-testid="stages-table-open">${t("next.table")}</summary><${StageTable} ...${{ stages, t }} /></details>`;
}

/** One stage: its tokens with bars, those it rules out crossed out. */
function Stage({ stage, found, shown, t }) {
  const { drawn } = found;
  const rows = stage.rows.slice(0, shown);
  const [key, values] = stageSays(stage.name, found);
  const highest = Math.max(...rows.map((row) => row.p ?? 0), 1e-12);
  return html`<li class="stage" data-testid="stage-${stage.name}">
    <h2>${t(`next.stage.${stage.name}`)}${stage.name === "draw" && html` <span class="outcome" data-testid="outcome">${visible(drawn.text)}</span>`}</h2>
    <p class="note">${t(key, values)}<br /><span data-testid="kept-${stage.name}">${t("next.kept", { kept: stage.kept })}</span></p>
    <ol>
      ${rows.map((row) => {
        const on = stage.name === "draw" && row.id === drawn.id;
        return html`<li key=${row.id} class="bar-row ${row.kept ? "" : "cut"} ${on ? "on" : ""}" data-testid="${stage.name}-${row.id}" data-p=${row.p}
          title=${row.logit === null || row.logit === undefined ? undefined : t("next.logit", { logit: float(row.logit) })}>
          <span class="spelled">${visible(row.text)}</span>
          <span class="track" aria-hidden="true"><span class="fill" hidden=${!row.kept} style=${{ width: `${(100 * row.p) / highest}%` }}></span></span>
          <span class="number">${row.kept ? percent(row.p) : t("next.cut")}</span>
        </li>`;
      })}
    </ol>
  </li>`;
}

/** The interval [0, 1), a part for each token, and the number that was drawn. */
function Draw({ last, drawn, uniform, asked, t }) {
  const laid = laidOut(last);
  const greedy = uniform === null || uniform === undefined;
  const words = { token: visible(drawn.text), p: percent(drawn.p), seed: String(asked.seed), uniform: greedy ? "" : float(uniform) };
  return html`<${Section} title=${t("next.drawn.title")} testid="next-draw">
    ${!greedy && laid && html`<div class="interval" role="img" aria-label=${t("next.drawn.strip")} title=${t("next.drawn.strip")}>
      ${laid.parts.map((part) => html`<span key=${part.id} class="part ${part.id === drawn.id ? "on" : ""}" style=${{ width: `${100 * part.p}%` }}
        title="${visible(part.text)} ${percent(part.p)}">${part.p > 0.05 ? visible(part.text) : ""}</span>`)}
      ${laid.rest > 0.001 && html`<span class="part rest" style=${{ width: `${100 * laid.rest}%` }} title="${t("next.drawn.rest")} ${percent(laid.rest)}"></span>`}
      <span class="mark" style=${{ left: `${100 * uniform}%` }}></span>
    </div>`}
    <p class="sentence" data-testid="drawn-sentence" data-drawn=${drawn.id}>${t(greedy ? "next.drawn.greedy" : "next.drawn.sentence", words)}</p>
  <//>`;
}

function StageTable({ stages, t }) {
  const columns = [
    { key: "text", label: t("next.table.token"), format: visible, align: "left" },
    { key: "id", label: t("next.table.id"), format: String, align: "right" },
    { key: "logit", label: t("next.table.logit"), format: "float" },
    ...stages.map((stage) => ({ key: stage.name, label: t(`next.stage.${stage.name}`), format: (p) => (p === 0 ? t("next.cut") : percent(p)), align: "right" })),
  ];
  return html`<${DataTable} columns=${columns} rows=${joined(stages)} caption=${t("next.table")} name="stages" testid="stages-table" />`;
}

/** One row a token, one column a stage: its probability there, 0 once it is cut. */
export function joined(stages) {
  const places = stages.map((stage) => new Map(stage.rows.map((row) => [row.id, row])));
  return stages[0].rows.map((row) => ({
    key: row.id, id: row.id, text: row.text, logit: row.logit,
    ...Object.fromEntries(stages.map((stage, i) => {
      const there = places[i].get(row.id);
      return [stage.name, there?.kept ? there.p : 0];
    })),
  }));
}

/** Every row of every stage, for a file. */
const asTable = (stages) => ({
  columns: ["stage", "kept_of_all", "id", "text", "logit", "p", "kept"].map((key) => ({ key, label: key })),
  rows: stages.flatMap((stage) => stage.rows.map((row) => ({ ...row, stage: stage.name, kept_of_all: stage.kept, kept: row.kept ? 1 : 0 }))),
});
