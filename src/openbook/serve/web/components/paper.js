/** A canvas to draw a picture for export on: the page's background, font and colours, twice as fine as the screen. */
import { colour } from "../theme.js";

const FINE = 2;
const WIDEST = 16_000; // pixels: more than a browser's canvas takes is cut

/** @param {number} width @param {number} height in CSS pixels @returns {{canvas: HTMLCanvasElement, pen: CanvasRenderingContext2D}} */
export function paper(width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height].map((size) => Math.min(WIDEST, Math.ceil(size * FINE)));
  const pen = canvas.getContext("2d");
  pen.scale(FINE, FINE);
  pen.fillStyle = getComputedStyle(document.body).backgroundColor;
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = colour("--text") || "#222";
  pen.font = font(13);
  pen.textBaseline = "middle";
  return { canvas, pen };
}

export const font = (size, weight = "") => `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`.trim();

/** Text cut with an ellipsis to a width. */
export function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  const letters = [...text];
  while (letters.length && pen.measureText(`${letters.join("")}…`).width > width) letters.pop();
  return `${letters.join("")}…`;
}
