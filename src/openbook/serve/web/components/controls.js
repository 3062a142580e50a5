/** Form controls with labels. All take `testid`, and `help` (a title). Values are plain; changes come by callback. */
import { html, useId, useState } from "../html.js";

/** @param {{onClick: () => void, kind?: "plain" | "primary" | "quiet", disabled?: boolean, testid?: string, help?: string, pressed?: boolean, children: any}} props */
export function Button({ onClick, kind = "plain", disabled = false, testid, help, pressed, children, label }) {
  return html`<button type="button" class="button ${kind}" disabled=${disabled} data-testid=${testid} title=${help}
    aria-label=${label} aria-pressed=${pressed === undefined ? undefined : String(pressed)} onClick=${onClick}>${children}</button>`;
}

/**
 * One of some: a row of radio buttons, a list where there are more than `most`.
 * @param {{label: string, value: any, options: {value: any, label: string}[], onChange: (value: any) => void, most?: number, testid?: string, help?: string}} props
 */
export function Choice({ label, value, options, onChange, most = 5, testid, help }) {
  const id = useId();
  if (options.length > most) {
    const at = options.findIndex((option) => option.value === value);
    return html`<span class="control" title=${help}>
      <label for=${id}>${label}</label>
      <select id=${id} data-testid=${testid} value=${String(at)} onChange=${(e) => onChange(options[Number(e.target.value)].value)}>
        ${options.map((option, i) => html`<option key=${i} value=${String(i)} selected=${i === at}>${option.label}</option>`)}
      </select>
    </span>`;
  }
  return html`<fieldset class="control choice" title=${help} data-testid=${testid}>
    <legend>${label}</legend>
    <span class="segments">
      ${options.map((option, i) => html`<label key=${i} class=${option.value === value ? "on" : ""}>
        <input type="radio" name=${id} checked=${option.value === value} onChange=${() => onChange(option.value)}
          data-testid=${testid && `${testid}-${option.value}`} />
        <span>${option.label}</span>
      </label>`)}
    </span>
  </fieldset>`;
}

/**
 * A slider with its value beside it. `onInput` comes while it is dragged.
 * @param {{label: string, value: number, min: number, max: number, step?: number, onInput: (value: number) => void, format?: (value: number) => string, testid?: string, help?: string, disabled?: boolean}} props
 */
export function Slider({ label, value, min, max, step = 1, onInput, format = String, testid, help, disabled = false }) {
  const id = useId();
  return html`<span class="control slider" title=${help}>
    <label for=${id}>${label}</label>
    <input id=${id} type="range" min=${min} max=${max} step=${step} value=${value} disabled=${disabled} data-testid=${testid}
      aria-valuetext=${format(value)} onInput=${(e) => onInput(Number(e.target.value))} />
    <output for=${id} class="number">${format(value)}</output>
  </span>`;
}

/**
 * A number to type. What is not between `min` and `max` is put back there when the field is left.
 * @param {{label: string, value: number, min?: number, max?: number, step?: number | "any", onChange: (value: number) => void, unit?: string, testid?: string, help?: string}} props
 */
export function NumberField({ label, value, min, max, step = 1, onChange, unit, testid, help }) {
  const id = useId();
  const changed = (event) => {
    const typed = Number(event.target.value);
    const number = event.target.value.trim() === "" || !Number.isFinite(typed) ? value : Math.min(max ?? Infinity, Math.max(min ?? -Infinity, typed));
    event.target.value = String(number);
    if (number !== value) onChange(number);
  };
  return html`<span class="control" title=${help}>
    <label for=${id}>${label}</label>
    <input id=${id} type="number" class="number" min=${min} max=${max} step=${step} value=${value} data-testid=${testid} onChange=${changed} />
    ${unit && html`<span class="muted">${unit}</span>`}
  </span>`;
}

/** @param {{label: string, checked: boolean, onChange: (checked: boolean) => void, testid?: string, help?: string, disabled?: boolean}} props */
export function Toggle({ label, checked, onChange, testid, help, disabled = false }) {
  return html`<label class="control toggle" title=${help}>
    <input type="checkbox" checked=${checked} disabled=${disabled} data-testid=${testid} onChange=${(e) => onChange(e.target.checked)} />
    <span>${label}</span>
  </label>`;
}

/**
 * A text to type; `onChange` comes with Enter or when the field is left. `lines` > 1 makes it a small area.
 * @param {{label: string, value: string, onChange: (value: string) => void, onInput?: (value: string) => void, lines?: number, placeholder?: string, testid?: string, help?: string}} props
 */
export function TextField({ label, value, onChange, onInput, lines = 1, placeholder, testid, help }) {
  const id = useId();
  const [draft, setDraft] = useState(null); // what is being typed: a page that is drawn again meanwhile must not take it away
  const props = {
    id, value: draft ?? value, placeholder, "data-testid": testid,
    onInput: (e) => { setDraft(e.target.value); onInput?.(e.target.value); },
    onChange: (e) => { setDraft(null); onChange(e.target.value); },
    onBlur: () => setDraft(null),
  };
  return html`<span class="control text" title=${help}>
    <label for=${id}>${label}</label>
    ${lines > 1 ? html`<textarea rows=${lines} ...${props}></textarea>` : html`<input type="text" ...${props} />`}
  </span>`;
}
