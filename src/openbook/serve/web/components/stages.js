/** The stages of sampling as one picture. */
import { percent, visible } from "../format.js";
import { colour } from "../theme.js";
import { fitted, font, paper } from "./paper.js";

const [COLUMN, ROW, HEAD, PAD] = [190, 22, 44, 12];

/**
 * @param {{title: string, name: string, rows: {id: number, text: string, p: number, kept: boolean}[]}[]} stages
 * @param {number} shown rows of each @param {number} drawn the token that was drawn @returns {HTMLCanvasElement}
 */
export function paintStages(stages, shown, drawn) {
  const { canvas, pen } = paper(stages.length * COLUMN + PAD, HEAD + shown * ROW + PAD);
  stages.forEach((stage, i) => drawStage(pen, stage, PAD + i * COLUMN, shown, drawn));
  return canvas;
}

function drawStage(pen, stage, left, shown, drawn) {
  const [ink, faint, bar, mark] = ["--text", "--muted", "--series-1", "--series-2"].map(colour);
  const rows = stage.rows.slice(0, shown);
  const highest = Math.max(...rows.map((row) => row.p ?? 0), 1e-12);
  pen.fillStyle = ink;
  pen.font = font(14, "600");
  pen.fillText(stage.title, left, HEAD / 2);
  pen.font = font(12);
  rows.forEach((row, i) => {
    const middle = HEAD + i * ROW + ROW / 2;
    const on = stage.name === "draw" && row.id === drawn;
    pen.fillStyle = on ? mark : bar;
    pen.fillRect(left + 78, middle - 5, row.kept ? (52 * row.p) / highest : 0, 10);
    pen.fillStyle = row.kept ? ink : faint;
    pen.fillText(fitted(pen, visible(row.text), 72), left, middle);
    pen.fillText(row.kept ? percent(row.p) : "×", left + 134, middle);
    if (!row.kept) pen.fillRect(left, middle, 72, 1);
  });
}
