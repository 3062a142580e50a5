/** The place of an answer from the server: words before it is there, words if it never comes, else its content. */
import { html } from "../html.js";
import { t } from "../i18n.js";
import { Loading } from "./frame.js";
import { Button } from "./controls.js";

/** Resolves after some milliseconds of quiet: what is given up before (a slider moves on) asks for nothing. */
export const quiet = (milliseconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });

/**
 * @param {{of: {value: any, error: any, loading: boolean}, name: string, label?: string, again?: () => void,
 *   children: (value: any) => any}} props `of`: what `useAsync` gives; `name`: begins the test ids
 */
export function Loaded({ of, name, label, again, children }) {
  if (of.value !== null) {
    return html`<div class="loaded" aria-busy=${String(of.loading)} data-testid="${name}-loaded">${children(of.value)}</div>`;
  }
  if (of.error) return html`<${Failed} error=${of.error} again=${again} testid="${name}-error" />`;
  return of.loading ? html`<${Loading} label=${label} />` : null;
}

/** What went wrong, where the answer would have stood. @param {{error: any, again?: () => void, testid: string}} props */
export function Failed({ error, again, testid }) {
  return html`<div class="notice warning" data-testid=${testid}>
    <p><strong>${error.what ?? String(error)}</strong></p>
    ${error.why && html`<p>${error.why}</p>`} ${error.next && html`<p>${error.next}</p>`}
    ${again && html`<${Button} onClick=${again} testid="${testid}-retry">${t("shell.retry")}<//>`}
  </div>`;
}
