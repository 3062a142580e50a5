/** Two bars for each of some things: how they compare. A list that reads as a table. */
import { html } from "../html.js";
import { t } from "../i18n.js";
import { colour } from "../theme.js";
import { Figure } from "./figure.js";
import { fitted, font, paper } from "./paper.js";

const [LABEL, BAR, NUMBER, ROW, PAD] = [130, 360, 80, 36, 14];

/**
 * @param {{
 *   rows: {key: any, label: string, a: number, b: number}[], names: [string, string],
 *   most?: number,          rows that are drawn; the table has all
 *   title: string, sentence?: string, name: string, format: (value: number) => string, testid?: string,
 * }} props
 */
export function PairedBars({ rows, names, most = 14, title, sentence, name, format, testid = "paired" }) {
  const shown = rows.slice(0, most);
  const longest = Math.max(...rows.flatMap((row) => [row.a, row.b]), 1e-12);
  const bar = (value, side) => html`
    <span class="track" aria-hidden="true"><span class="fill side-${side}" style=${{ width: `${(100 * value) / longest}%` }}></span></span>
    <span class="number"><span class="hidden">${names[side === "a" ? 0 : 1]}: </span>${format(value)}</span>`;
  const table = () => ({
    columns: [{ key: "label", label: t("shell.label") }, ...names.map((label, i) => ({ key: "ab"[i], label, format }))],
    rows,
  });
  return html`<${Figure} kind="paired" title=${title} sentence=${sentence} name=${name} testid=${testid} table=${table} picture=${() => drawn(shown, names, longest, format, title)}>
    <p class="legend">${names.map((label, i) => html`<span key=${i}><i class="swatch side-${"ab"[i]}" aria-hidden="true"></i> ${label}</span>`)}</p>
    <ol class="paired-list">${shown.map((row) => html`<li key=${row.key} data-testid="${testid}-${row.key}" data-a=${row.a} data-b=${row.b}>
      <span class="spelled">${row.label}</span><span class="both">${bar(row.a, "a")}${bar(row.b, "b")}</span>
    </li>`)}</ol>
  <//>`;
}

function drawn(rows, names, longest, format, title) {
  const { canvas, pen } = paper(LABEL + BAR + NUMBER + 2 * PAD, (rows.length + 2) * ROW + PAD);
  const ink = pen.fillStyle;
  const fills = [colour("--series-1"), colour("--series-2")];
  pen.font = font(14, "600");
  pen.fillText(title, PAD, ROW / 2);
  pen.font = font(12);
  names.forEach((name, i) => {
    pen.fillStyle = fills[i];
    pen.fillRect(PAD + (i * (LABEL + BAR)) / 2, 1.5 * ROW - 5, 10, 10);
    pen.fillStyle = ink;
    pen.fillText(fitted(pen, name, (LABEL + BAR) / 2 - 24), PAD + 16 + (i * (LABEL + BAR)) / 2, 1.5 * ROW);
  });
  rows.forEach((row, r) => {
    const top = (r + 2) * ROW;
    pen.fillStyle = ink;
    pen.fillText(fitted(pen, row.label, LABEL - 10), PAD, top + ROW / 2);
    [row.a, row.b].forEach((value, i) => {
      pen.fillStyle = fills[i];
      pen.fillRect(PAD + LABEL, top + 4 + i * 14, (BAR * value) / longest, 12);
      pen.fillStyle = ink;
      pen.fillText(format(value), PAD + LABEL + (BAR * value) / longest + 6, top + 10 + i * 14);
    });
  });
  return canvas;
}
