/** The KV cache as a picture: a row for each kind of layer, a cell for each slot, a stripe in it for each key/value head. */
import { html, useLayoutEffect, useRef } from "../html.js";
import { colour, shade } from "../theme.js";
import { font, paper } from "./paper.js";
import { FigureTools } from "./tools.js";

const [LABEL, ROW, GAP, TOP, FOOT] = [110, 26, 8, 4, 22];
const STRIPES = 8; // more heads than that are drawn as one block

/**
 * What is in each slot of a layer after a step. Token number n lies in slot n mod slots: a window is a ring.
 * @param {number} slots of the layer @param {number} length tokens seen, the step's own included
 * @param {number} fresh how many of them came in this step @param {number} prompt tokens of the prompt
 * @returns {{token: number, kind: "empty" | "prompt" | "generated", fresh: boolean}[]}
 */
export function slotsAfter(slots, length, fresh, prompt) {
  return Array.from({ length: slots }, (_, slot) => {
    if (slot >= length) return { token: -1, kind: "empty", fresh: false };
    const token = slot + slots * Math.floor((length - 1 - slot) / slots);
    return { token, kind: token < prompt ? "prompt" : "generated", fresh: token >= length - fresh };
  });
}

/**
 * @param {{
 *   layers: {label: string, slots: number, heads: number}[],
 *   length: number, fresh: number, prompt: number,    see `slotsAfter`
 *   capacity: number,                                 slots of a layer without a window
 *   caption: string, legend: Record<"prompt" | "generated" | "fresh" | "empty", string>, sentence: string, name: string, testid?: string,
 * }} props
 */
export function Slots({ caption, legend, sentence, name, testid = "slots", ...what }) {
  const canvas = useRef(null);
  const shown = shade.value; // drawn again when the colours change
  useLayoutEffect(() => {
    const draw = () => paint(canvas.current, what);
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(canvas.current.parentElement);
    return () => watch.disconnect();
  }, [JSON.stringify(what), shown]);
  const cells = () => what.layers.flatMap((layer) => slotsAfter(layer.slots, what.length, what.fresh, what.prompt).map((cell, slot) => ({ layers: layer.label, slot, ...cell })));
  const table = () => ({ columns: ["layers", "slot", "token", "kind", "fresh"].map((key) => ({ key, label: key })), rows: cells() });
  const picture = () => {
    const { canvas: sheet, pen } = paper(900, height(what.layers));
    drawSlots(pen, 900, what);
    return sheet;
  };
  return html`<figure class="slots" data-testid=${testid}>
    <div class="figure-head"><figcaption>${caption}</figcaption>
      <${FigureTools} title=${caption} name=${name} table=${table} record=${() => ({ ...what, cells: cells() })} picture=${picture} testid=${testid} /></div>
    <div><canvas ref=${canvas} role="img" aria-label="${caption}. ${sentence}"></canvas></div>
    <p class="legend">${Object.entries(legend).map(([kind, label]) => html`<span key=${kind}><i class="swatch slot-${kind}" aria-hidden="true"></i> ${label}</span>`)}</p>
    <p class="sentence" data-testid="${testid}-sentence">${sentence}</p>
  </figure>`;
}

const height = (layers) => TOP + layers.length * (ROW + GAP) + FOOT;

function paint(canvas, what) {
  const width = canvas.parentElement.clientWidth;
  const fine = window.devicePixelRatio || 1;
  const tall = height(what.layers);
  [canvas.width, canvas.height] = [Math.round(width * fine), Math.round(tall * fine)];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${tall}px`;
  const pen = canvas.getContext("2d");
  pen.scale(fine, fine);
  pen.textBaseline = "middle";
  drawSlots(pen, width, what);
}

function drawSlots(pen, width, { layers, length, fresh, prompt, capacity }) {
  const colours = { prompt: colour("--series-1"), generated: colour("--series-3"), fresh: colour("--series-2"), line: colour("--rule-strong"), text: colour("--text") };
  const label = Math.min(LABEL, width / 4);
  const cell = (width - label) / Math.max(capacity, ...layers.map((layer) => layer.slots));
  layers.forEach((layer, i) => {
    const top = TOP + i * (ROW + GAP);
    pen.font = font(12);
    pen.fillStyle = colours.text;
    pen.fillText(layer.label, 0, top + ROW / 2, label - 8);
    slotsAfter(layer.slots, length, fresh, prompt).forEach((slot, at) => drawSlot(pen, slot, label + at * cell, top, cell, layer.heads, colours));
  });
  pen.fillStyle = colours.text;
  pen.font = font(11);
  const bottom = height(layers) - FOOT / 2;
  pen.fillText("0", label, bottom);
  pen.textAlign = "right";
  pen.fillText(String(capacity - 1), width, bottom);
  pen.textAlign = "left";
}

function drawSlot(pen, { kind, fresh }, left, top, cell, heads, colours) {
  const gap = cell > 4 ? 1 : 0;
  if (kind === "empty") {
    pen.strokeStyle = colours.line;
    if (gap) pen.strokeRect(left + 0.5, top + 0.5, cell - gap - 1, ROW - 1);
    else pen.fillStyle = colours.line, pen.fillRect(left, top + ROW - 1, cell, 1);
    return;
  }
  pen.fillStyle = fresh ? colours.fresh : colours[kind];
  const stripes = heads <= STRIPES ? heads : 1;
  const tall = ROW / stripes;
  for (let i = 0; i < stripes; i++) pen.fillRect(left, top + i * tall, cell - gap, tall - (stripes > 1 ? 1 : 0));
}
