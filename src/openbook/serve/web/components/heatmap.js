/** A matrix of numbers as colours, drawn on a canvas: labels, cursor, hatching where there is no number. */
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../html.js";
import { float } from "../format.js";
import { t } from "../i18n.js";
import { colour, shade } from "../theme.js";
import { Figure } from "./figure.js";
import { colours, ends, isDark, stepOf } from "./scale.js";
import { useWidth } from "./width.js";

const [LARGE, LARGEST, SQUARE] = [54, 76, 440]; // px, a cell's side; small matrices have larger ones, up to SQUARE in all
const TALLEST = 640; // px, all rows
const NUMBERS = 42; // px: cells as wide as this have their number written in them
const LABEL = 12; // px, a label's line
const WIDEST_LABEL = 120;

/**
 * @param {{
 *   data: Float32Array | number[], rows: number, cols: number,
 *   name: string,                                     of exported files
 *   title: string, sentence?: string,                 the sentence says in words what is to be seen
 *   rowLabels?: string[], colLabels?: string[],       else the index
 *   rowTitle?: string, colTitle?: string,             what the axes are: "query", "key"
 *   scale?: "sequential" | "diverging",               diverging has 0 in its middle
 *   low?: number, high?: number,                      ends of the scale, else those of the data
 *   format?: (value: number) => string,
 *   describe?: (row: number, col: number) => string,  of the cell under the cursor, in place of labels and number
 *   selected?: [number, number] | null,               outlined; [r, -1] a whole row, [-1, c] a whole column
 *   onCell?: (row: number, col: number) => void,      click, Enter
 *   testid?: string,
 * }} props
 */
export function Heatmap(props) {
  const { data, rows, cols, name, title, sentence, rowTitle, colTitle, format = float, testid = "heatmap" } = props;
  const rowLabels = useMemo(() => labels(props.rowLabels, rows), [props.rowLabels, rows]);
  const colLabels = useMemo(() => labels(props.colLabels, cols), [props.colLabels, cols]);
  const canvas = useRef(null);
  const table = () => ({ columns: tableColumns(cols, colLabels, rowTitle, colTitle, format), rows: tableRows(data, rows, cols, rowLabels, colLabels) });
  const record = () => ({ title, rows: rowLabels, columns: colLabels, values: Array.from({ length: rows }, (_, r) => Array.from(data.slice(r * cols, (r + 1) * cols))) });
  return html`<${Figure} kind="heatmap" title=${title} name=${name} sentence=${sentence} testid=${testid} table=${table} record=${record} picture=${() => canvas.current}>
    <${Matrix} ...${props} rowLabels=${rowLabels} colLabels=${colLabels} format=${format} testid=${testid} canvas=${canvas} />
  </${Figure}>`;
}

/** The drawing itself, with its cursor, what the cursor is on, and the legend. Props as those of `Heatmap`. */
function Matrix({ data, rows, cols, title, sentence, rowLabels, colLabels, rowTitle, colTitle, scale = "sequential", low, high, format, describe, selected = null, onCell, testid, canvas }) {
  const box = useRef(null);
  const place = useRef(null);
  const width = useWidth(box);
  const [cursor, setCursor] = useState(/** @type {[number, number] | null} */ (null));
  const limits = useMemo(() => ends(data, scale, low, high), [data, scale, low, high]);
  const holes = useMemo(() => data.some((value) => !Number.isFinite(value)), [data]);
  const look = shade.value;

  useLayoutEffect(() => {
    if (!width) return;
    place.current = layout(width, rows, cols, rowLabels, colLabels);
    draw(canvas.current, place.current, { data, rows, cols, rowLabels, colLabels, limits, scale, look, selected, cursor, format });
  }, [data, rows, cols, rowLabels, colLabels, limits, scale, look, width, selected?.[0], selected?.[1], cursor, format]);

  const cellAt = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    const { left, over, cellWidth, cellHeight } = place.current;
    const [row, col] = [Math.floor((event.clientY - bounds.top - over) / cellHeight), Math.floor((event.clientX - bounds.left - left) / cellWidth)];
    return row >= 0 && row < rows && col >= 0 && col < cols ? [row, col] : null;
  };
  const start = () => [clamp(selected?.[0] ?? 0, rows), clamp(selected?.[1] ?? 0, cols)];
  const keys = (event) => {
    const [row, col] = cursor ?? start();
    const far = event.ctrlKey || event.metaKey;
    const to = {
      ArrowRight: [row, col + 1], ArrowLeft: [row, col - 1], ArrowDown: [row + 1, col], ArrowUp: [row - 1, col],
      Home: [far ? 0 : row, 0], End: [far ? rows - 1 : row, cols - 1], PageDown: [row + 10, col], PageUp: [row - 10, col],
    }[event.key];
    if (to) setCursor(cursor ? [clamp(to[0], rows), clamp(to[1], cols)] : [row, col]);
    else if (event.key === "Enter" && onCell) onCell(row, col);
    else if (event.key === "Escape" && cursor) setCursor(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const text = (row, col) => {
    if (describe) return describe(row, col);
    const value = data[row * cols + col];
    const number = value === -Infinity ? t("shell.masked") : Number.isNaN(value) ? t("shell.not_finite") : format(value);
    return t("shell.cell", { row: `${rowTitle ?? t("shell.row")} ${named(rowLabels, row)}`, col: `${colTitle ?? t("shell.column")} ${named(colLabels, col)}`, value: number });
  };
  const told = cursor && cursor[0] < rows && cursor[1] < cols ? text(...cursor) : "";
  return html`<div class="canvas-box" ref=${box} role="application" aria-roledescription=${t("shell.heatmap_role")} tabindex="0" data-testid="${testid}-canvas"
      aria-label=${`${title}. ${sentence ?? ""} ${t("shell.heatmap_help")}`} onKeyDown=${keys}
      onFocus=${(e) => { if (e.currentTarget.matches(":focus-visible") && !cursor) setCursor(start()); }} onBlur=${() => setCursor(null)}>
      <canvas ref=${canvas} aria-hidden="true" onPointerMove=${(e) => setCursor(cellAt(e))} onPointerLeave=${() => setCursor(null)}
        onClick=${(e) => { const cell = cellAt(e); if (cell && onCell) onCell(...cell); }}></canvas>
    </div>
    <output class="readout" aria-live="polite" data-testid="${testid}-readout">${told}</output>
    <${Legend} limits=${limits} scale=${scale} look=${look} format=${format} holes=${holes} />`;
}

/** A scale's colours with its ends. */
export function Legend({ limits, scale, look, format = float, holes = false }) {
  const canvas = useRef(null);
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const table = colours(scale, look);
    const image = context.createImageData(256, 1);
    for (let i = 0; i < 256; i++) image.data.set([...table.slice(3 * i, 3 * i + 3), 255], 4 * i);
    context.putImageData(image, 0, 0);
  }, [scale, look]);
  return html`<div class="legend"><span class="number">${format(limits[0])}</span><canvas ref=${canvas} width="256" height="1" aria-hidden="true"></canvas><span class="number">${format(limits[1])}</span>
    ${holes && html`<span><i class="swatch hatched" aria-hidden="true"></i> ${t("shell.masked")}</span>`}</div>`;
}

const clamp = (at, size) => Math.max(0, Math.min(size - 1, at));
const labels = (given, size) => given ?? Array.from({ length: size }, (_, i) => String(i));
/** "“France” (4)", or the index alone where that is the label. */
const named = (all, i) => (all[i] === String(i) ? String(i) : `“${all[i]}” (${i})`);

/** As many columns as can be read stay columns; a wider matrix is listed, one number a line. */
const WIDE = 64;

function tableColumns(cols, colLabels, rowTitle, colTitle, format) {
  const row = { key: "row", label: rowTitle ?? t("shell.row"), align: "left" };
  if (cols > WIDE) return [row, { key: "column", label: colTitle ?? t("shell.column"), align: "left" }, { key: "value", label: t("shell.value"), format }];
  return [row, ...colLabels.map((label, c) => ({ key: `c${c}`, label: label === String(c) ? label : `${c} ${label}`, format }))];
}

function tableRows(data, rows, cols, rowLabels, colLabels) {
  const label = (all, i) => (all[i] === String(i) ? i : `${i} ${all[i]}`);
  if (cols > WIDE) return Array.from({ length: rows * cols }, (_, i) => ({ row: label(rowLabels, Math.floor(i / cols)), column: label(colLabels, i % cols), value: data[i] }));
  return Array.from({ length: rows }, (_, r) => Object.fromEntries([["row", label(rowLabels, r)], ...Array.from({ length: cols }, (_, c) => [`c${c}`, data[r * cols + c]])]));
}

/** An index, or the first and the last one of a block; of a block the first is written. */
const NUMBER = /^\d+(–\d+)?$/;
const written = (label) => (NUMBER.test(label) ? label.split("–")[0] : label.slice(0, 40));

const FONT = () => `12px ${colour("--sans") || "sans-serif"}`;
const measure = document.createElement("canvas").getContext("2d");

/** Where everything goes, for a width in px. */
function layout(width, rows, cols, rowLabels, colLabels) {
  measure.font = FONT();
  const widest = (all) => Math.min(WIDEST_LABEL, Math.ceil(Math.max(...all.map((label) => measure.measureText(written(label)).width))));
  const left = Math.min(widest(rowLabels), Math.floor(width / 3)) + 8;
  const most = Math.min(LARGEST, Math.max(LARGE, SQUARE / Math.max(rows, cols)));
  let cellWidth = Math.min(most, (width - left - 2) / cols);
  let cellHeight = Math.min(most, TALLEST / rows, Math.max(cellWidth, Math.min(18, 420 / rows)));
  if (rows === cols) cellWidth = cellHeight = Math.min(cellWidth, cellHeight);
  const upright = widest(colLabels) > cellWidth - 4;
  const sparse = Math.ceil((upright ? LABEL + 2 : widest(colLabels) + 8) / cellWidth);
  const numbered = colLabels.every((label) => NUMBER.test(label));
  const over = (upright && !(numbered && sparse > 1) ? widest(colLabels) : LABEL) + 8;
  return { width, left, over, cellWidth, cellHeight, upright: upright && !(numbered && sparse > 1), height: Math.ceil(over + rows * cellHeight + 2), numbered };
}

function draw(canvas, { width, height, left, over, cellWidth, cellHeight, upright, numbered }, { data, rows, cols, rowLabels, colLabels, limits, scale, look, selected, cursor, format }) {
  const ratio = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = colour("--paper");
  context.fillRect(0, 0, width, height);

  const table = colours(scale, look);
  const image = new ImageData(cols, rows);
  for (let i = 0; i < data.length; i++) {
    if (!Number.isFinite(data[i])) continue;
    const step = stepOf(data[i], limits);
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = table[3 * step + c];
    image.data[4 * i + 3] = 255;
  }
  const small = document.createElement("canvas");
  [small.width, small.height] = [cols, rows];
  small.getContext("2d").putImageData(image, 0, 0);
  const [across, down] = [cols * cellWidth, rows * cellHeight];
  context.fillStyle = hatching(context);
  context.fillRect(left, over, across, down);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, left, over, across, down);

  if (Math.min(cellWidth, cellHeight) >= 10) {
    context.strokeStyle = colour("--paper");
    context.lineWidth = 1;
    context.beginPath();
    for (let c = 1; c < cols; c++) context.moveTo(left + c * cellWidth, over), context.lineTo(left + c * cellWidth, over + down);
    for (let r = 1; r < rows; r++) context.moveTo(left, over + r * cellHeight), context.lineTo(left + across, over + r * cellHeight);
    context.stroke();
  }
  context.strokeStyle = colour("--rule");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, over - 0.5, across + 1, down + 1);
  context.font = FONT();
  context.textBaseline = "middle";
  if (cellWidth >= NUMBERS && cellHeight >= 18) {
    context.textAlign = "center";
    for (let i = 0; i < data.length; i++) {
      if (!Number.isFinite(data[i])) continue;
      context.fillStyle = isDark(table, stepOf(data[i], limits)) ? "#ffffff" : "#14171a";
      context.fillText(short(data[i], format), left + ((i % cols) + 0.5) * cellWidth, over + (Math.floor(i / cols) + 0.5) * cellHeight, cellWidth - 4);
    }
  }

  context.fillStyle = colour("--muted");
  context.textAlign = "right";
  const everyRow = Math.ceil((cellHeight < LABEL ? 2 * LABEL : LABEL) / cellHeight);
  for (let r = 0; r < rows; r += everyRow) context.fillText(fitted(context, written(rowLabels[r]), left - 8), left - 6, over + (r + 0.5) * cellHeight);
  const room = upright ? LABEL + 1 : Math.max(...colLabels.map((label) => context.measureText(written(label)).width)) + 10;
  const everyCol = Math.ceil(room / cellWidth);
  for (let c = 0; c < cols; c += everyCol) {
    context.save();
    context.translate(left + (c + 0.5) * cellWidth, over - 5);
    if (upright) context.rotate(-Math.PI / 2);
    context.textAlign = upright ? "left" : "center";
    if (!upright) context.textBaseline = "alphabetic";
    context.fillText(fitted(context, written(colLabels[c]), upright ? over - 6 : room), 0, 0);
    context.restore();
  }

  const outline = ([row, col], tint) => {
    const [x, w] = col < 0 ? [left, across] : [left + col * cellWidth, cellWidth];
    const [y, h] = row < 0 ? [over, down] : [over + row * cellHeight, cellHeight];
    context.lineWidth = 3;
    context.strokeStyle = colour("--paper");
    context.strokeRect(x, y, w, h);
    context.lineWidth = 1.5;
    context.strokeStyle = tint;
    context.strokeRect(x, y, w, h);
  };
  if (selected && (selected[0] >= 0 || selected[1] >= 0)) outline(selected, colour("--series-2"));
  if (cursor) outline(cursor, colour("--text"));
}

/** In a cell there is room for few characters. */
function short(value, format) {
  const text = format(value);
  return text.endsWith("%") ? text : float(value, 2).replace(/^(−?)0(?=[.,])/, "$1");
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let cut = text;
  while (cut.length > 1 && context.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
  return `${cut}…`;
}

/** Diagonal lines: here is no number. */
function hatching(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.fillStyle = colour("--sunken");
  ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = colour("--hatch");
  ink.beginPath();
  for (const shift of [-6, 0, 6]) ink.moveTo(shift, 6), ink.lineTo(shift + 6, 0);
  ink.stroke();
  return context.createPattern(tile, "repeat");
}
