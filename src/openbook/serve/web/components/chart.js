/** Lines and bars. */
import { html, useRef, useState } from "../html.js";
import { float, percent } from "../format.js";
import { t } from "../i18n.js";
import { Figure } from "./figure.js";
import { useWidth } from "./width.js";

const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"];
const SERIES = 6; // colours; with more, dashes tell apart

/**
 * Lines over a common x axis, with a cursor, a table and exports.
 * @param {{
 *   series: {label: string, points: [number, number | null][], dashed?: boolean}[],
 *   x: {label: string, format?: (value: number) => string}, y: {label: string, format?: (value: number) => string, zero?: boolean, log?: boolean},
 *   title: string, sentence?: string, name: string, height?: number, marker?: number, testid?: string,
 * }} props `marker`: an x to mark with an upright line; `log`: a logarithmic axis, numbers above 0 only
 */
export function LineChart({ series, x, y, title, sentence, name, height = 260, marker, testid = "chart" }) {
  const svg = useRef(null);
  const places = [...new Set(series.flatMap(({ points }) => points.map(([at]) => at)))].sort((a, b) => a - b);
  const table = () => ({
    columns: [{ key: "x", label: x.label, format: x.format }, ...series.map(({ label }, i) => ({ key: `y${i}`, label, format: y.format }))],
    rows: places.map((at) => Object.fromEntries([["x", at], ...series.map(({ points }, i) => [`y${i}`, points.find(([px]) => px === at)?.[1] ?? null])])),
  });
  return html`<${Figure} kind="chart" title=${title} sentence=${sentence} name=${name} testid=${testid} table=${table} picture=${() => svg.current}
      record=${() => ({ title, x: x.label, y: y.label, series: series.map(({ label, points }) => ({ label, points })) })}>
    <${Lines} series=${series} places=${places} x=${x} y=${y} title=${title} sentence=${sentence} height=${height} marker=${marker} testid=${testid} svg=${svg} />
  </${Figure}>`;
}

function Lines({ series, places, x, y, title, sentence, height, marker, testid, svg }) {
  const box = useRef(null);
  const width = useWidth(box, 600, 240);
  const [cursor, setCursor] = useState(-1); // index in `places`
  const [formatX, formatY] = [x.format ?? float, y.format ?? float];
  const up = y.log ? Math.log10 : (value) => value;
  const usable = (value) => Number.isFinite(value) && (!y.log || value > 0);
  const values = series.flatMap(({ points }) => points.map(([, value]) => value)).filter(usable);
  const ticksY = y.log ? decades(values) : ticks(Math.min(...values, ...(y.zero ? [0] : [])), Math.max(...values, ...(y.zero ? [0] : [])), Math.max(2, Math.floor(height / 55)));
  const ticksX = ticks(places[0] ?? 0, places.at(-1) ?? 1, Math.max(2, Math.floor(width / 110)), true);
  const [bottom, top] = [up(ticksY[0]), up(ticksY.at(-1))];
  const [first, last] = [Math.min(places[0] ?? 0, ticksX[0]), Math.max(places.at(-1) ?? 1, ticksX.at(-1))];
  const left = 16 + Math.max(...ticksY.map((value) => formatY(value).length)) * 7.2;
  const [right, above, below] = [width - 14, 12, height - 42];
  const px = (value) => left + ((value - first) / (last - first || 1)) * (right - left);
  const py = (value) => below - ((up(value) - bottom) / (top - bottom || 1)) * (below - above);
  const path = (points) => points.reduce(({ d, pen }, [at, value]) => (usable(value) ? { d: `${d}${pen ? "L" : "M"}${px(at).toFixed(1)} ${py(value).toFixed(1)}`, pen: true } : { d, pen: false }), { d: "", pen: false }).d;
  const nearest = (event) => {
    const at = event.clientX - svg.current.getBoundingClientRect().left;
    return places.reduce((best, place, i) => (Math.abs(px(place) - at) < Math.abs(px(places[best]) - at) ? i : best), 0);
  };
  const keys = (event) => {
    const to = { ArrowRight: cursor + 1, ArrowLeft: cursor - 1, Home: 0, End: places.length - 1, PageDown: cursor + 10, PageUp: cursor - 10 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    setCursor(Math.max(0, Math.min(places.length - 1, to)));
  };
  const told = places[cursor] === undefined ? "" : [`${x.label} ${formatX(places[cursor])}`, ...series.map(({ label, points }) => [label, points.find(([at]) => at === places[cursor])?.[1]]).filter(([, value]) => value !== undefined).map(([label, value]) => `${label} ${formatY(value)}`)].join(" · ");
  const dash = (i, dashed) => (dashed ? DASHES[1] : DASHES[Math.floor(i / SERIES) % DASHES.length]);
  return html`<div class="canvas-box" ref=${box} role="application" aria-roledescription=${t("shell.chart_role")} tabindex="0" aria-label=${`${title}. ${sentence ?? ""}`} data-testid="${testid}-canvas"
      onKeyDown=${keys} onFocus=${(e) => { if (e.currentTarget.matches(":focus-visible") && cursor < 0) setCursor(0); }} onBlur=${() => setCursor(-1)}>
      <svg ref=${svg} viewBox="0 0 ${width} ${height}" height=${height} aria-hidden="true" onPointerMove=${(e) => setCursor(nearest(e))} onPointerLeave=${() => setCursor(-1)}>
        ${ticksY.map((value) => html`<g key=${value}><line class="grid" x1=${left} x2=${right} y1=${py(value)} y2=${py(value)} /><text x=${left - 8} y=${py(value) + 4} text-anchor="end">${formatY(value)}</text></g>`)}
        ${ticksX.map((value) => html`<g key=${value}><line class="axis" x1=${px(value)} x2=${px(value)} y1=${below} y2=${below + 5} /><text x=${px(value)} y=${below + 18} text-anchor="middle">${formatX(value)}</text></g>`)}
        <line class="axis" x1=${left} x2=${right} y1=${below} y2=${below} />
        <text x=${(left + right) / 2} y=${height - 6} text-anchor="middle">${x.label}</text>
        ${marker !== undefined && html`<line class="marker" x1=${px(marker)} x2=${px(marker)} y1=${above} y2=${below} />`}
        ${places[cursor] !== undefined && html`<line class="cursor" x1=${px(places[cursor])} x2=${px(places[cursor])} y1=${above} y2=${below} />`}
        ${series.map(({ label, points, dashed }, i) => html`<g key=${label}><path class="line s${(i % SERIES) + 1}" stroke-dasharray=${dash(i, dashed)} d=${path(points)} />
          ${points.length === 1 && usable(points[0][1]) && html`<circle class="line s${(i % SERIES) + 1}" cx=${px(points[0][0])} cy=${py(points[0][1])} r="3" />`}</g>`)}
      </svg>
    </div>
    <output class="readout number" aria-live="polite" data-testid="${testid}-readout">${told || `${y.label}`}</output>
    ${series.length > 1 && html`<ul class="chart-keys">${series.map(({ label, dashed }, i) => html`<li key=${label}><svg viewBox="0 0 26 10" aria-hidden="true"><line class="line s${(i % SERIES) + 1}" x1="0" x2="26" y1="5" y2="5" stroke-width="2" stroke-dasharray=${dash(i, dashed)} /></svg>${label}</li>`)}</ul>`}`;
}

/** Round numbers that cover low to high (`inside`: that lie between), about `wanted` of them. */
export function ticks(low, high, wanted, inside = false) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (low === high) return inside ? [low] : [low - (Math.abs(low) || 1), low + (Math.abs(low) || 1)];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const [from, to] = inside ? [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)] : [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({ length: to - from + 1 }, (_, i) => Number(((from + i) * step).toPrecision(12)));
}

function decades(values) {
  if (!values.length) return [1, 10];
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  const every = Math.max(1, Math.ceil((high - low) / 6));
  const powers = [];
  for (let power = low; power < high + every; power += every) powers.push(10 ** power);
  return powers.length > 1 ? powers : [powers[0], powers[0] * 10];
}

/**
 * Bars, one below the other, each with its label and number: a list that reads as a table.
 * @param {{
 *   rows: {key?: any, label: any, value: number, note?: string, faded?: boolean, marked?: boolean, text?: string}[],
 *   title: string, sentence?: string, name: string, format?: (value: number) => string,
 *   max?: number,            the full length, else the largest value
 *   onRow?: (row: any, index: number) => void, selected?: any, testid?: string,
 * }} props `text`: the label as text, where `label` is html
 */
export function Bars({ rows, title, sentence, name, format = float, max, onRow, selected, testid = "bars" }) {
  const [active, setActive] = useState(0);
  const full = max ?? Math.max(...rows.map(({ value }) => value), 0);
  const at = Math.min(active, rows.length - 1);
  const length = (value) => `${full > 0 ? Math.max(0, Math.min(100, (100 * value) / full)) : 0}%`;
  const keys = (event) => {
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Enter" && onRow) onRow(rows[at], at);
    else if (to !== undefined && onRow) {
      const next = Math.max(0, Math.min(rows.length - 1, to));
      setActive(next);
      event.currentTarget.children[next]?.focus();
    } else return;
    event.preventDefault();
  };
  const label = (row) => row.text ?? row.label;
  const table = () => ({
    columns: [{ key: "label", label: t("shell.label") }, { key: "value", label: t("shell.value"), format }, ...(rows.some((row) => row.note) ? [{ key: "note", label: "" }] : [])],
    rows: rows.map((row) => ({ label: label(row), value: row.value, note: row.note ?? "" })),
  });
  return html`<${Figure} kind="bars" title=${title} sentence=${sentence} name=${name} testid=${testid} table=${table}>
    <ol class="bar-list" aria-label=${title} onKeyDown=${keys} role=${onRow ? "listbox" : undefined}>
      ${rows.map((row, i) => {
        const on = selected !== undefined && selected === (row.key ?? i);
        return html`<li key=${row.key ?? i} data-testid="${testid}-${i}" role=${onRow ? "option" : undefined} aria-selected=${onRow ? String(on) : undefined} tabindex=${onRow ? (i === at ? 0 : -1) : undefined}
          class="${onRow ? "pick" : ""} ${on ? "on" : ""} ${row.faded ? "faded" : ""} ${row.marked ? "marked" : ""}" onFocus=${onRow && (() => setActive(i))} onClick=${onRow && (() => onRow(row, i))}>
          <span class="bar-label">${row.label}</span><span class="bar-track"><span class="bar" style=${{ width: length(row.value) }}></span></span><span class="bar-value number">${format(row.value)}${row.note && html`<small>${row.note}</small>`}</span>
        </li>`;
      })}
    </ol>
  </${Figure}>`;
}

/**
 * One whole divided: parts side by side in one band, a legend with numbers and shares below.
 * @param {{parts: {label: string, value: number, faded?: boolean}[], title: string, sentence?: string, name: string, format?: (value: number) => string, total?: number, testid?: string}} props
 *   `total` larger than the sum leaves the rest of the band empty
 */
export function Strip({ parts, title, sentence, name, format = float, total, testid = "strip" }) {
  const sum = parts.reduce((all, { value }) => all + value, 0);
  const whole = Math.max(total ?? sum, sum);
  const share = (value) => (whole > 0 ? value / whole : 0);
  const table = () => ({
    columns: [{ key: "label", label: t("shell.label") }, { key: "value", label: t("shell.value"), format }, { key: "share", label: t("shell.share"), format: "percent" }],
    rows: parts.map(({ label, value }) => ({ label, value, share: share(value) })),
  });
  return html`<${Figure} kind="strip" title=${title} sentence=${sentence} name=${name} testid=${testid} table=${table}>
    <div class="band" aria-hidden="true">${parts.map(({ label, value, faded }, i) => html`<span key=${label} class="b${(i % SERIES) + 1} ${faded ? "faded" : ""}" title=${`${label}: ${format(value)}`} style=${{ width: `${100 * share(value)}%` }}></span>`)}</div>
    <ul class="band-keys">${parts.map(({ label, value }, i) => html`<li key=${label} data-testid="${testid}-${i}"><i class="b${(i % SERIES) + 1}" aria-hidden="true"></i>${label} <span class="number">${format(value)}</span> <span class="muted number">${percent(share(value))}</span></li>`)}</ul>
  </${Figure}>`;
}
