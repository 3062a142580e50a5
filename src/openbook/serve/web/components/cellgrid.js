/** A table whose cells have a word and a colour: the logit lens. It is its own table for those who do not see colours. */
import { html, useLayoutEffect, useRef } from "../html.js";
import { colour, shade } from "../theme.js";
import { fitted, font, paper } from "./paper.js";
import { colours, isDark, stepOf } from "./scale.js";
import { FigureTools } from "./tools.js";

/**
 * @typedef {{text: string, value: number, says: string}} Cell `says`: the whole of it in words
 * @typedef {{key: any, label: string, says?: string}} Head of a row or column
 * @param {{
 *   rows: Head[], cols: Head[], corner: string, cell: (row: number, col: number) => Cell,
 *   low: number, high: number, format: (value: number) => string, legend: string,   of the colours
 *   caption: string, sentence?: string, name: string, testid?: string,
 *   selected: [number, number],                          [r, -1]: what is selected is in a column not shown
 *   onSelect: (row: number, col: number) => void,        arrow keys, Home, End, PageUp, PageDown, click
 * }} props
 */
export function CellGrid({ rows, cols, corner, cell, low, high, format, legend, caption, sentence, name, selected, onSelect, testid = "cells" }) {
  const table = useRef(null);
  const walking = useRef(false);
  const place = useRef(selected); // keys may come faster than the page is drawn
  place.current = selected;
  const look = shade.value;
  const ink = (value) => inkOf(value, low, high, look);
  useLayoutEffect(() => { // before the next key is read
    if (!walking.current) return;
    walking.current = false;
    table.current?.querySelector("tbody [tabindex='0']")?.focus();
  }, [selected.join()]);

  const keys = (event) => {
    const [row, col] = [place.current[0], Math.max(0, place.current[1])];
    const to = {
      ArrowUp: [row - 1, col], ArrowDown: [row + 1, col], ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1],
      Home: [row, 0], End: [row, cols.length - 1], PageUp: [0, col], PageDown: [rows.length - 1, col],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    walking.current = true;
    place.current = [Math.min(rows.length - 1, Math.max(0, to[0])), Math.min(cols.length - 1, Math.max(0, to[1]))];
    onSelect(...place.current);
  };
  const every = (of) => rows.map((_, r) => cols.map((_, c) => of(cell(r, c))));
  const listed = () => ({
    columns: [{ key: "row", label: corner }, ...cols.flatMap((col, c) => [{ key: `t${c}`, label: col.label }, { key: `v${c}`, label: `${col.label}: ${legend}` }])],
    rows: rows.map((row, r) => Object.fromEntries([["row", row.label], ...cols.flatMap((_, c) => [[`t${c}`, cell(r, c).text], [`v${c}`, cell(r, c).value]])])),
  });
  const record = () => ({ caption, colour: legend, rows: rows.map((row) => row.label), columns: cols.map((col) => col.label), texts: every((one) => one.text), values: every((one) => one.value) });
  const focusable = (r, c) => r === selected[0] && c === Math.max(0, selected[1]);
  return html`<figure class="cellgrid" data-testid=${testid}>
    <div class="figure-head"><figcaption>${caption}</figcaption>
      <${FigureTools} title=${caption} name=${name} table=${listed} record=${record} picture=${() => drawn({ rows, cols, cell, ink, caption })} testid=${testid} /></div>
    <div class="cellgrid-box">
      <table role="grid" aria-label=${caption} ref=${table} onKeyDown=${keys}>
        <thead><tr><th scope="col">${corner}</th>${cols.map((col, c) => html`<th key=${col.key} scope="col" class=${c === selected[1] ? "on" : ""} title=${col.says}>${col.label}</th>`)}</tr></thead>
        <tbody>${rows.map((row, r) => html`<tr key=${row.key}>
          <th scope="row" class=${r === selected[0] ? "on" : ""}>${row.label}</th>
          ${cols.map((col, c) => {
            const { text, value, says } = cell(r, c);
            const on = r === selected[0] && c === selected[1];
            return html`<td key=${col.key} role="gridcell" tabindex=${focusable(r, c) ? 0 : -1} aria-selected=${String(on)} aria-label=${says} title=${says} class=${on ? "on" : ""}
              style=${ink(value)} data-testid="${testid}-${row.key}-${col.key}" data-value=${value} onClick=${() => onSelect(r, c)}><span>${text}</span></td>`;
          })}
        </tr>`)}</tbody>
      </table>
    </div>
    <p class="legend"><span>${legend}</span> <span class="number">${format(low)}</span>
      <span class="ramp" aria-hidden="true">${Array.from({ length: 24 }, (_, i) => html`<i key=${i} style=${{ backgroundColor: ink(low + (i / 23) * (high - low)).backgroundColor }}></i>`)}</span>
      <span class="number">${format(high)}</span></p>
    ${sentence && html`<p class="sentence" data-testid="${testid}-sentence">${sentence}</p>`}
  </figure>`;
}

/** A cell's colours, with the text readable on it. */
function inkOf(value, low, high, look) {
  if (!Number.isFinite(value)) return { backgroundColor: "transparent", color: "inherit" };
  const table = colours("sequential", look);
  const step = stepOf(value, [low, high > low ? high : low + 1]);
  return { backgroundColor: `rgb(${table[3 * step]} ${table[3 * step + 1]} ${table[3 * step + 2]})`, color: isDark(table, step) ? "#fff" : "#000" };
}

const [HEAD, CELL, ROW, PAD] = [130, 84, 24, 12];

function drawn({ rows, cols, cell, ink, caption }) {
  const { canvas, pen } = paper(HEAD + cols.length * CELL + 2 * PAD, (rows.length + 2) * ROW + 2 * PAD);
  const write = (text, x, y, width) => pen.fillText(fitted(pen, text, width - 8), x + 4, y + ROW / 2);
  const text = colour("--text");
  pen.font = font(14, "600");
  pen.fillText(caption, PAD, PAD + ROW / 2);
  pen.font = font(12);
  cols.forEach((col, c) => write(col.label, PAD + HEAD + c * CELL, PAD + ROW, CELL));
  rows.forEach((row, r) => {
    const y = PAD + (r + 2) * ROW;
    pen.fillStyle = text;
    write(row.label, PAD, y, HEAD);
    cols.forEach((_, c) => {
      const one = cell(r, c);
      const { backgroundColor, color } = ink(one.value);
      pen.fillStyle = backgroundColor;
      pen.fillRect(PAD + HEAD + c * CELL, y, CELL - 1, ROW - 1);
      pen.fillStyle = color === "inherit" ? text : color;
      write(one.text, PAD + HEAD + c * CELL, y, CELL);
    });
  });
  return canvas;
}
