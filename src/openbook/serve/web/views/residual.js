import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "residual";
export const needs = "run";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("residual.title")} about=${t("residual.about")}></${ViewFrame}>`;
}
