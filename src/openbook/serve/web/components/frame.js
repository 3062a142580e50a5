/** What surrounds every view and every figure in it. */
import { html, useEffect, useState } from "../html.js";
import { t } from "../i18n.js";
import { linkTo, report } from "../state.js";
import { shape as shapeText } from "../format.js";

/**
 * A view: its heading, its "what is this", its controls, its content.
 * @param {{id: string, title: string, about: string | string[], toolbar?: any, children: any}} props `about`: paragraphs
 */
export function ViewFrame({ id, title, about, toolbar, children }) {
  return html`<article class="view view-${id}" data-testid="view-${id}" aria-labelledby="view-title">
    <header>
      <h1 id="view-title" tabindex="-1">${title}</h1>
      <details class="about" data-testid="about">
        <summary>${t("shell.what_is_this")}</summary>
        ${[about].flat().map((paragraph, i) => html`<p key=${i}>${paragraph}</p>`)}
      </details>
      ${toolbar && html`<div class="toolbar" role="group" aria-label=${t("shell.toolbar")}>${toolbar}</div>`}
    </header>
    ${children}
  </article>`;
}

/** A part of a view with a heading. @param {{title: string, note?: string, testid?: string, children: any}} props */
export function Section({ title, note, testid, children }) {
  return html`<section class="section" data-testid=${testid}>
    <h2>${title}</h2>
    ${note && html`<p class="note">${note}</p>`}
    ${children}
  </section>`;
}

/** Something to know or to do first. @param {{kind?: "info" | "warning", children: any, testid?: string}} props */
export const Notice = ({ kind = "info", children, testid }) =>
  html`<div class="notice ${kind}" data-testid=${testid}>${children}</div>`;

/** Shown while something is computed; takes the place of what will be there. */
export const Loading = ({ label }) => html`<p class="loading" role="status" data-testid="loading">${label ?? t("shell.loading")}</p>`;

/** Facts in two columns. @param {{rows: [string, any, string?][], testid?: string}} props label, value, test id */
export function Facts({ rows, testid }) {
  return html`<dl class="facts" data-testid=${testid}>
    ${rows.map(([label, value, id]) => html`<div key=${label}><dt>${label}</dt><dd data-testid=${id}>${value}</dd></div>`)}
  </dl>`;
}

/** A shape in letters and numbers: "[B, T, D] = [1, 12, 576]". @param {{axes: string[], shape: number[]}} props */
export function Shape({ axes, shape, testid }) {
  const text = shapeText(axes, shape);
  return html`<span class="shape" data-testid=${testid}><span class="letters">${text.letters}</span> = <span class="number">${text.numbers}</span></span>`;
}

/** A step's name, as a link to it in the view of steps. @param {{name: string, label?: string}} props */
export const StepLink = ({ name, label }) =>
  html`<a class="step-link" href=${linkTo("steps", { step: name })} data-testid="step-link">${label ?? name}</a>`;

/**
 * What an asynchronous function gives, again whenever `inputs` change. The last value stays until the next is
 * there. Errors are shown by the page, and come as `error`.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T> | null} make null: nothing to do
 * @param {any[]} inputs
 * @returns {{value: T | null, error: any, loading: boolean, fresh: boolean}} `fresh`: `value` is of these `inputs`
 */
export function useAsync(make, inputs) {
  const [state, setState] = useState({ value: null, error: null, loading: true, of: null });
  useEffect(() => {
    const abort = new AbortController();
    const promise = make(abort.signal);
    if (!promise) {
      setState({ value: null, error: null, loading: false, of: inputs });
      return undefined;
    }
    setState((last) => ({ ...last, error: null, loading: true }));
    promise.then(
      (value) => abort.signal.aborted || setState({ value, error: null, loading: false, of: inputs }),
      (error) => {
        if (abort.signal.aborted) return;
        setState({ value: null, error, loading: false, of: inputs });
        report(error);
      },
    );
    return () => abort.abort();
  }, inputs);
  const fresh = state.of !== null && state.of.every((input, i) => Object.is(input, inputs[i]));
  return { value: state.value, error: state.error, loading: state.loading, fresh };
}
