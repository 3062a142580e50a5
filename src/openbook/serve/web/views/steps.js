import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "steps";
export const needs = "run";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("steps.title")} about=${t("steps.about")}></${ViewFrame}>`;
}
