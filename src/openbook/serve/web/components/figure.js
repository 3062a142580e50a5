/** The frame of a picture made of numbers: caption, the same numbers as a table, files to keep, a sentence. */
import { html, useState } from "../html.js";
import { t } from "../i18n.js";
import { DataTable } from "./table.js";
import { FigureTools } from "./tools.js";

/**
 * @param {{
 *   kind: string, title: string, name: string, sentence?: string, testid?: string,
 *   table: () => {columns: import("./table.js").Column[], rows: any[]},   the numbers; asked for when needed
 *   record?: () => any,               what the JSON file holds, else the table's rows
 *   picture?: () => Element | null,   a canvas or an SVG drawing; without one the PNG is the table's picture
 *   children: any,
 * }} props
 */
export function Figure({ kind, title, name, sentence, testid = kind, table, record, picture, children }) {
  const [asTable, setAsTable] = useState(false);
  return html`<figure class=${kind} data-testid=${testid}>
    <div class="figure-head">
      <figcaption>${title}</figcaption>
      <${FigureTools} title=${title} name=${name} table=${table} record=${record} picture=${asTable ? undefined : picture} testid=${testid}>
        <button type="button" class="button" aria-pressed=${String(asTable)} data-testid="${testid}-as-table" onClick=${() => setAsTable(!asTable)}>${t(asTable ? "shell.table_hide" : "shell.table_show")}</button>
      </${FigureTools}>
    </div>
    ${asTable ? html`<${DataTable} ...${table()} caption=${title} name=${name} testid="${testid}-table" bare />` : children}
    ${sentence && html`<p class="sentence" data-testid="${testid}-sentence">${sentence}</p>`}
  </figure>`;
}
