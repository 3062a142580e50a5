/** Every step of the pass, one at a time: what it computes, from what, what came out. */
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { api, tensorSlice } from "../api.js";
import { Button, Choice, NumberField, Slider } from "../components/controls.js";
import { Facts, Loading, Notice, Shape, StepLink, useAsync, ViewFrame } from "../components/frame.js";
import { Heatmap } from "../components/heatmap.js";
import { Loaded } from "../components/loaded.js";
import { pieceLabel } from "../components/pieces.js";
import { bytes, exact, float, flops, int, seconds } from "../format.js";
import { linkTo } from "../state.js";

export const id = "steps";
export const needs = "run";
/** `cut`: which entry of an axis is looked at, "H~2,A~0"; `scale` of colours "own" or "shared" by this step of all layers. */
export const defaults = { step: "", cut: "", scale: "own", reduce: "mean", source: false };

const PACE = 700; // ms a step, when played
const FEW = 256; // rows and columns that are drawn

export function View({ model, run, params, setParams, t }) {
  const { steps } = run;
  const { cut, scale, reduce, source } = params.value;
  const at = Math.max(0, steps.findIndex((step) => step.name === (params.value.step || steps[0].name)));
  const step = steps[at];
  const lost = params.value.step && step.name !== params.value.step;
  const show = (index) => setParams({ step: steps[Math.max(0, Math.min(steps.length - 1, index))].name });
  const toLayer = (layer) => show(steps.findIndex((other) => other.layer === layer && other.local === step.local) + 1 ? steps.findIndex((other) => other.layer === layer && other.local === step.local) : steps.findIndex((other) => other.layer === layer));
  const [playing, setPlaying] = usePlaying(at, steps.length, show);
  useKeys({ at, steps, step, show, toLayer, setPlaying, playing, last: run.n_layers - 1 });

  const toolbar = html`
    <span class="player">
      <${Button} label=${t("steps.first")} help=${t("steps.first")} testid="step-first" disabled=${at === 0} onClick=${() => show(0)}>|◀</${Button}>
      <${Button} label=${t("steps.back")} help=${t("steps.back")} testid="step-back" disabled=${at === 0} onClick=${() => show(at - 1)}>◀</${Button}>
      <${Button} kind="primary" testid="step-play" onClick=${() => setPlaying(!playing)}>${t(playing ? "steps.stop" : "steps.play")}</${Button}>
      <${Button} label=${t("steps.on")} help=${t("steps.on")} testid="step-on" disabled=${at === steps.length - 1} onClick=${() => show(at + 1)}>▶</${Button}>
      <${Button} label=${t("steps.last")} help=${t("steps.last")} testid="step-last" disabled=${at === steps.length - 1} onClick=${() => show(steps.length - 1)}>▶|</${Button}>
    </span>
    <span class="scrub"><${Slider} label=${t("steps.step")} value=${at} min=${0} max=${steps.length - 1} onInput=${show} format=${(i) => t("steps.of", { n: i + 1, all: steps.length })} testid="step-scrub" /></span>
    <${Choice} label=${t("steps.layer")} most=${0} value=${step.layer} onChange=${(layer) => (layer === null ? show(steps.findIndex((other) => other.layer === null)) : toLayer(layer))} testid="step-layer"
      options=${[{ value: null, label: t("steps.outside") }, ...Array.from({ length: run.n_layers }, (_, layer) => ({ value: layer, label: String(layer) }))]} />`;
  return html`<${ViewFrame} id=${id} title=${t("steps.title")} about=${t("steps.about")} toolbar=${toolbar}>
    ${lost && html`<${Notice} kind="warning" testid="step-lost">${t("steps.lost", { name: params.value.step })}</${Notice}>`}
    <div class="steps-page">
      <${Contents} steps=${steps} step=${step} t=${t} />
      <${OneStep} model=${model} run=${run} step=${step} at=${at} cut=${cut} scale=${scale} reduce=${reduce} source=${source} setParams=${setParams} t=${t} />
    </div>
  </${ViewFrame}>`;
}

function usePlaying(at, size, show) {
  const [playing, setPlaying] = useState(false);
  useEffect(() => {
    if (!playing) return undefined;
    if (at === size - 1) return void setPlaying(false);
    const timer = setTimeout(() => show(at + 1), PACE);
    return () => clearTimeout(timer);
  }, [playing, at]);
  return [playing, setPlaying];
}

/** ← → a step, [ ] a layer, blank plays; where no field or figure takes the keys for itself. */
function useKeys(now) {
  const latest = useRef(now);
  latest.current = now;
  useEffect(() => {
    const pressed = (event) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest("input, textarea, select, button, summary, dialog, [role=application], tr")) return;
      const { at, steps, step, show, toLayer, setPlaying, playing, last } = latest.current;
      const layer = step.layer ?? (at === 0 ? -1 : last + 1);
      if (event.key === "ArrowRight") show(at + 1);
      else if (event.key === "ArrowLeft") show(at - 1);
      else if (event.key === "Home") show(0);
      else if (event.key === "End") show(steps.length - 1);
      else if (event.key === "]" && layer < last) toLayer(layer + 1);
      else if (event.key === "[" && layer > 0) toLayer(layer - 1);
      else if (event.key === " ") setPlaying(!playing);
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

/** The steps around: those of this layer, and those outside the layers. */
function Contents({ steps, step, t }) {
  const list = useRef(null);
  const shown = useMemo(() => steps.filter((other) => other.layer === null || other.layer === step.layer), [steps, step.layer]);
  useEffect(() => {
    const current = list.current.querySelector("[aria-current]");
    if (!current) return;
    list.current.scrollTop = current.offsetTop - list.current.clientHeight / 2;
    list.current.scrollLeft = current.offsetLeft - list.current.clientWidth / 2;
  }, [step.name]);
  let part = null;
  return html`<nav class="contents" aria-label=${t("steps.contents")} ref=${list} data-testid="step-contents">
    <ol>${shown.map((other) => {
      const heading = other.layer !== null && part !== other.layer && html`<li class="contents-layer">${t("steps.layer_n", { n: other.layer })}</li>`;
      part = other.layer;
      return html`${heading}<li key=${other.name} class=${other.layer === null ? "outer" : ""}><a href=${linkToStep(other)} class="kind-${other.kind} ${other === step ? "on" : ""}" aria-current=${other === step ? "step" : undefined} data-testid="contents-${other.local}">${other.local}</a></li>`;
    })}</ol>
  </nav>`;
}

const linkToStep = (step) => linkTo("steps", { step: step.name });

/** The axes that are fixed, by letter: "H~2,A~0" → {H: 2, A: 0}. */
export function parseCut(text) {
  const pairs = text.split(",").map((pair) => pair.split("~")).filter(([letter, index]) => letter && /^\d+$/.test(index ?? ""));
  return Object.fromEntries(pairs.map(([letter, index]) => [letter, Number(index)]));
}

const cutText = (fixed) => Object.entries(fixed).map(([letter, index]) => `${letter}~${index}`).join(",");

/**
 * Which part of a step's tensor is shown: what is asked for, as far as the tensor has it, and at most two axes.
 * @returns {{at: string, fixed: Record<string, number>, shown: number[], part: {letter: string, heads: number} | null}}
 *   `shown`: the axes that are left; `part`: an axis of heads side by side, of which one may be looked at
 */
export function slicing(step, cut, heads) {
  const asked = parseCut(cut);
  const fixed = {};
  step.axes.forEach((letter, i) => {
    if (letter in asked && !letter.includes("·") && asked[letter] < step.shape[i]) fixed[letter] = asked[letter];
  });
  for (const letter of step.axes) {
    if (step.axes.length - Object.keys(fixed).length <= 2) break;
    fixed[letter] ??= 0;
  }
  const shown = step.axes.map((_, i) => i).filter((i) => !(step.axes[i] in fixed));
  const wide = step.axes.find((letter) => /^[HG]·/.test(letter));
  const n = wide && heads ? (wide.startsWith("G") ? heads.n_kv_heads : heads.n_heads) : 0;
  const part = n > 1 && step.shape[step.axes.indexOf(wide)] % n === 0 ? { letter: wide, heads: n } : null;
  const indices = step.axes.map((letter, i) => {
    if (letter in fixed) return String(fixed[letter]);
    if (part?.letter !== letter || !(asked[letter] < n)) return ":";
    const size = step.shape[i] / n;
    return `${asked[letter] * size}:${(asked[letter] + 1) * size}`;
  });
  return { at: indices.join(","), fixed, shown, part };
}

/** The lines of Openbook that compute a step. */
function Source({ model, step, t }) {
  const [attempt, setAttempt] = useState(0);
  const found = useAsync((signal) => api.get(`/api/source?${new URLSearchParams({ model: model.id, step: step.name })}`, signal), [model.id, step.name, attempt]);
  return html`<${Loaded} of=${found} name="source" again=${() => setAttempt(attempt + 1)}>${({ file, line, end_line: end, symbol, text }) => html`
    <p class="note" data-testid="source-at">${t("steps.source_at", { symbol, file, first: String(line), last: String(end) })}</p>
    <pre class="source" tabindex="0" aria-label=${t("steps.source")} data-testid="source">${text}</pre>`}<//>`;
}

function OneStep({ model, run, step, at, cut, scale, reduce, source, setParams, t }) {
  const heads = run.heads.find(({ layer }) => layer === step.layer);
  const slice = useMemo(() => slicing(step, cut, heads), [step, cut]);
  const get = (other) => tensorSlice(run, other.name, { at: slicing(other, cut, run.heads.find(({ layer }) => layer === other.layer)).at, max: FEW, reduce });
  const { value, fresh } = useAsync(() => get(step), [run.id, step.name, slice.at, reduce]);
  useEffect(() => {
    // What a person looks at next is near: the steps beside this one, and the same step of the layers beside.
    if (!fresh) return;
    const beside = run.steps.filter((other) => other.local === step.local && Math.abs((other.layer ?? -9) - (step.layer ?? -99)) === 1);
    for (const other of [run.steps[at + 1], run.steps[at - 1], ...beside]) if (other) get(other).catch(() => {});
  }, [fresh, step.name, slice.at]);

  const { stats } = step;
  return html`<section class="one-step" data-testid="step" data-step=${step.name} data-at=${slice.at} data-fresh=${String(fresh)}>
    <h2 class="step-name" aria-live="polite"><code data-testid="step-name">${step.name}</code></h2>
    <p class="step-what">${t(has(t, `steps.what_${wordOf(step)}`) ? `steps.what_${wordOf(step)}` : `steps.kind_${step.kind}`)}</p>
    <p class="formula step-formula" data-testid="step-formula"><span class="muted">${step.local.split(".").at(-1)} = </span>${step.formula}</p>
    <details class="more" open=${source} onToggle=${(event) => event.currentTarget.open !== source && setParams({ source: event.currentTarget.open })}>
      <summary data-testid="source-open">${t("steps.source")}</summary>
      ${source && html`<${Source} ...${{ model, step, t }} />`}
    </details>
    <p class="step-inputs">${step.inputs.length > 0 && html`<span class="muted">${t("steps.reads")}</span> ${step.inputs.map((name) => html`<span key=${name} class="step-input"><${StepLink} name=${name} label=${shortName(name, step)} /> <${InputShape} run=${run} name=${name} /></span>`)}`}</p>
    <p><span class="muted">${t("steps.gives")}</span> <${Shape} axes=${step.axes} shape=${step.shape} testid="step-shape" /> <span class="muted">${step.dtype}</span></p>
    ${step.edited && html`<${Notice} kind="warning">${t("steps.edited")}</${Notice}>`}
    <${Slicer} step=${step} slice=${slice} cut=${cut} scale=${scale} reduce=${reduce} value=${fresh ? value : null} setParams=${setParams} run=${run} t=${t} />
    ${value ? html`<${Output} model=${model} run=${run} step=${step} slice=${slice} value=${value} fresh=${fresh} cut=${cut} scale=${scale} reduce=${reduce} t=${t} />` : html`<${Loading} />`}
    <${Facts} testid="step-stats" rows=${[
      [t("steps.low"), num(stats.low), "stat-low"], [t("steps.high"), num(stats.high), "stat-high"], [t("steps.mean"), num(stats.mean), "stat-mean"],
      [t("steps.std"), num(stats.std), "stat-std"], [t("steps.l2"), num(stats.l2), "stat-l2"],
      ...(stats.inf ? [[t("steps.inf"), int(stats.inf), "stat-inf"]] : []), ...(stats.nan ? [[t("steps.nan"), int(stats.nan), "stat-nan"]] : []),
    ]} />
    <${Facts} testid="step-cost" rows=${[
      [t("steps.flops"), html`${flops(step.flops)}${step.flops_formula && html` <small class="muted">${step.flops_formula}</small>`}`, "step-flops"],
      [t("steps.bytes"), bytes(step.bytes), "step-bytes"],
      ...(step.weight_bytes ? [[t("steps.weight_bytes"), bytes(step.weight_bytes)]] : []),
      [t("steps.time"), seconds(step.seconds), "step-seconds"],
    ]} />
  </section>`;
}

const has = (t, key) => t(key) !== key;
const num = (value) => html`<span title=${value === null ? "" : exact(value)}>${float(value)}</span>`;

/** The word under which a step is explained: "attn.q" → "q", "mlp.experts.gate" → "experts_gate". */
const wordOf = (step) => step.local.replace(/^(attn|mlp)\./, "").replace(/\./g, "_");

/** Within the layer a step's name is short. */
const shortName = (name, step) => (step.layer !== null && name.startsWith(`layers.${step.layer}.`) ? name.split(".").slice(2).join(".") : name);

function InputShape({ run, name }) {
  const input = run.steps.find((other) => other.name === name);
  return input && html`<${Shape} axes=${input.axes} shape=${input.shape} />`;
}

/** Which entries of the axes are looked at, and how they are coloured. */
function Slicer({ step, slice, cut, scale, reduce, value, setParams, run, t }) {
  const asked = parseCut(cut);
  const set = (letter, index) => {
    const { [letter]: _, ...rest } = asked;
    setParams({ cut: cutText(index === null ? rest : { ...rest, [letter]: index }) });
  };
  const reduced = value?.block.some((size) => size > 1);
  const choices = step.axes.map((letter, i) => {
    const size = step.shape[i];
    if (letter === "B" && size === 1) return null;
    const label = axisLabel(letter, t);
    if (slice.part?.letter === letter) {
      const options = [{ value: null, label: t("steps.all") }, ...Array.from({ length: slice.part.heads }, (_, head) => ({ value: head, label: String(head) }))];
      return html`<${Choice} key=${letter} label=${t("steps.head")} most=${0} value=${asked[letter] ?? null} options=${options} onChange=${(head) => set(letter, head)} testid="cut-${letter}" />`;
    }
    if (!(letter in slice.fixed)) return null;
    return size <= 64
      ? html`<${Choice} key=${letter} label=${label} most=${0} value=${slice.fixed[letter]} options=${Array.from({ length: size }, (_, index) => ({ value: index, label: String(index) }))} onChange=${(index) => set(letter, index)} testid="cut-${letter}" />`
      : html`<${NumberField} key=${letter} label=${label} value=${slice.fixed[letter]} min=${0} max=${size - 1} onChange=${(index) => set(letter, index)} testid="cut-${letter}" />`;
  });
  const free = step.axes.filter((letter, i) => letter !== "B" && !letter.includes("·") && step.shape[i] > 0);
  const pairs = free.flatMap((row, i) => free.slice(i + 1).map((col) => [row, col]));
  const shownPair = slice.shown.map((i) => step.axes[i]).join(" × ");
  const choosePair = (pair) => {
    const [row, col] = pair.split(" × ");
    setParams({ cut: cutText(Object.fromEntries([...step.axes.filter((letter) => letter !== row && letter !== col).map((letter) => [letter, slice.fixed[letter] ?? 0]), ...Object.entries(asked).filter(([letter]) => !step.axes.includes(letter))])) });
  };
  return html`<div class="slicer">
    ${pairs.length > 1 && html`<${Choice} label=${t("steps.axes")} value=${shownPair} options=${pairs.map(([row, col]) => ({ value: `${row} × ${col}`, label: `${row} × ${col}` }))} onChange=${choosePair} most=${3} testid="cut-axes" />`}
    ${choices}
    ${step.layer !== null && html`<${Choice} label=${t("steps.scale")} value=${scale} options=${["own", "shared"].map((name) => ({ value: name, label: t(`steps.scale_${name}`) }))} onChange=${(name) => setParams({ scale: name })} testid="scale" />`}
    ${(reduced || reduce !== "mean") && html`<${Choice} label=${t("steps.reduce")} value=${reduce} options=${["mean", "absmax"].map((name) => ({ value: name, label: t(`steps.reduce_${name}`) }))} onChange=${(name) => setParams({ reduce: name })} testid="reduce" />`}
  </div>`;
}

function axisLabel(letter, t) {
  return has(t, `steps.axis_${letter}`) ? t(`steps.axis_${letter}`) : letter;
}

const MATRIX = (value) => (value.shape.length === 2 ? value.shape : value.shape.length === 1 ? [1, value.shape[0]] : [1, 1]);

function Output({ model, run, step, slice, value, fresh, cut, scale, reduce, t }) {
  const [rows, cols] = MATRIX(value);
  const { axes } = value;
  const [rowAxis, colAxis] = axes.length === 2 ? axes : ["", axes[0] ?? ""];
  const [rowBlock, colBlock] = value.block.length === 2 ? value.block : [1, value.block[0] ?? 1];
  const starts = value.start ?? axes.map(() => 0);
  const [rowStart, colStart] = starts.length === 2 ? starts : [0, starts[0] ?? 0];
  const label = (axis, start, block, size) => Array.from({ length: size }, (_, i) => axisEntry(run, axis, start + i * block, block));
  const rowLabels = useMemo(() => label(rowAxis, rowStart, rowBlock, rows), [run, rowAxis, rowStart, rowBlock, rows]);
  const colLabels = useMemo(() => label(colAxis, colStart, colBlock, cols), [run, colAxis, colStart, colBlock, cols]);
  const shared = useMemo(() => {
    if (scale !== "shared" || step.layer === null) return {};
    const same = run.steps.filter((other) => other.layer !== null && other.local === step.local).map((other) => other.stats);
    return { low: Math.min(...same.map((stats) => stats.low)), high: Math.max(...same.map((stats) => stats.high)) };
  }, [run, step, scale]);
  const kind = step.kind === "softmax" || step.local === "mlp.chosen" ? "sequential" : "diverging";
  const isProbability = step.kind === "softmax";
  const peak = peakOf(value.data);
  const sentence = peak < 0 ? t("steps.sentence_none") : t(rowBlock * colBlock > 1 ? "steps.sentence_reduced" : "steps.sentence", {
    value: float(value.data[peak]), row: `${axisLabel(rowAxis, t)} ${rowLabels[Math.floor(peak / cols)]}`.trim(), col: `${axisLabel(colAxis, t)} ${colLabels[peak % cols]}`,
    numbers: value.data.length, how: t(`steps.reduce_${reduce}`), block: `${rowBlock} × ${colBlock}`,
  });
  const fixedText = Object.entries(slice.fixed).filter(([letter]) => letter !== "B" || step.shape[0] > 1).map(([letter, index]) => `${axisLabel(letter, t)} ${index}`);
  const title = [t("steps.output"), ...fixedText].join(", ");
  return html`<div class=${fresh ? "" : "stale"}>
    <${Heatmap} testid="step-heatmap" title=${title} name=${`${model.name}-${step.name}`} data=${value.data} rows=${rows} cols=${cols} rowLabels=${rowLabels} colLabels=${colLabels}
      rowTitle=${axisLabel(rowAxis, t)} colTitle=${axisLabel(colAxis, t)} scale=${kind} low=${isProbability ? 0 : shared.low} high=${isProbability && scale === "shared" ? 1 : shared.high} sentence=${sentence} />
  </div>`;
}

/** An axis's entry as a label: the token for positions, a span where one number stands for several. */
function axisEntry(run, axis, index, block) {
  if (block > 1) return `${index}–${index + block - 1}`;
  if ((axis === "T" || axis === "S") && run.pieces[index]) return pieceLabel(run.pieces[index]);
  return String(index);
}

/** Where the number of the greatest size is; -1 if there is none. */
function peakOf(data) {
  let best = -1;
  for (let i = 0; i < data.length; i++) if (Number.isFinite(data[i]) && (best < 0 || Math.abs(data[i]) > Math.abs(data[best]))) best = i;
  return best;
}
