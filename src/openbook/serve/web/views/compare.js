import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "compare";
export const needs = "run";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("compare.title")} about=${t("compare.about")}></${ViewFrame}>`;
}
