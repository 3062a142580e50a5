/** From text to bytes, to pieces, to ids; who wrote what; characters that several tokens share shown whole. */
import { html, useEffect, useState } from "../html.js";
import { api } from "../api.js";
import { Button, TextField, Toggle } from "../components/controls.js";
import { Facts, Loading, Notice, Section, useAsync, ViewFrame } from "../components/frame.js";
import { isPart, pieceAlone } from "../components/pieces.js";
import { DataTable } from "../components/table.js";
import { FigureTools } from "../components/tools.js";
import { float, int, visible } from "../format.js";
import { go, route } from "../state.js";

export const id = "tokens";
export const needs = "model";
/** `text`: other than the page's prompt; `chat` and `system` as there, unless given here. */
export const defaults = { text: "", selected: -1 };

const PAUSE = 250; // ms after the last key before the text is sent
const FIRST_TEXT = "The capital of France is Paris. 法国的首都是巴黎。😀";

export function View({ model, params, setParams, t }) {
  const { run: prompt, chat, system } = route.value;
  const text = params.value.text || prompt || FIRST_TEXT;
  const asked = useSettled(text);
  const talk = chat && model.has_chat;
  const { value, error } = useAsync(
    (signal) => (model.has_tokenizer && asked ? api.post(`/api/models/${model.id}/tokens`, { text: asked, chat: talk, ...(talk && system ? { system } : {}) }, signal) : null),
    [model.id, asked, talk, system],
  );
  const toolbar = model.has_tokenizer && html`
    <${TextField} label=${t("tokens.text")} value=${text} lines=${2} onInput=${(typed) => setParams({ text: typed === prompt ? "" : typed, selected: -1 })} onChange=${() => {}} testid="tokens-text" />
    ${model.has_chat && html`<${Toggle} label=${t("tokens.chat")} checked=${chat} onChange=${(on) => go({ chat: on }, false)} testid="tokens-chat" />`}
    ${talk && html`<${TextField} label=${t("tokens.system")} value=${system} onChange=${(typed) => go({ system: typed }, false)} testid="tokens-system" />`}
    ${model.has_weights && text !== prompt && html`<${Button} testid="tokens-run" onClick=${() => go({ run: text, params: {} })}>${t("tokens.run_this")}</${Button}>`}`;
  return html`<${ViewFrame} id=${id} title=${t("tokens.title")} about=${t("tokens.about")} toolbar=${toolbar}>
    ${!model.has_tokenizer ? html`<${Notice} testid="no-tokenizer">${t("tokens.no_tokenizer", { name: model.name })}</${Notice}>`
      : value ? html`<${Found} model=${model} found=${value} selected=${params.value.selected} onSelect=${(i) => setParams({ selected: i })} t=${t} />` : !error && html`<${Loading} />`}
  </${ViewFrame}>`;
}

/** The text once it has not changed for a moment. */
function useSettled(text) {
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), PAUSE);
    return () => clearTimeout(timer);
  }, [text]);
  return settled;
}

/** Pieces that share a character, together: [{at: index of the first, pieces}]. */
export function groups(pieces) {
  const found = [];
  pieces.forEach((piece, at) => {
    if (found.length && found.at(-1).pieces[0].char_group === piece.char_group) found.at(-1).pieces.push(piece);
    else found.push({ at, pieces: [piece] });
  });
  return found;
}

const spaced = (hex) => hex.replace(/(..)(?=.)/g, "$1 ");

function Found({ model, found, selected, onSelect, t }) {
  const { pieces, ids, text, n_bytes } = found;
  const characters = [...text].length;
  const all = groups(pieces);
  const templated = pieces.filter((piece) => piece.from === "template").length;
  const shared = all.filter((group) => group.pieces.length > 1);
  const keys = (event) => {
    const to = { ArrowRight: selected + 1, ArrowLeft: selected - 1, Home: 0, End: pieces.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(pieces.length - 1, to));
    onSelect(next);
    event.currentTarget.querySelector(`[data-token="${next}"]`)?.focus();
  };
  const columns = [
    { key: "position", label: t("tokens.position"), align: "left" },
    { key: "id", label: t("tokens.id") },
    { key: "shows", label: t("tokens.shows"), format: (shows) => html`<code>${shows}</code>` },
    { key: "whole", label: t("tokens.whole") },
    { key: "bytes", label: t("tokens.bytes"), format: (hex) => html`<code>${hex}</code>`, sort: false },
    { key: "spelling", label: t("tokens.spelling"), format: (token) => html`<code>${token}</code>` },
    { key: "origin", label: t("tokens.from") },
  ];
  const rows = pieces.map((piece, position) => ({
    key: position, position, id: piece.id, shows: pieceAlone(piece), whole: visible(piece.whole), bytes: spaced(piece.bytes), spelling: visible(piece.token),
    origin: t(piece.special ? "tokens.special" : piece.from === "template" ? "tokens.template" : "tokens.content"),
  }));
  const table = () => ({ columns: columns.map(({ key, label }) => ({ key, label })), rows });
  return html`
    <${Facts} testid="tokens-facts" rows=${[
      [t("tokens.characters"), int(characters), "tokens-characters"],
      [t("tokens.n_bytes"), int(n_bytes), "tokens-bytes"],
      [t("tokens.n_tokens"), int(ids.length), "tokens-count"],
      [t("tokens.per_token"), ids.length ? float(n_bytes / ids.length, 3) : "–"],
      ...(templated ? [[t("tokens.of_template"), int(templated)]] : []),
    ]} />
    <figure class="token-figure">
      <div class="figure-head"><figcaption>${t("tokens.figure")}</figcaption><${FigureTools} title=${t("tokens.figure")} name=${`${model.name}-tokens`} table=${table} record=${() => found} testid="tokens" /></div>
      <div class="token-flow" role="listbox" aria-label=${t("tokens.figure")} aria-orientation="horizontal" data-testid="token-flow" onKeyDown=${keys}>
        ${all.map((group) => html`<div key=${group.at} role="group" aria-label=${group.pieces.length > 1 ? t("tokens.shared", { text: group.pieces[0].whole, n: group.pieces.length }) : undefined}
            class="token-group ${group.pieces.length > 1 ? "shared" : ""}" data-testid=${group.pieces.length > 1 ? "char-group" : undefined}>
          ${group.pieces.length > 1 && html`<span class="token-whole">${visible(group.pieces[0].whole)}</span>`}
          <span class="token-row">${group.pieces.map((piece, i) => {
            const at = group.at + i;
            return html`<span key=${at} role="option" aria-selected=${String(at === selected)} tabindex=${at === Math.max(0, selected) ? 0 : -1} data-token=${at} data-testid="token-${at}"
                class="token from-${piece.from} ${piece.special ? "special" : ""} ${at === selected ? "on" : ""}" onClick=${() => onSelect(at)}>
              <span class="token-text">${pieceAlone(piece)}</span>${!isPart(piece) && html`<span class="token-bytes">${spaced(piece.bytes)}</span>`}<span class="token-id number">${piece.id}</span>
            </span>`;
          })}</span>
        </div>`)}
      </div>
      <ul class="token-keys">
        <li><i class="token from-content"></i>${t("tokens.content")}</li>
        <li><i class="token from-template"></i>${t("tokens.template")}</li>
        <li><i class="token special"></i>${t("tokens.special")}</li>
        <li><i class="token-group shared"></i>${t("tokens.shared_key")}</li>
      </ul>
      <p class="sentence" data-testid="tokens-sentence">${t("tokens.sentence", { characters, bytes: n_bytes, tokens: ids.length })}${shared.length > 0 && ` ${t("tokens.sentence_shared", { n: shared.length, text: shared[0].pieces[0].whole.trim(), pieces: shared[0].pieces.length })}`}</p>
    </figure>
    <${Section} title=${t("tokens.table")}>
      <${DataTable} testid="tokens-table" caption=${t("tokens.table")} name=${`${model.name}-tokens`} columns=${columns} rows=${rows} selected=${selected} onRow=${(row) => onSelect(row.position)} />
    </${Section}>`;
}
