/** All heads of all layers as small pictures, one of them large: which token reads which. */
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../html.js";
import { api, tensorSlice } from "../api.js";
import { Bars } from "../components/chart.js";
import { Button, Choice, NumberField } from "../components/controls.js";
import { Facts, Loading, StepLink, useAsync, ViewFrame } from "../components/frame.js";
import { Figure } from "../components/figure.js";
import { Heatmap } from "../components/heatmap.js";
import { pieceLabel, Pieces } from "../components/pieces.js";
import { colours } from "../components/scale.js";
import { useWidth } from "../components/width.js";
import { float, percent } from "../format.js";
import { go, route } from "../state.js";
import { colour, shade } from "../theme.js";

export const id = "attention";
export const needs = "run";
/** `query`: the token whose reading is listed, -1: the last one. */
export const defaults = { layer: 0, head: 0, kind: "probs", query: -1 };

const THUMBNAIL = 24; // queries and keys in a small picture
const KINDS = ["scores", "masked", "probs"];
const SINK = 0.5; // a head that gives so much to the first token is marked
const [FEW, MANY] = [256, 1024]; // numbers along an axis of the picture, and of one row
const CHIPS = 512; // tokens that are shown to choose from
const TOP = 10; // tokens that a token reads most

export function View({ model, run, params, setParams, t }) {
  const { value: small } = useAsync((signal) => api.binary(`/api/runs/${run.id}/attention?size=${THUMBNAIL}`, signal), [run.id]);
  const layer = Math.max(0, Math.min(run.n_layers - 1, params.value.layer));
  const heads = run.heads[layer];
  const head = Math.max(0, Math.min(heads.n_heads - 1, params.value.head));
  const kind = KINDS.includes(params.value.kind) ? params.value.kind : "probs";
  const choose = (toLayer, toHead) => {
    const [l, h] = [Math.max(0, Math.min(run.n_layers - 1, toLayer)), toHead];
    setParams({ layer: l, head: Math.max(0, Math.min(run.heads[l].n_heads - 1, h)) });
  };
  useLayerKeys(choose, layer, head);
  const toolbar = html`
    <${Choice} label=${t("attention.layer")} most=${0} value=${layer} options=${numbers(run.n_layers)} onChange=${(l) => choose(l, head)} testid="attention-layer" />
    <${Choice} label=${t("attention.head")} most=${0} value=${head} options=${numbers(heads.n_heads)} onChange=${(h) => choose(layer, h)} testid="attention-head" />
    <${Choice} label=${t("attention.show")} value=${kind} options=${KINDS.map((name) => ({ value: name, label: t(`attention.kind_${name}`) }))} onChange=${(name) => setParams({ kind: name })} testid="attention-kind" />`;
  const many = Math.max(...run.heads.map(({ n_heads }) => n_heads)) > 12;
  return html`<${ViewFrame} id=${id} title=${t("attention.title")} about=${t("attention.about")} toolbar=${toolbar}>
    <div class="attention-page ${many ? "many" : ""}">
      ${small ? html`<${AllHeads} model=${model} run=${run} small=${small} layer=${layer} head=${head} choose=${choose} t=${t} />` : html`<${Loading} />`}
      <${OneHead} model=${model} run=${run} small=${small} layer=${layer} head=${head} kind=${kind} query=${params.value.query} setParams=${setParams} t=${t} />
    </div>
  </${ViewFrame}>`;
}

const numbers = (size) => Array.from({ length: size }, (_, i) => ({ value: i, label: String(i) }));

/** [ and ] a layer back and on. */
function useLayerKeys(choose, layer, head) {
  const latest = useRef(null);
  latest.current = { choose, layer, head };
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !["[", "]"].includes(event.key)) return;
      if (event.target.closest("input[type=text], input[type=number], textarea, dialog")) return;
      const now = latest.current;
      now.choose(now.layer + (event.key === "]" ? 1 : -1), now.head);
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

const groupOf = ({ n_heads, n_kv_heads }, head) => Math.floor(head / (n_heads / n_kv_heads));

/** The heads that use the same keys and values as this one: "0–2". */
function sharing(heads, head) {
  const size = heads.n_heads / heads.n_kv_heads;
  const first = groupOf(heads, head) * size;
  return size > 1 ? `${first}–${first + size - 1}` : "";
}

function AllHeads({ model, run, small, layer, head, choose, t }) {
  const canvas = useRef(null);
  const { entropy, sink } = small.meta;
  const told = (l, h) => [
    t("attention.head_of", { head: h, layer: l }),
    t("attention.entropy_is", { n: float(entropy[l][h], 3) }),
    t("attention.sink_is", { share: percent(sink[l][h]) }),
    run.heads[l].n_kv_heads < run.heads[l].n_heads && t("attention.shares", { heads: sharing(run.heads[l], h) }),
  ].filter(Boolean).join(" · ");
  const rows = () => run.heads.flatMap((heads, l) => Array.from({ length: heads.n_heads }, (_, h) => ({ layer: l, head: h, group: groupOf(heads, h), entropy: entropy[l][h], sink: sink[l][h] })));
  const table = () => ({
    columns: [{ key: "layer", label: t("attention.layer") }, { key: "head", label: t("attention.head") }, { key: "group", label: t("attention.kv_head") }, { key: "entropy", label: t("attention.entropy") }, { key: "sink", label: t("attention.sink"), format: "percent" }],
    rows: rows(),
  });
  const all = rows();
  const sinks = all.filter((one) => one.sink > SINK).length;
  return html`<${Figure} kind="all-heads" testid="heads" title=${t("attention.all_heads")} name=${`${model.name}-attention`} table=${table} picture=${() => canvas.current}
      sentence=${t("attention.sentence_sinks", { n: sinks, all: all.length, share: percent(SINK, 0) })}>
    <${Thumbnails} canvas=${canvas} run=${run} small=${small} layer=${layer} head=${head} choose=${choose} told=${told} t=${t} />
  </${Figure}>`;
}

const [LEFT, OVER, PAD, BAR, APART] = [30, 20, 3, 5, 6]; // px: labels, gaps, the bar of entropy, between groups

function Thumbnails({ canvas, run, small, layer, head, choose, told, t }) {
  const box = useRef(null);
  const place = useRef(null);
  const width = useWidth(box);
  const [over, setOver] = useState(null);
  const look = shade.value;
  useLayoutEffect(() => {
    if (!width) return;
    place.current = arrange(width, run);
    paint(canvas.current, place.current, { run, small, layer, head, look, over });
  }, [width, run, small, layer, head, look, over]);
  useEffect(() => {
    if (!place.current) return;
    const [top, { line }] = [OVER + layer * place.current.line, place.current];
    const { scrollTop, clientHeight } = box.current;
    if (top < scrollTop || top + line > scrollTop + clientHeight) box.current.scrollTop = top - clientHeight / 2;
  }, [width, layer]);
  const at = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const { side, line, columns } = place.current;
    const l = Math.floor((y - OVER) / line);
    if (l < 0 || l >= run.n_layers) return null;
    const h = columns[l].findIndex((left) => x >= left - PAD && x < left + side + PAD);
    return h < 0 ? null : [l, h];
  };
  const keys = (event) => {
    const last = run.heads[layer].n_heads - 1;
    const to = { ArrowRight: [layer, head + 1], ArrowLeft: [layer, head - 1], ArrowDown: [layer + 1, head], ArrowUp: [layer - 1, head], Home: [layer, 0], End: [layer, last], PageDown: [layer + 5, head], PageUp: [layer - 5, head] }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation();
    choose(...to);
  };
  return html`<output class="readout heads-readout number" aria-live="polite" data-testid="heads-readout">${told(...(over ?? [layer, head]))}</output>
    <div class="canvas-box heads-box" ref=${box} role="application" aria-roledescription=${t("shell.heatmap_role")} tabindex="0" data-testid="heads-canvas"
      aria-label=${`${t("attention.all_heads")}. ${t("attention.all_heads_help")}`} onKeyDown=${keys}>
      <canvas ref=${canvas} aria-hidden="true" onPointerMove=${(e) => setOver((old) => { const next = at(e); return same(old, next) ? old : next; })} onPointerLeave=${() => setOver(null)} onClick=${(e) => { const one = at(e); if (one) choose(...one); }}></canvas>
    </div>
    <ul class="marks"><li><i class="mark-group" aria-hidden="true"></i>${t("attention.mark_group")}</li><li><i class="mark-sink" aria-hidden="true"></i>${t("attention.mark_sink", { share: percent(SINK, 0) })}</li><li><i class="mark-entropy" aria-hidden="true"></i>${t("attention.mark_entropy")}</li></ul>`;
}

const same = (a, b) => a === b || (a && b && a[0] === b[0] && a[1] === b[1]);

/** Where each head's picture goes: its side, a line's height, and the left edges by layer. */
function arrange(width, run) {
  const most = run.heads.reduce((a, b) => (b.n_heads > a.n_heads ? b : a));
  const gaps = most.n_kv_heads < most.n_heads ? most.n_kv_heads : 0;
  const side = Math.max(7, Math.min(34, Math.floor((width - LEFT - gaps * APART - 4) / most.n_heads - 2 * PAD)));
  const columns = run.heads.map((heads) => Array.from({ length: heads.n_heads }, (_, h) => LEFT + PAD + h * (side + 2 * PAD) + (heads.n_kv_heads < heads.n_heads ? groupOf(heads, h) * APART : 0)));
  const line = side + BAR + 2 * PAD + 2;
  return { width, side, line, columns, height: OVER + run.n_layers * line + 2 };
}

function paint(canvas, { width, height, side, line, columns }, { run, small, layer, head, look, over }) {
  const ratio = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = colour("--paper");
  context.fillRect(0, 0, width, height);
  const { entropy, sink, H } = small.meta;
  const size = Math.round(Math.sqrt(small.buffer.byteLength / (run.n_layers * H)));
  const data = new Uint8Array(small.buffer);
  const table = colours("sequential", look);
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const ink = tile.getContext("2d");
  const image = ink.createImageData(size, size);
  const most = Math.log(Math.max(2, run.ids.length));
  context.font = `11px ${colour("--sans")}`;
  context.textBaseline = "middle";
  context.imageSmoothingEnabled = side < size;
  const widest = columns.reduce((a, b) => (b.length > a.length ? b : a));
  context.fillStyle = colour("--muted");
  context.textAlign = "center";
  const every = side + 2 * PAD < 18 ? 4 : 1;
  widest.forEach((x, h) => { if (h % every === 0) context.fillText(String(h), x + side / 2, OVER / 2 - 1); });
  run.heads.forEach((heads, l) => {
    const top = OVER + l * line + PAD;
    context.fillStyle = l === layer ? colour("--text") : colour("--muted");
    context.textAlign = "right";
    context.fillText(String(l), LEFT - 8, top + side / 2);
    for (let h = 0; h < heads.n_heads; h++) {
      const x = columns[l][h];
      const from = (l * H + h) * size * size;
      for (let i = 0; i < size * size; i++) {
        const step = data[from + i];
        image.data[4 * i] = table[3 * step];
        image.data[4 * i + 1] = table[3 * step + 1];
        image.data[4 * i + 2] = table[3 * step + 2];
        image.data[4 * i + 3] = 255;
      }
      ink.putImageData(image, 0, 0);
      context.drawImage(tile, x, top, side, side);
      context.lineWidth = 1;
      context.strokeStyle = colour("--rule");
      context.strokeRect(x + 0.5, top + 0.5, side - 1, side - 1);
      context.fillStyle = colour("--rule");
      context.fillRect(x, top + side + 2, side, 2);
      context.fillStyle = colour("--series-3");
      context.fillRect(x, top + side + 2, Math.max(0, Math.min(1, entropy[l][h] / most)) * side, 2);
      if (sink[l][h] > SINK) {
        const radius = Math.max(1.8, side / 11);
        context.beginPath();
        context.arc(x + side - radius - 2, top + radius + 2, radius, 0, 7);
        context.fillStyle = colour("--series-2");
        context.fill();
        context.lineWidth = 1;
        context.strokeStyle = colour("--paper");
        context.stroke();
      }
    }
    if (heads.n_kv_heads < heads.n_heads) {
      const shared = heads.n_heads / heads.n_kv_heads;
      context.lineWidth = 1;
      context.strokeStyle = colour("--rule-strong");
      for (let g = 0; g < heads.n_kv_heads; g++) {
        const [first, last] = [columns[l][g * shared], columns[l][(g + 1) * shared - 1]];
        context.strokeRect(first - 2.5, top - 2.5, last + side - first + 5, side + BAR + 4);
      }
    }
  });
  const outline = ([l, h], tint, thick) => {
    context.lineWidth = thick;
    context.strokeStyle = tint;
    context.strokeRect(columns[l][h] - 1, OVER + l * line + PAD - 1, side + 2, side + 2);
  };
  if (over) outline(over, colour("--text"), 1.5);
  outline([layer, head], colour("--series-2"), 3);
}

function OneHead({ model, run, small, layer, head, kind, query, setParams, t }) {
  const tokens = run.ids.length;
  const asked = query < 0 ? tokens - 1 : Math.min(query, tokens - 1);
  const get = (l, h) => tensorSlice(run, `layers.${l}.attn.${kind}`, { at: `0,${h},:,:`, max: FEW, reduce: "absmax" });
  const probs = `layers.${layer}.attn.probs`;
  const { value, fresh } = useAsync(
    () => Promise.all([get(layer, head), tensorSlice(run, probs, { at: `0,${head},:,:`, max: FEW }), tensorSlice(run, probs, { at: `0,${head},${asked},:`, max: MANY })])
      .then(([shown, shares, row]) => ({ shown, shares, row, query: asked })),
    [run.id, layer, head, kind, asked],
  );
  useEffect(() => {
    if (!fresh) return;
    const beside = [[layer, head + 1], [layer, head - 1], [layer + 1, head], [layer - 1, head]];
    for (const [l, h] of beside) if (l >= 0 && l < run.n_layers && h >= 0 && h < run.heads[l].n_heads) get(l, h).catch(() => {});
  }, [fresh, layer, head, kind]);
  if (!value) return html`<${Loading} />`;
  return html`<div class="one-head ${fresh ? "" : "stale"}" data-testid="one-head" data-head=${`${layer}.${head}.${kind}`} data-fresh=${String(fresh)}>
    <${Head} model=${model} run=${run} small=${small} layer=${layer} head=${head} kind=${kind} value=${value} setParams=${setParams} t=${t} />
  </div>`;
}

function Head({ model, run, small, layer, head, kind, value, setParams, t }) {
  const { shown, shares, row, query } = value;
  const [rows, cols] = shown.shape;
  const [rowBlock, colBlock] = shown.block;
  const label = (block, size) => Array.from({ length: size }, (_, i) => (block > 1 ? `${i * block}–${(i + 1) * block - 1}` : pieceLabel(run.pieces[i])));
  const rowLabels = useMemo(() => label(rowBlock, rows), [run, rowBlock, rows]);
  const colLabels = useMemo(() => label(colBlock, cols), [run, colBlock, cols]);
  const heads = run.heads[layer];
  const chosen = Math.floor(query / rowBlock);
  const favourite = mostRead(shares);
  const ablate = route.value.ablate;
  const off = ablate.some(([l, h]) => l === layer && h === head);
  const toggle = () => go({ ablate: off ? ablate.filter(([l, h]) => l !== layer || h !== head) : [...ablate, [layer, head]] });
  const sentence = t(colBlock > 1 ? "attention.sentence_reduced" : "attention.sentence", { head, layer, share: percent(favourite.share), token: favourite.at * colBlock, text: colLabels[favourite.at] });
  const [block] = row.block;
  const read = Array.from(row.data, (value, key) => ({ key, label: block > 1 ? `${key * block}–${(key + 1) * block - 1}` : `${key} ${pieceLabel(run.pieces[key])}`, value: value * block }));
  const top = read.sort((a, b) => b.value - a.value || a.key - b.key).slice(0, TOP);
  return html`
    <h2>${t("attention.head_of", { head, layer })}</h2>
    <${Facts} testid="head-facts" rows=${[
      ...(small ? [[t("attention.entropy"), t("attention.nats", { n: float(small.meta.entropy[layer][head], 3) }), "head-entropy"], [t("attention.sink"), percent(small.meta.sink[layer][head]), "head-sink"]] : []),
      [t("attention.kv_head"), `${groupOf(heads, head)}${sharing(heads, head) && ` (${t("attention.shared_with", { heads: sharing(heads, head) })})`}`, "head-group"],
      [t("attention.step"), html`<${StepLink} name=${`layers.${layer}.attn.${kind}`} />`],
    ]} />
    <${Heatmap} testid="head" title=${t(`attention.kind_${kind}`)} name=${`${model.name}-layer${layer}-head${head}-${kind}`} data=${shown.data} rows=${rows} cols=${cols} rowLabels=${rowLabels} colLabels=${colLabels}
      rowTitle=${t("attention.query")} colTitle=${t("attention.key")} scale=${kind === "probs" ? "sequential" : "diverging"} low=${kind === "probs" ? 0 : undefined} high=${kind === "probs" ? 1 : undefined}
      format=${kind === "probs" ? share : float} sentence=${sentence} selected=${[chosen, -1]} onCell=${(r) => setParams({ query: r * rowBlock })} />
    ${(rowBlock > 1 || colBlock > 1) && html`<p class="note">${t("attention.reduced", { rows: rowBlock, cols: colBlock })}</p>`}
    <${Button} pressed=${off} testid="ablate" help=${t("attention.ablate_help")} onClick=${toggle}>${t(off ? "attention.ablate_on" : "attention.ablate_off")}</${Button}>
    <h3 class="readers">${t("attention.what_reads")}</h3>
    ${run.pieces.length <= CHIPS ? html`<${Pieces} pieces=${run.pieces} selected=${query} onSelect=${(i) => setParams({ query: i })} label=${t("attention.query")} testid="query" />`
      : html`<${NumberField} label=${t("attention.query")} value=${query} min=${0} max=${run.pieces.length - 1} onChange=${(i) => setParams({ query: i })} testid="query" />`}
    <${Bars} testid="reads" title=${t("attention.reads", { text: pieceLabel(run.pieces[query]), position: query })} name=${`${model.name}-layer${layer}-head${head}-query${query}`} rows=${top} max=${1} format=${percent} />`;
}

const share = (value) => float(value, 3);

/** The key that gets most, and its part of all attention: the mean over the queries. */
export function mostRead({ data, shape: [rows, cols], block: [, colBlock] }) {
  const sums = new Float64Array(cols);
  for (let i = 0; i < data.length; i++) sums[i % cols] += data[i];
  const at = sums.reduce((best, sum, c) => (sum > sums[best] ? c : best), 0);
  return { at, share: (sums[at] / rows) * colBlock };
}
