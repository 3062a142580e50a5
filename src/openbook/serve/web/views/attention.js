import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "attention";
export const needs = "run";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("attention.title")} about=${t("attention.about")}></${ViewFrame}>`;
}
