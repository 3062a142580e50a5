import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "overview";
export const needs = "model";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("overview.title")} about=${t("overview.about")}></${ViewFrame}>`;
}
