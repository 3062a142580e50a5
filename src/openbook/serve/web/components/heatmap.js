/** A matrix of numbers as colours. */
import { html } from "../html.js";

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
 *   selected?: [number, number] | null,
 *   onCell?: (row: number, col: number) => void,      click, Enter
 *   testid?: string,
 * }} props
 */
export function Heatmap({ data, rows, cols, title, sentence, testid = "heatmap" }) {
  return html`<figure class="heatmap" data-testid=${testid}><figcaption>${title}</figcaption><p>${rows} × ${cols}: ${data.length}</p><p>${sentence}</p></figure>`;
}
