/** Lines and bars. */
import { html } from "../html.js";

/**
 * Lines over a common x axis, with a cursor, a table and exports.
 * @param {{
 *   series: {label: string, points: [number, number | null][], dashed?: boolean}[],
 *   x: {label: string, format?: (value: number) => string}, y: {label: string, format?: (value: number) => string, zero?: boolean, log?: boolean},
 *   title: string, sentence?: string, name: string, height?: number, marker?: number, testid?: string,
 * }} props `marker`: an x to mark with an upright line
 */
export function LineChart({ title, testid = "chart" }) {
  return html`<figure class="chart" data-testid=${testid}><figcaption>${title}</figcaption></figure>`;
}

/**
 * Bars, one below the other, each with its label and number: a list that reads as a table.
 * @param {{
 *   rows: {key?: any, label: any, value: number, note?: string, faded?: boolean, marked?: boolean}[],
 *   title: string, sentence?: string, name: string, format?: (value: number) => string,
 *   max?: number,            the full length, else the largest value
 *   onRow?: (row: any, index: number) => void, selected?: any, testid?: string,
 * }} props
 */
export function Bars({ rows, title, testid = "bars" }) {
  return html`<figure class="bars" data-testid=${testid}><figcaption>${title}</figcaption>${rows.map((row) => html`<p>${row.label}: ${row.value}</p>`)}</figure>`;
}

/**
 * One whole divided: parts side by side in one band, a legend with numbers and shares below.
 * @param {{parts: {label: string, value: number, faded?: boolean}[], title: string, sentence?: string, name: string, format?: (value: number) => string, total?: number, testid?: string}} props
 *   `total` larger than the sum leaves the rest of the band empty
 */
export function Strip({ parts, title, testid = "strip" }) {
  return html`<figure class="strip" data-testid=${testid}><figcaption>${title}</figcaption>${parts.map((part) => html`<p>${part.label}: ${part.value}</p>`)}</figure>`;
}
