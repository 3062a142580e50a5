/** Compare: the page's run beside another that differs in one thing: an ablated head, the prompt, or the checkpoint. */
import { html, useEffect, useState } from "../html.js";
import { api } from "../api.js";
import { float, percent, visible } from "../format.js";
import { openModel, report, route, runOf } from "../state.js";
import { LineChart } from "../components/chart.js";
import { Button, Choice, TextField } from "../components/controls.js";
import { Notice, Section, StepLink, useAsync, ViewFrame } from "../components/frame.js";
import { Loaded } from "../components/loaded.js";
import { PairedBars } from "../components/paired.js";
import { Pieces } from "../components/pieces.js";
import { DataTable } from "../components/table.js";
import { layerNumber } from "./residual.js";

export const id = "compare";
export const needs = "run";
export const defaults = { what: "head", heads: "0.0", layer: -1, head: -1, prompt: "", model: "", step: "" };

const WHAT = ["head", "prompt", "model"];

/** "3.2,4.0" → [[3, 2], [4, 0]]; what is no such pair is left out. @returns {[number, number][]} */
export const parseHeads = (text) => text.split(",").filter((pair) => /^\d+\.\d+$/.test(pair)).map((pair) => /** @type {[number, number]} */ (pair.split(".").map(Number)));

export const headsText = (pairs) => pairs.map((pair) => pair.join(".")).join(",");

/** The steps that every layer has, by their local names, each with its points [layer, relative difference]. */
export function byLocalName(steps) {
  const lines = new Map();
  for (const step of steps) {
    const layer = layerNumber(step.name);
    if (layer === null || step.rel === null) continue;
    const local = step.name.replace(/^layers\.\d+\./, "");
    lines.set(local, [...(lines.get(local) ?? []), [layer, step.rel]]);
  }
  return lines;
}

/** The first step whose tensors differ, or null. */
export const firstDifferent = (steps) => steps.find((step) => step.max_abs) ?? null;

/** The residual stream after a layer is the last of its steps. */
export const streamOf = (lines) => [...lines.keys()].pop();

/** What run B is, from the page's own run and what differs; null while the person has not said. */
export function runB(own, { what, heads, prompt, model }) {
  const more = parseHeads(heads);
  if (what === "head") return more.length ? { ...own, ablate: [...own.ablate, ...more] } : null;
  if (what === "prompt") return prompt.trim() ? { ...own, run: prompt } : null;
  return model ? { ...own, model } : null;
}

export function View({ model, run, params, setParams, t }) {
  const p = params.value;
  const { run: text, chat, system, ablate } = route.value;
  const other = runB({ run: text, chat, system, ablate }, p);
  const [attempt, setAttempt] = useState(0);
  const found = useAsync(other && (async (signal) => {
    const of = other.model ? await openModel(other.model) : model;
    const b = await runOf(of, other);
    return { ...(await api.post("/api/compare", { a: run.id, b: b.id }, signal)), b };
  }) || (() => null), [run.id, JSON.stringify(other), attempt]);
  const empty = { head: t("compare.head.empty"), prompt: t("compare.prompt.empty", { prompt: text ?? "" }), model: t("compare.model.empty") }[p.what];
  return html`<${ViewFrame} id=${id} title=${t("compare.title")} about=${t("compare.about")} toolbar=${html`<${Difference} ...${{ model, run, p, setParams, t }} />`}>
    ${other
      ? html`<${Loaded} of=${found} name="compare" label=${t("compare.running")} again=${() => setAttempt(attempt + 1)}>
          ${(answer) => html`<${Both} ...${{ answer, p, run, setParams, t, text, modelName: model.name }} />`}<//>`
      : html`<${Notice} testid="compare-empty">${empty}<//>`}
  <//>`;
}

function Difference({ model, run, p, setParams, t }) {
  return html`
    <${Choice} label=${t("compare.what")} value=${p.what} options=${WHAT.map((what) => ({ value: what, label: t(`compare.what.${what}`) }))} onChange=${(what) => setParams({ what })} testid="compare-what" />
    ${p.what === "head" && html`<${Heads} ...${{ run, p, setParams, t }} />`}
    ${p.what === "prompt" && html`<${TextField} label=${t("compare.prompt")} value=${p.prompt} onChange=${(prompt) => setParams({ prompt })} testid="compare-prompt" />`}
    ${p.what === "model" && html`<${OtherModel} ...${{ model, p, setParams, t }} />`}`;
}

function Heads({ run, p, setParams, t }) {
  const chosen = parseHeads(p.heads);
  const layer = p.layer >= 0 ? p.layer : (chosen[0]?.[0] ?? 0);
  const head = p.head >= 0 ? p.head : (chosen[0]?.[1] ?? 0);
  const here = run.heads.find((row) => row.layer === layer) ?? run.heads[0];
  const numbers = (count) => Array.from({ length: count }, (_, n) => ({ value: n, label: String(n) }));
  const at = Math.min(head, here.n_heads - 1);
  const isChosen = chosen.some(([l, h]) => l === here.layer && h === at);
  return html`
    <${Choice} label=${t("compare.head.layer")} value=${here.layer} most=${0} options=${run.heads.map((row) => ({ value: row.layer, label: String(row.layer) }))} onChange=${(to) => setParams({ layer: to })} testid="compare-layer" />
    <${Choice} label=${t("compare.head.head")} value=${at} most=${0} options=${numbers(here.n_heads)} onChange=${(to) => setParams({ head: to })} testid="compare-head" />
    <${Button} disabled=${isChosen} onClick=${() => setParams({ heads: headsText([...chosen, [here.layer, at]]) })} testid="compare-add">${t("compare.head.add")}<//>
    <ul class="chips" aria-label=${t("compare.head.list")}>
      ${chosen.map(([l, h]) => html`<li key="${l}.${h}"><${Button} kind="quiet" label=${t("compare.head.remove", { name: `${l}.${h}`, layer: l, head: h })} testid="compare-remove-${l}-${h}"
        onClick=${() => setParams({ heads: headsText(chosen.filter(([a, b]) => a !== l || b !== h)) || "none" })}>${l}.${h} <span aria-hidden="true">×</span><//></li>`)}
    </ul>`;
}

function OtherModel({ model, p, setParams, t }) {
  const [names, setNames] = useState([]);
  useEffect(() => {
    api.get("/api/state").then(({ models, available }) => setNames([...new Set([...models.map((one) => one.name), ...available.filter((one) => one.has_weights).map((one) => one.name)])]), report);
  }, []);
  const others = names.filter((name) => name !== model.name);
  if (p.model && !others.includes(p.model)) others.unshift(p.model);
  return html`
    <${Choice} label=${t("compare.model")} value=${p.model} most=${0} options=${[{ value: "", label: t("compare.model.choose") }, ...others.map((name) => ({ value: name, label: name }))]} onChange=${(name) => setParams({ model: name })} testid="compare-model" />
    <${TextField} label=${t("compare.model.path")} value=${p.model} onChange=${(name) => setParams({ model: name.trim() })} testid="compare-path" />`;
}

function Both({ answer, p, run, setParams, t, text, modelName }) {
  const heads = parseHeads(p.heads).map((pair) => pair.join(".")).join(", ");
  const names = {
    head: [t("compare.label.a.head"), t("compare.label.b.head", { heads })],
    prompt: [text, p.prompt],
    model: [modelName, p.model],
  }[p.what];
  return html`
    ${p.what === "prompt" && html`<div class="pair">
      <${Section} title=${t("compare.a")}><${Pieces} pieces=${answer.pieces_a} testid="pieces-a" /><//>
      <${Section} title=${t("compare.b")}><${Pieces} pieces=${answer.pieces_b} testid="pieces-b" /><//>
    </div>`}
    <${Next} ...${{ answer, names, t }} />
    <${Steps} ...${{ answer, p, setParams, t }} />`;
}

const best = (rows, key) => rows.reduce((top, row) => (row[key] > top[key] ? row : top));

function Next({ answer, names, t }) {
  const [a, b] = [best(answer.next, "p_a"), best(answer.next, "p_b")];
  const kl = answer.kl === null || answer.kl === undefined ? "–" : float(answer.kl);
  const sentence = answer.kl === 0 ? t("compare.next.identical")
    : a.id === b.id ? t("compare.next.same", { a: visible(a.text), pa: percent(a.p_a), pb: percent(a.p_b), kl })
    : t("compare.next.sentence", { a: visible(a.text), pa: percent(a.p_a), b: visible(b.text), pb: percent(b.p_b), kl });
  const rows = answer.next.map((row) => ({ key: row.id, label: visible(row.text), a: row.p_a, b: row.p_b }));
  return html`<${Section} title=${t("compare.next.title")} testid="compare-next">
    <div data-testid="compare-kl" data-kl=${answer.kl}>
      <${PairedBars} rows=${rows} names=${[`A: ${names[0]}`, `B: ${names[1]}`]} title=${t("compare.next.caption")} sentence=${sentence} name="compare-next" format=${percent} testid="next-bars" />
    </div>
  <//>`;
}

function Steps({ answer, p, setParams, t }) {
  const lines = byLocalName(answer.steps);
  const stream = streamOf(lines);
  const which = lines.has(p.step) ? p.step : stream;
  const first = firstDifferent(answer.steps);
  const comparable = answer.steps.filter((step) => step.same_shape);
  const columns = [
    { key: "name", label: t("compare.steps.name"), align: "left", format: (name) => html`<${StepLink} name=${name} />` },
    { key: "max_abs", label: t("compare.steps.max_abs"), format: "float" },
    { key: "rel", label: t("compare.steps.rel"), format: "float" },
    { key: "cos", label: t("compare.steps.cos"), format: (value) => float(value, 6), align: "right" },
    { key: "shapes", label: t("compare.steps.shape"), align: "left" },
  ];
  const end = lines.get(stream)?.at(-1);
  const sentence = first ? t("compare.steps.sentence", { name: first.name, rel: end ? percent(end[1]) : "–" }) : t("compare.steps.none");
  return html`<${Section} title=${t("compare.steps.title")} testid="compare-steps">
    ${comparable.length < answer.steps.length && html`<p class="note" data-testid="compare-shapes">${t("compare.steps.shapes")}</p>`}
    ${lines.size > 0 && html`
      <div class="toolbar"><${Choice} label=${t("compare.steps.which")} value=${which} most=${0} options=${[...lines.keys()].map((local) => ({ value: local, label: local }))} onChange=${(step) => setParams({ step: step === stream ? "" : step })} testid="compare-step" /></div>
      <${LineChart} series=${[...new Set([stream, which])].map((local) => ({ label: local, points: lines.get(local), dashed: local !== which }))}
        x=${{ label: t("compare.steps.x"), format: String }} y=${{ label: t("compare.steps.y"), format: (v) => float(v, 3), zero: true }} title=${t("compare.steps.chart", { step: which })} name="compare-steps" testid="compare-chart" sentence=${sentence} />`}
    <${DataTable} columns=${columns} rows=${answer.steps.map((step) => ({ ...step, key: step.name, shapes: t(`compare.steps.shape.${step.same_shape ? "same" : "other"}`) }))} caption=${t("compare.steps.caption")} name="compare-steps" testid="steps-table" height=${480} />
  <//>`;
}
