import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "teaching";
export const needs = "weights";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("teaching.title")} about=${t("teaching.about")}></${ViewFrame}>`;
}
