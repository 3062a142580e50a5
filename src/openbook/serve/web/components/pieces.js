/** The tokens of a prompt as a row of chips. */
import { html } from "../html.js";
import { visible } from "../format.js";
import { t } from "../i18n.js";

/**
 * @typedef {object} Piece a token, as the API gives it
 * @property {number} id @property {string} text @property {string} token the vocabulary's own spelling
 * @property {string} bytes hexadecimal @property {boolean} special @property {number} char_group
 * @property {string} whole the whole character(s) of its group @property {"template" | "content"} from
 */

/** Is a piece but a part of a character? @param {Piece} piece */
export const isPart = (piece) => !piece.special && (!piece.text || piece.text.includes("\ufffd"));

/** What a piece shows by itself: its text, or its bytes where it is part of a character. @param {Piece} piece */
export function pieceAlone(piece) {
  if (isPart(piece)) return `⟨${(piece.bytes ?? "").replace(/(..)(?=.)/g, "$1 ")}⟩`;
  return visible(piece.special ? piece.token : piece.text);
}

/** A piece's label: as by itself, and the whole character where it is part of one. @param {Piece} piece */
export function pieceLabel(piece) {
  const known = isPart(piece) && piece.whole && !piece.whole.includes("\ufffd");
  return known ? t("shell.part_of", { part: pieceAlone(piece), whole: visible(piece.whole.trim()) }) : pieceAlone(piece);
}

/**
 * Chips, one a token; arrow keys go from one to the next.
 * @param {{pieces: Piece[], selected?: number, onSelect?: (index: number) => void, label?: string, testid?: string, showIds?: boolean}} props
 */
export function Pieces({ pieces, selected = -1, onSelect, label, testid = "pieces", showIds = false }) {
  const move = (event) => {
    const last = pieces.length - 1;
    const step = { ArrowRight: selected + 1, ArrowDown: selected + 1, ArrowLeft: selected - 1, ArrowUp: selected - 1, Home: 0, End: last }[event.key];
    if (step === undefined || !onSelect) return;
    event.preventDefault();
    const to = Math.min(last, Math.max(0, step));
    onSelect(to);
    event.currentTarget.children[to]?.focus();
  };
  return html`<div class="pieces" role=${onSelect ? "listbox" : "list"} aria-label=${label ?? t("shell.tokens")} data-testid=${testid} onKeyDown=${move}>
    ${pieces.map((piece, i) => html`<span key=${i} role=${onSelect ? "option" : "listitem"} class="piece ${piece.special ? "special" : ""} ${i === selected ? "on" : ""}"
      aria-selected=${onSelect ? String(i === selected) : undefined} tabindex=${onSelect ? (i === Math.max(0, selected) ? 0 : -1) : undefined}
      title=${`${i}: ${piece.id}`} data-testid=${`${testid}-${i}`} onClick=${onSelect && (() => onSelect(i))}>${pieceLabel(piece)}${showIds && html`<small class="number">${piece.id}</small>`}</span>`)}
  </div>`;
}
