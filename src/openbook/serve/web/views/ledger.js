import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "ledger";
export const needs = "model";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("ledger.title")} about=${t("ledger.about")}></${ViewFrame}>`;
}
