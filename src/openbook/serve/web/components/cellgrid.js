/** A table whose cells have a word and a colour: the logit lens. It is its own table for those who do not see colours. */
import { html, useEffect, useRef } from "../html.js";
import { t } from "../i18n.js";
import { json, save, saveCsv, saveJson, savePng } from "../export.js";
import { colourOf, inkOn } from "./scale.js";
import { Button } from "./controls.js";

/**
 * @typedef {{text: string, value: number, says: string}} Cell `says`: the whole of it in words
 * @param {{
 *   rows: {key: any, label: string}[], cols: {key: any, label: string, says: string}[], corner: string,
 *   cell: (row: number, col: number) => Cell, low: number, high: number,
 *   caption: string, sentence?: string, name: string,
 *   selected: [number, number], onSelect: (row: number, col: number) => void, testid?: string,
 *   format: (value: number) => string, legend: string,
 * }} props arrow keys, Home and End move the selection
 */
export function CellGrid(props) {
  const { rows, cols, corner, cell, low, high, caption, sentence, name, selected, onSelect, testid = "cells", format, legend } = props;
  const table = useRef(null);
  const wantsFocus = useRef(false);
  useEffect(() => {
    if (!wantsFocus.current) return;
    wantsFocus.current = false;
    table.current?.querySelector("[tabindex='0']")?.focus();
  }, [selected.join(",")]);

  const move = (event) => {
    const [row, col] = selected;
    const to = {
      ArrowUp: [row - 1, col],
      ArrowDown: [row + 1, col],
      ArrowLeft: [row, col - 1],
      ArrowRight: [row, col + 1],
      Home: [row, 0],
      End: [row, cols.length - 1],
      PageUp: [0, col],
      PageDown: [rows.length - 1, col],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    wantsFocus.current = true;
    onSelect(Math.min(rows.length - 1, Math.max(0, to[0])), Math.min(cols.length - 1, Math.max(0, to[1])));
  };

  const values = () => rows.map((_, r) => cols.map((_, c) => cell(r, c)));
  return html`<figure class="cellgrid" data-testid=${testid}>
    <figcaption>${caption}</figcaption>
    <div class="cellgrid-scroll">
      <table role="grid" aria-label=${caption} ref=${table} onKeyDown=${move}>
        <thead>
          <tr><th scope="col">${corner}</th>${cols.map((col) => html`<th key=${col.key} scope="col" title=${col.says}>${col.label}</th>`)}</tr>
        </thead>
        <tbody>
          ${rows.map((row, r) => html`<tr key=${row.key}>
            <th scope="row">${row.label}</th>
            ${cols.map((col, c) => {
              const { text, value, says } = cell(r, c);
              const on = r === selected[0] && c === selected[1];
              const background = colourOf(value, low, high);
              return html`<td key=${col.key} role="gridcell" tabindex=${on ? 0 : -1} aria-selected=${String(on)} title=${says}
                class=${on ? "on" : ""} style=${{ background, color: inkOn(background) }}
                data-testid="${testid}-${row.key}-${col.key}" data-value=${value} onClick=${() => onSelect(r, c)}>${text}</td>`;
            })}
          </tr>`)}
        </tbody>
      </table>
    </div>
    <${ColourKey} low=${low} high=${high} format=${format} label=${legend} />
    ${sentence && html`<p class="sentence" data-testid="${testid}-sentence">${sentence}</p>`}
    <p class="exports">
      <${Button} kind="quiet" testid="${testid}-png" onClick=${() => savePng(drawn(rows, cols, values(), low, high), name)}>PNG<//>
      <${Button} kind="quiet" testid="${testid}-csv" onClick=${() => saveCsv(listed(rows, cols, values()), name)}>CSV<//>
      <${Button} kind="quiet" testid="${testid}-json" onClick=${() => saveJson({ rows, cols, cells: values() }, name)}>JSON<//>
    </p>
  </figure>`;
}
