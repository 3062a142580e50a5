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

/** A piece's label: what it shows, or its bytes where it is part of a character. @param {Piece} piece */
export function pieceLabel(piece) {
  if (piece.special) return visible(piece.token);
  if (!piece.text || piece.text.includes("\ufffd")) return `⟨${(piece.bytes ?? "").replace(/(..)(?=.)/g, "$1 ")}⟩`;
  return visible(piece.text);
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
