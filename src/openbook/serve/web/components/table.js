/** A table that can be sorted, walked through with the keyboard, and taken home. */
import { html, useLayoutEffect, useMemo, useRef, useState } from "../html.js";
import { t } from "../i18n.js";
import { cell, FigureTools } from "./tools.js";

const LONG = 120; // rows; beyond it only what is seen is drawn
const ROW = 30.4; // px, a long table's row: 1.9rem
const AROUND = 12; // rows drawn above and below what is seen

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
 *   order?: string, onOrder?: (order: string) => void,      see `ordered`; without `onOrder` the table keeps it itself
 *   opened?: string, onOpened?: (keys: string) => void,     keys of the rows that are unfolded, between blanks; likewise
 *   bare?: boolean, testid?: string,  bare: without caption and exports (a figure has them)
 * }} props
 */
export function DataTable({ columns, rows, caption, name, height = 520, onRow, selected, order, onOrder, opened, onOpened, bare = false, testid = "table" }) {
  const [asked, setOrder] = useHeld(order, onOrder);
  const [unfolded, setUnfolded] = useHeld(opened, onOpened);
  const [active, setActive] = useState(0);
  const [top, setTop] = useState(0);
  const box = useRef(null);
  const walking = useRef(false);
  const tree = useMemo(() => rows.some((row) => row.children?.length), [rows]);
  const sort = useMemo(() => ordered(asked), [asked]);
  const open = useMemo(() => new Set(unfolded.split(" ").filter(Boolean)), [unfolded]);
  const lines = useMemo(() => flat(rows, sort, (key) => open.has(String(key))), [rows, sort, open]);
  const long = lines.length > LONG;
  const first = long ? Math.max(0, Math.floor(top / ROW) - AROUND) : 0;
  const end = long ? Math.min(lines.length, Math.ceil((top + height) / ROW) + AROUND) : lines.length;
  const at = Math.min(active, lines.length - 1);

  useLayoutEffect(() => { // before the next key is read
    if (!walking.current) return;
    walking.current = false;
    if (long) {
      const [over, under] = [at * ROW, (at + 2) * ROW - box.current.clientHeight];
      if (box.current.scrollTop > over) box.current.scrollTop = over;
      if (box.current.scrollTop < under) box.current.scrollTop = under;
      setTop(box.current.scrollTop);
    }
    requestAnimationFrame(() => box.current?.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: long }));
  }, [at, lines]);

  const turn = (key) => {
    const next = new Set(open);
    if (!next.delete(String(key))) next.add(String(key));
    setUnfolded([...next].join(" "));
  };
  const keys = (event) => {
    const line = lines[at];
    const page = Math.max(1, Math.floor((box.current.clientHeight - ROW) / ROW));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: lines.length - 1 }[event.key];
    if (event.target.closest("thead, a")) return;
    if (to !== undefined) {
      walking.current = true;
      setActive(Math.min(lines.length - 1, Math.max(0, to)));
    } else if (event.key === "Enter" && onRow && line) onRow(line.row, line.index);
    else if (line?.row.children && (event.key === "ArrowRight") !== line.unfolded && ["ArrowRight", "ArrowLeft"].includes(event.key)) {
      walking.current = true;
      turn(line.key);
    } else return;
    event.preventDefault();
  };
  const sortBy = (key) => {
    const down = sort?.[0] === key ? sort[1] === "ascending" : numeric(rows, key);
    setOrder(`${down ? "-" : ""}${key}`);
  };
  const right = columns.map((column) => (column.align ?? (numeric(rows, column.key) ? "right" : "left")) === "right");
  const all = () => ({ columns, rows: everyRow(rows).map((row) => ({ ...row, children: undefined })) });

  const head = html`<thead><tr>${columns.map((column, c) => {
    const direction = sort?.[0] === column.key ? sort[1] : undefined;
    return html`<th key=${column.key} scope="col" class=${right[c] ? "right" : ""} aria-sort=${direction}>
      ${column.sort === false ? column.label : html`<button type="button" title=${t("shell.sort_by", { label: column.label })} data-testid="${testid}-sort-${column.key}" onClick=${() => sortBy(column.key)}>${column.label}${direction && html`<span class="sort-mark" aria-hidden="true">${direction === "ascending" ? "↑" : "↓"}</span>`}</button>`}
    </th>`;
  })}</tr></thead>`;
  const body = lines.slice(first, end).map((line, i) => {
    const index = first + i;
    const on = selected !== undefined && selected === line.key;
    return html`<tr key=${`${line.key}`} data-at=${index} data-testid="${testid}-row" tabindex=${index === at ? 0 : -1} aria-rowindex=${long ? index + 2 : undefined}
      class="${onRow ? "pick" : ""} ${on ? "on" : ""}" aria-selected=${on && tree ? "true" : undefined} aria-current=${on && !tree ? "true" : undefined}
      aria-level=${tree ? line.level + 1 : undefined} aria-expanded=${tree && line.row.children ? String(line.unfolded) : undefined}
      onFocus=${() => setActive(index)} onClick=${(event) => { if (!event.target.closest("a, button")) onRow ? onRow(line.row, line.index) : line.row.children && turn(line.key); }}>
      ${columns.map((column, c) => html`<td key=${column.key} class=${right[c] ? "right number" : ""} style=${c === 0 && tree ? { paddingLeft: `${0.5 + 1.1 * line.level}rem` } : undefined}>
        ${c === 0 && tree && (line.row.children?.length ? html`<button type="button" class="fold" tabindex="-1" aria-label=${t(line.unfolded ? "shell.fold" : "shell.unfold")} onClick=${() => turn(line.key)}>${line.unfolded ? "▾" : "▸"}</button>` : html`<span class="fold" aria-hidden="true">\u2003</span>`)}${cell(column, line.row)}</td>`)}
    </tr>`;
  });
  const gap = (rowsAway) => rowsAway > 0 && html`<tr class="spacer" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${rowsAway * ROW}px` }}></td></tr>`;
  return html`<div class="data-table" data-testid=${testid}>
    ${!bare && html`<div class="figure-head"><span class="figcaption" aria-hidden="true">${caption}</span><${FigureTools} title=${caption} name=${name} table=${all} testid=${testid} /></div>`}
    <div class="table-box" ref=${box} style=${{ maxHeight: `${height}px` }} tabindex=${lines.length ? undefined : 0} onKeyDown=${keys} onScroll=${long ? (e) => setTop(e.currentTarget.scrollTop) : undefined}>
      <table class=${long ? "long" : ""} role=${tree ? "treegrid" : undefined} aria-rowcount=${long ? lines.length + 1 : undefined} aria-label=${caption}>
        ${head}<tbody>${gap(first)}${body}${gap(lines.length - end)}</tbody>
      </table>
    </div>
  </div>`;
}

/** "bytes" → ["bytes", "ascending"], "-bytes" → ["bytes", "descending"], "" → null: as the rows came. */
export const ordered = (order) => (order ? [order.replace(/^-/, ""), order.startsWith("-") ? "descending" : "ascending"] : null);

/** A text that the table keeps itself, unless someone else does. */
function useHeld(value = "", onChange) {
  const own = useState(value);
  return onChange ? [value, onChange] : own;
}

const numeric = (rows, key) => rows.some((row) => typeof row[key] === "number");

/** Rows with theirs below, as they came. */
const everyRow = (rows) => rows.flatMap((row) => [row, ...everyRow(row.children ?? [])]);

/** The rows as lines: sorted among their equals, folded ones left out. */
function flat(rows, sort, unfolded, level = 0, prefix = "") {
  const lines = rows.map((row, index) => ({ row, index, level, key: row.key ?? (prefix ? `${prefix}/${index}` : index) }));
  if (sort) lines.sort(byKey(...sort));
  return lines.flatMap((line) => {
    line.unfolded = Boolean(line.row.children?.length) && unfolded(line.key);
    return line.unfolded ? [line, ...flat(line.row.children, sort, unfolded, level + 1, line.key)] : [line];
  });
}

function byKey(key, direction) {
  const sign = direction === "ascending" ? 1 : -1;
  return ({ row: a }, { row: b }) => {
    const [x, y] = [a[key], b[key]];
    const [noX, noY] = [x === null || x === undefined, y === null || y === undefined];
    if (noX || noY) return Number(noX) - Number(noY);
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true }));
  };
}
