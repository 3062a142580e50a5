import { html } from "../html.js";
import { ViewFrame } from "../components/frame.js";

export const id = "cache";
export const needs = "weights";
export const defaults = {};

export function View({ t }) {
  return html`<${ViewFrame} id=${id} title=${t("cache.title")} about=${t("cache.about")}></${ViewFrame}>`;
}
