/** KV cache: prefill and decode as they happen, slots filling, and what the cache saves: predicted and measured. */
import { html, useEffect, useRef, useState } from "../html.js";
import { api } from "../api.js";
import { bytes, flops, float, int, milliseconds, percent, visible } from "../format.js";
import { report } from "../state.js";
import { Bars, LineChart } from "../components/chart.js";
import { Button, NumberField, Slider } from "../components/controls.js";
import { Loading, Section, useAsync, ViewFrame } from "../components/frame.js";
import { Failed, Loaded, quiet } from "../components/loaded.js";
import { Slots } from "../components/slots.js";
import { DataTable } from "../components/table.js";

export const id = "cache";
export const needs = "run";
export const defaults = { tokens: 16, step: -1, whatif: 4096 };

const MOST = 256; // tokens to generate: each costs a full pass without the cache as well

/** Sums over some steps; a time that nobody measured makes the sum null. */
export function sums(steps) {
  const add = (key) => steps.reduce((sum, step) => (sum === null || step[key] === null || step[key] === undefined ? null : sum + step[key]), 0);
  return { flops: add("flops"), flops_without: add("flops_without"), ms: add("ms"), ms_without: add("ms_without_cache") };
}

/** 51.2 / 3.2 → "16"; below 10 with a digit after the point. */
export const times = (more, less) => (less > 0 ? (more / less < 10 ? (more / less).toFixed(1) : int(more / less)) : "–");

/** What goes into a step: the prompt, or the token that the step before gave. */
export const goesIn = (steps, i) => (i === 0 ? null : steps[i - 1].token);

export function View({ model, run, params, setParams, t }) {
  const { tokens, step } = params.value;
  const { steps, state, error, start, stop } = useGeneration(model, run, tokens);
  const at = step < 0 || step >= steps.length ? steps.length - 1 : step;
  const toolbar = html`
    <${NumberField} label=${t("cache.tokens")} value=${tokens} min=${1} max=${MOST} onChange=${(n) => setParams({ tokens: Math.floor(n), step: -1 })} testid="cache-tokens" />
    ${state === "running"
      ? html`<${Button} onClick=${stop} testid="cache-stop">${t("cache.stop")}<//>`
      : html`<${Button} kind="primary" onClick=${start} testid="cache-start">${t("cache.again")}<//>`}
    <${Progress} ...${{ state, steps, tokens, t }} />`;
  return html`<${ViewFrame} id=${id} title=${t("cache.title")} about=${t("cache.about")} toolbar=${toolbar}>
    ${error && html`<${Failed} error=${error} again=${start} testid="cache-error" />`}
    ${state === "running" && steps.length === 0 && html`<${Loading} label=${t("cache.waiting")} />`}
    ${steps.length > 0 && html`
      <${Moment} ...${{ model, run, steps, at, setParams, t, tokens }} />
      <${Timeline} ...${{ steps, run, at, setParams, t }} />
      <${Savings} ...${{ steps, at, t }} />`}
    <${WhatIf} ...${{ model, params, setParams, t }} />
  <//>`;
}

/** Generates anew for every run and number of tokens; the stream is given up when the view goes away. */
function useGeneration(model, run, tokens) {
  const [steps, setSteps] = useState([]);
  const [state, setState] = useState("running");
  const [error, setError] = useState(null);
  const [attempt, setAttempt] = useState(0);
  const giveUp = useRef(null);
  useEffect(() => {
    const abort = (giveUp.current = new AbortController());
    setSteps([]);
    setError(null);
    setState("running");
    const take = (line) => {
      if (abort.signal.aborted) return;
      if (line.error) throw Object.assign(new Error(line.error.what), line.error);
      if (line.kind === "prefill" || line.kind === "decode") setSteps((known) => [...known, line]);
    };
    api.stream(`/api/models/${model.id}/cache`, { ids: run.ids, tokens }, take, abort.signal).then(
      () => abort.signal.aborted || setState("done"),
      (reason) => {
        if (abort.signal.aborted) return;
        setState("failed");
        setError(reason);
        report(reason);
      },
    );
    return () => abort.abort();
  }, [model.id, run.ids.join(), tokens, attempt]);
  const stop = () => {
    giveUp.current.abort();
    setState("stopped");
  };
  return { steps, state, error, stop, start: () => setAttempt((n) => n + 1) };
}

function Progress({ state, steps, tokens, t }) {
  const words = { n: steps.length, total: tokens };
  const text = { running: t("cache.running", words), stopped: t("cache.stopped", words) }[state];
  return html`<span class="muted number" role="status" data-testid="cache-progress" data-state=${state}>${text ?? ""}</span>`;
}

const layerNames = (layer) => String(layer);

/** One step of the stream: the slots as they are then. */
function Moment({ model, run, steps, at, setParams, t, tokens }) {
  const now = steps[at];
  const { spec } = model;
  const prompt = run.ids.length;
  const fresh = at === 0 ? prompt : now.length - steps[at - 1].length;
  const into = goesIn(steps, at);
  const words = { step: at, new: prompt, length: now.length, bytes: bytes(now.bytes), token: into ? visible(into.text) : "" };
  const whole = Math.max(...now.layers.map((row) => row.slots));
  const rows = now.layers.map((row) => ({ ...row, heads: row.kv_heads, label: t("cache.slots.layer", { layers: layerNames(row.layer) }) }));
  const windows = now.layers.filter((row) => row.slots < whole);
  const filled = now.layers.reduce((sum, row) => sum + row.filled * (row.times ?? 1), 0);
  const slots = now.layers.reduce((sum, row) => sum + row.slots * (row.times ?? 1), 0);
  const sentence = [
    t("cache.slots.sentence", { layers: spec.layers, filled, slots }),
    t(now.layers[0].form === "latents" ? "cache.slots.latent" : "cache.slots.shared", { heads: spec.n_heads, kv: spec.n_kv_heads }),
    ...windows.map((row) => t("cache.slots.window", { layers: layerNames(row.layer), window: row.slots })),
  ].join(" ");
  const columns = [
    { key: "layer", label: t("cache.layers.layers"), align: "left", format: layerNames },
    { key: "times", label: t("cache.layers.times"), format: "int" },
    { key: "filled", label: t("cache.layers.filled"), format: "int" },
    { key: "slots", label: t("cache.layers.slots"), format: "int" },
    { key: "bytes", label: t("cache.layers.bytes"), format: "bytes", align: "right" },
  ];
  return html`<${Section} title=${t("cache.slots.title")} testid="cache-moment">
    <${Slider} label=${t("cache.step")} value=${at} min=${0} max=${steps.length - 1} onInput=${(step) => setParams({ step: step === tokens - 1 ? -1 : step })}
      format=${(n) => `${t("cache.step.value", { n })} · ${t(`cache.kind.${steps[n]?.kind ?? "decode"}`)}`} testid="cache-step" />
    <p class="sentence" aria-live="polite" data-testid="cache-now" data-bytes=${now.bytes} data-length=${now.length}>${t(`cache.now.${now.kind}`, words)}</p>
    <${Slots} layers=${rows.map(({ label, slots, heads }) => ({ label, slots, heads }))} length=${now.length} fresh=${fresh} prompt=${prompt} capacity=${whole}
      caption=${t("cache.slots.picture")} sentence=${sentence} name="cache-slots-${at}" testid="cache-slots"
      legend=${{ prompt: t("cache.slots.prompt"), generated: t("cache.slots.generated"), fresh: t("cache.slots.new"), empty: t("cache.slots.empty") }} />
    <${DataTable} columns=${columns} rows=${now.layers.map((row, i) => ({ times: 1, ...row, key: i }))} caption=${t("cache.layers.caption")} name="cache-layers-${at}" testid="cache-layers" />
  <//>`;
}

function Timeline({ steps, run, at, setParams, t }) {
  const rows = steps.map((step, i) => ({
    ...step, key: i, step: i,
    in: i === 0 ? t("cache.timeline.prompt", { n: run.ids.length }) : visible(goesIn(steps, i).text),
    out: visible(step.token.text), ms_without: step.ms_without_cache,
  }));
  const columns = [
    { key: "step", label: t("cache.timeline.step"), format: (i) => (i === 0 ? t("cache.kind.prefill") : int(i)), align: "left" },
    { key: "in", label: t("cache.timeline.token"), align: "left" },
    { key: "out", label: t("cache.timeline.out"), align: "left" },
    { key: "length", label: t("cache.timeline.length"), format: "int" },
    { key: "bytes", label: t("cache.timeline.bytes"), format: "bytes", align: "right" },
    { key: "flops", label: t("cache.timeline.flops"), format: "flops", align: "right" },
    { key: "flops_without", label: t("cache.timeline.flops_without"), format: "flops", align: "right" },
    { key: "ms", label: t("cache.timeline.ms"), format: "float" },
    { key: "ms_without", label: t("cache.timeline.ms_without"), format: "float" },
  ];
  return html`<${Section} title=${t("cache.timeline.title")} testid="cache-timeline">
    <${DataTable} columns=${columns} rows=${rows} caption=${t("cache.timeline.caption")} name="cache-timeline" testid="cache-steps"
      selected=${at} onRow=${(row) => setParams({ step: row.step })} height=${420} />
  <//>`;
}

function Savings({ steps, at, t }) {
  const all = sums(steps);
  const line = (key) => steps.map((step, i) => [i, step[key] ?? null]);
  const series = (withCache, without) => [
    { label: t("cache.with"), points: line(withCache) },
    { label: t("cache.without"), points: line(without), dashed: true },
  ];
  const x = { label: t("cache.step"), format: String };
  const measured = all.ms_without !== null;
  return html`<div class="pair">
      <${LineChart} series=${series("flops", "flops_without")} x=${x} y=${{ label: t("cache.flops.y"), format: flops, zero: true }} title=${t("cache.flops.title")}
        name="cache-flops" testid="cache-flops" marker=${at}
        sentence=${t("cache.flops.sentence", { steps: steps.length, with: flops(all.flops), without: flops(all.flops_without), times: times(all.flops_without, all.flops) })} />
      <${LineChart} series=${series("ms", "ms_without_cache")} x=${x} y=${{ label: t("cache.ms.y"), format: (v) => float(v, 3), zero: true }} title=${t("cache.ms.title")}
        name="cache-ms" testid="cache-ms" marker=${at}
        sentence=${measured ? t("cache.ms.sentence", { steps: steps.length, with: milliseconds(all.ms), without: milliseconds(all.ms_without), times: times(all.ms_without, all.ms) }) : t("cache.ms.none")} />
  </div>`;
}

/** The same model with its key/value heads shared otherwise, by the ledger. */
function WhatIf({ model, params, setParams, t }) {
  const { whatif } = params.value;
  const found = useAsync(async (signal) => {
    await quiet(120, signal);
    return api.get(`/api/models/${model.id}/cache_whatif?tokens=${whatif}`, signal);
  }, [model.id, whatif]);
  return html`<${Section} title=${t("cache.whatif.title")} note=${t("cache.whatif.about")} testid="cache-whatif">
    <div class="toolbar"><${NumberField} label=${t("cache.whatif.tokens")} value=${whatif} min=${1} max=${10_000_000} onChange=${(n) => setParams({ whatif: Math.floor(n) })} testid="whatif-tokens" /></div>
    <${Loaded} of=${found} name="whatif">${(answer) => html`<${Variants} rows=${answer.rows} tokens=${answer.tokens ?? whatif} t=${t} />`}<//>
  <//>`;
}

function Variants({ rows, tokens, t }) {
  const mha = rows.find((row) => row.name === "mha").bytes;
  const own = rows.find((row) => row.this) ?? rows[0];
  const named = rows.map((row) => ({ ...row, key: row.name, label: t(`cache.name.${row.name}`, { window: row.window }) + (row.this ? ` (${t("cache.whatif.this")})` : ""), share: row.bytes / mha }));
  const columns = [
    { key: "label", label: t("cache.whatif.name"), align: "left" },
    { key: "kv_heads", label: t("cache.whatif.kv"), format: "int" },
    { key: "bytes", label: t("cache.whatif.bytes"), format: "bytes", align: "right" },
    { key: "share", label: t("cache.whatif.share"), format: "percent", align: "right" },
  ];
  return html`
    <${Bars} rows=${named.map((row) => ({ key: row.key, label: row.label, value: row.bytes, marked: row.this }))} title=${t("cache.whatif.caption")} name="cache-whatif" testid="whatif-bars" format=${bytes}
      sentence=${t("cache.whatif.sentence", { tokens: int(tokens), bytes: bytes(own.bytes), mha: bytes(mha) })} />
    <${DataTable} columns=${columns} rows=${named} caption=${t("cache.whatif.caption")} name="cache-whatif" testid="whatif-table" />`;
}
