import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "tokens";
export const needs = "model";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("tokens.title")} about=${t("tokens.about")}></${ViewFrame}>`;
}
