import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "next";
export const needs = "run";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("next.title")} about=${t("next.about")}></${ViewFrame}>`;
}
