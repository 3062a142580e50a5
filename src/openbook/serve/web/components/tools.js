/** What a person can take home: a picture, a table's numbers, the record. */
import { html } from "../html.js";
import { saveCsv, saveJson, savePng, saveSvgPng } from "../export.js";
import { byName } from "../format.js";
import { t } from "../i18n.js";
import { colour } from "../theme.js";

/** The buttons PNG, CSV, JSON. Props as those of `Figure` (figure.js). */
export function FigureTools({ title, name, table, record, picture, testid, children }) {
  const png = () => {
    const drawn = picture?.();
    if (drawn instanceof SVGSVGElement) saveSvgPng(drawn, name);
    else savePng(drawn ?? paintTable(title, table()), name);
  };
  const csv = () => {
    const { columns, rows } = table();
    saveCsv([columns.map((column) => column.label), ...rows.map((row) => columns.map((column) => row[column.key]))], name);
  };
  const saving = (format, save) => html`<button type="button" class="button" data-testid="${testid}-${format}"
    aria-label=${`${t("shell.export")} ${t(`shell.export_${format}`)}: ${title}`} onClick=${save}>${t(`shell.export_${format}`)}</button>`;
  return html`<span class="figure-tools">${children}${saving("png", png)}${saving("csv", csv)}${saving("json", () => saveJson(record?.() ?? table().rows.map(({ key: _, ...row }) => row), name))}</span>`;
}

const PAINTED_ROWS = 400;

/** A table as a picture, at most its first 400 rows. @returns {HTMLCanvasElement} */
function paintTable(title, { columns, rows }) {
  const font = (weight) => `${weight} 13px ${colour("--sans") || "sans-serif"}`;
  const cells = rows.slice(0, PAINTED_ROWS).map((row) => columns.map((column) => cellText(column, row)));
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d");
  context.font = font(600);
  const widths = columns.map((column, i) =>
    Math.min(360, 24 + Math.max(context.measureText(column.label).width, ...cells.map((row) => context.measureText(row[i]).width))));
  const line = 22;
  [canvas.width, canvas.height] = [2 * (widths.reduce((a, b) => a + b, 24)), 2 * (line * (cells.length + 2) + 24)];
  context.scale(2, 2);
  context.fillStyle = colour("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colour("--text");
  context.font = font(600);
  context.fillText(title, 12, 24);
  [columns.map((column) => column.label), ...cells].forEach((row, r) => {
    context.font = font(r === 0 ? 600 : 400);
    row.reduce((x, text, i) => {
      context.fillText(text, x, 24 + line * (r + 1), widths[i] - 12);
      return x + widths[i];
    }, 12);
  });
  return canvas;
}

const OURS = new Set(Object.values(byName));

/** What a cell shows: text, a number's text, or html. @param {import("./table.js").Column} column */
export function cell({ key, format }, row) {
  const value = row[key];
  if (typeof format === "string") return byName[format](value);
  if (format) return OURS.has(format) ? format(value) : format(value, row);
  return typeof value === "number" ? byName[Number.isInteger(value) ? "int" : "float"](value) : (value ?? "");
}

/** The same as text alone: where a cell shows html, its value. */
function cellText(column, row) {
  const shown = cell(column, row);
  return typeof shown === "object" && shown !== null ? String(row[column.key] ?? "") : String(shown ?? "");
}
