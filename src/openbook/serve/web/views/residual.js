/** Residual stream: the logit lens after every layer, and how far each half of a layer moves the stream. */
import { html, useMemo, useState } from "../html.js";
import { api } from "../api.js";
import { float, percent, visible } from "../format.js";
import { language } from "../i18n.js";
import { CellGrid } from "../components/cellgrid.js";
import { LineChart } from "../components/chart.js";
import { Button, Choice } from "../components/controls.js";
import { Section, useAsync, ViewFrame } from "../components/frame.js";
import { Heatmap } from "../components/heatmap.js";
import { Loaded, quiet } from "../components/loaded.js";
import { pieceLabel, Pieces } from "../components/pieces.js";
import { DataTable } from "../components/table.js";

export const id = "residual";
export const needs = "run";
export const defaults = { measure: "p", layer: -1, at: -1, from: -1, which: "attn" };

const SHOWN = 24; // positions in the table at a time: each takes the head once for every layer
const TOP = 12;

/**
 * The first row from which on the top token at a position is the one of the last row.
 * @param {{id: number}[][]} top by row and position
 */
export function settledAt(top, position) {
  const last = top.length - 1;
  let row = last;
  while (row > 0 && top[row - 1][position].id === top[last][position].id) row -= 1;
  return row;
}

/** Where the largest of a matrix's finite numbers is. @param {(number | null)[][]} rows @returns {[number, number]} */
export function largest(rows) {
  let best = [0, 0];
  rows.forEach((row, r) => row.forEach((value, c) => {
    if (value !== null && !(value <= rows[best[0]][best[1]])) best = [r, c];
  }));
  return /** @type {[number, number]} */ (best);
}

/** The last index if `wanted` is -1 or beyond it. */
export const within = (wanted, count) => (wanted < 0 || wanted >= count ? count - 1 : wanted);

/** "layers.3" → 3; what is no layer's (the embedding) → null. */
export const layerNumber = (name) => (/^layers\.(\d+)/.exec(name) ? Number(/^layers\.(\d+)/.exec(name)[1]) : null);

/**
 * The positions that are in the table: those from `from` on if `at` is among them, else some around `at`.
 * @returns {[number, number]} the first, and the one after the last
 */
export function shownAround(at, from, count) {
  const last = Math.max(0, count - SHOWN);
  const start = from >= 0 && from <= at && at < from + SHOWN ? Math.min(from, last) : Math.max(0, Math.min(at - SHOWN + 4, last));
  return [start, Math.min(count, start + SHOWN)];
}

export function View({ run, params: shown, setParams, t }) {
  const params = shown.value;
  const count = run.ids.length;
  const at = within(params.at, count);
  const [start, stop] = shownAround(at, params.from, count);
  const [attempt, setAttempt] = useState(0);
  const lens = useAsync((signal) => api.get(`/api/runs/${run.id}/lens?start=${start}&stop=${stop}`, signal), [run.id, start, stop, attempt]);
  const there = lens.fresh || !lens.value || (at >= lens.value.start && at < lens.value.start + lens.value.top[0].length && lens.value.positions === count);
  return html`<${ViewFrame} id=${id} title=${t("residual.title")} about=${[t("residual.about"), t("residual.about.update")]}>
    <${Pieces} pieces=${run.pieces} selected=${at} onSelect=${(i) => setParams({ at: i })} label=${t("residual.position")} testid="lens-positions" />
    <${Controls} ...${{ params, setParams, t, start, stop, count }} />
    <${Loaded} of=${there ? lens : { ...lens, value: null, loading: true }} name="lens" again=${() => setAttempt(attempt + 1)}>
      ${(found) => html`<${Lens} ...${{ run, params, setParams, t, at }} lens=${found} />`}<//>
  <//>`;
}

function Controls({ params, setParams, t, start, stop, count }) {
  const turn = (to) => setParams({ from: to, at: to });
  return html`<div class="toolbar">
    <${Choice} label=${t("residual.measure")} value=${params.measure} testid="lens-measure" onChange=${(measure) => setParams({ measure })}
      options=${["p", "entropy", "kl"].map((measure) => ({ value: measure, label: t(`residual.measure.${measure}`) }))} />
    ${count > SHOWN && html`<span class="control pager">
      <${Button} disabled=${start === 0} onClick=${() => turn(Math.max(0, start - SHOWN))} testid="lens-earlier" label=${t("residual.grid.earlier")}>←<//>
      <span class="number">${t("residual.grid.from", { first: start, last: stop - 1, count })}</span>
      <${Button} disabled=${stop === count} onClick=${() => turn(Math.min(count - SHOWN, start + SHOWN))} testid="lens-later" label=${t("residual.grid.later")}>→<//>
    </span>`}
  </div>`;
}

function Lens({ run, lens, params, setParams, t, at }) {
  const here = at - lens.start; // the column of the table
  const row = within(params.layer, lens.layers.length);
  const input = pieceLabel(run.pieces[at]);
  const last = lens.layers.length - 1;
  const label = (r) => layerLabel(lens.layers[r], t);
  const settled = settledAt(lens.top, here);
  const end = lens.top[last][here];
  const words = { input, position: at, token: visible(end.text), p: percent(end.p), layer: label(settled) };
  return html`
    <${LensGrid} ...${{ run, lens, params, setParams, t, here, row, label }} sentence=${t(settled === last ? "residual.settled.end" : "residual.settled", words)} />
    <div class="pair">
      <${TopTokens} ...${{ run, lens, row, at, here, t, input }} label=${label(row)} />
      <${Updates} ...${{ lens, params, t, at, input }} />
    </div>
    <${UpdateMap} ...${{ run, lens, params, setParams, t, at }} />`;
}

const layerLabel = (name, t) => {
  const n = layerNumber(name);
  return n === null ? t("residual.layer.embed") : t("residual.layer.n", { n });
};

function LensGrid({ run, lens, params, setParams, t, here, row, label, sentence }) {
  const { measure } = params;
  const shown = lens.top[0].map((_, c) => lens.start + c);
  const value = (r, c) => ({ p: lens.top[r][c].p, entropy: lens.entropy[r][c], kl: lens.kl[r][c] })[measure];
  const high = measure === "p" ? 1 : Math.max(...lens[measure].flat().map((v) => v ?? 0));
  const cell = (r, c) => {
    const top = lens.top[r][c];
    const numbers = { p: percent(top.p), entropy: float(lens.entropy[r][c]), kl: float(lens.kl[r][c]) };
    return { text: visible(top.text), value: value(r, c), says: t("residual.cell", { layer: label(r), position: shown[c], token: visible(top.text), ...numbers }) };
  };
  return html`<${CellGrid} rows=${lens.layers.map((name, r) => ({ key: r, label: label(r) }))} corner=${t("residual.grid.layer")}
    cols=${shown.map((p) => ({ key: p, label: `${p} ${pieceLabel(run.pieces[p])}`, says: `${t("residual.position")} ${p}` }))}
    cell=${cell} low=${0} high=${high} format=${measure === "p" ? percent : (v) => float(v)} legend=${t(`residual.measure.${measure}.long`)}
    caption=${t("residual.grid.caption")} sentence=${sentence} name="lens" testid="lens"
    selected=${[row, here]} onSelect=${(r, c) => setParams({ layer: r, at: shown[c], from: lens.start })} />`;
}

function TopTokens({ run, lens, row, at, here, t, label, input }) {
  const [attempt, setAttempt] = useState(0);
  const tokens = useAsync(async (signal) => {
    await quiet(80, signal);
    return (await api.get(`/api/runs/${run.id}/lens?row=${row}&position=${at}&n=${TOP}`, signal)).tokens;
  }, [run.id, row, at, attempt]);
  const top = lens.top[row][here];
  const words = { layer: label, position: at, input, token: visible(top.text), p: percent(top.p), entropy: float(lens.entropy[row][here]), kl: float(lens.kl[row][here]) };
  const columns = [
    { key: "rank", label: t("residual.top.rank"), format: "int", align: "left" },
    { key: "text", label: t("residual.top.token"), align: "left", format: visible },
    { key: "id", label: t("residual.top.id"), format: (value) => String(value), align: "right" },
    { key: "p", label: t("residual.top.p"), format: "percent", align: "right" },
    { key: "logit", label: t("residual.top.logit"), format: "float" },
  ];
  return html`<${Section} title=${t("residual.top.title", words)} note=${t("residual.top.sentence", words)} testid="lens-top">
    <${Loaded} of=${tokens} name="lens-tokens" again=${() => setAttempt(attempt + 1)}>
      ${(found) => html`<${DataTable} columns=${columns} rows=${found.map((token, i) => ({ ...token, rank: i + 1, key: token.id }))}
        caption=${t("residual.top.title", words)} name="lens-top-${row}-${at}" testid="lens-tokens" />`}
    <//>
  <//>`;
}

/** The layer whose row of the lens is selected. */
const layerShown = (lens, params) => layerNumber(lens.layers[within(params.layer, lens.layers.length)]) ?? 0;

function Updates({ lens, params, t, at, input }) {
  const { attn, mlp } = lens.update;
  const peak = (rows) => largest(rows.map((row) => [row[at]]))[0];
  const [a, m] = [peak(attn), peak(mlp)];
  const series = Object.entries({ attn, mlp }).map(([key, rows]) => ({ label: t(`residual.update.${key}`), points: rows.map((row, i) => [i, row[at]]) }));
  return html`<${Section} title=${t("residual.update.title")} testid="lens-updates">
    <${LineChart} name="updates-${at}" testid="updates-chart" title=${t("residual.update.chart", { position: at, input })} series=${series} height=${320}
      x=${{ label: t("residual.update.x"), format: String }} y=${{ label: t("residual.update.y"), format: (v) => float(v), zero: true }} marker=${layerShown(lens, params)}
      sentence=${t("residual.update.sentence", { position: at, input, attnLayer: a, attn: float(attn[a][at]), mlpLayer: m, mlp: float(mlp[m][at]) })} />
  <//>`;
}

function UpdateMap({ run, lens, params, setParams, t, at }) {
  const which = params.which === "mlp" ? "mlp" : "attn";
  const rows = lens.update[which];
  const data = useMemo(() => Float32Array.from(rows.flat(), (value) => value ?? NaN), [rows]);
  const labels = useMemo(() => run.pieces.map((piece, i) => `${i} ${pieceLabel(piece)}`), [run, language.value]);
  const [layer, position] = largest(rows);
  const words = { which: t(`residual.update.${which}`), value: float(rows[layer][position]), layer, position, input: pieceLabel(run.pieces[position]) };
  const choose = (r, c) => setParams({ at: c, layer: lens.layers.findIndex((name) => layerNumber(name) === r) });
  return html`<${Section} title=${t("residual.update.map")} testid="update-map">
    <div class="toolbar"><${Choice} label=${t("residual.update.which")} value=${which} testid="update-which" onChange=${(w) => setParams({ which: w })}
      options=${["attn", "mlp"].map((w) => ({ value: w, label: t(`residual.update.${w}`) }))} /></div>
    <${Heatmap} name="updates-${which}" testid="updates-map" title=${t("residual.update.map.title", words)} data=${data} rows=${rows.length} cols=${lens.positions} low=${0} format=${(v) => float(v)}
      rowTitle=${t("residual.update.x")} colTitle=${t("residual.position")} colLabels=${labels} selected=${[layerShown(lens, params), at]} onCell=${choose} sentence=${t("residual.update.map.sentence", words)} />
  <//>`;
}
