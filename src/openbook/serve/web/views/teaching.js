/** Training against generation: one pass with all labels beside one token after the other; a real step; a run's loss. */
import { html, useEffect, useState } from "../html.js";
import { api } from "../api.js";
import { bytes, exact, float, flops, int, percent } from "../format.js";
import { LineChart } from "../components/chart.js";
import { Button, Choice, NumberField, TextField } from "../components/controls.js";
import { Loading, Notice, Section, useAsync, ViewFrame } from "../components/frame.js";
import { Failed, Loaded } from "../components/loaded.js";
import { pieceLabel } from "../components/pieces.js";
import { DataTable } from "../components/table.js";
import { sums, times } from "./cache.js";

export const id = "teaching";
export const needs = null;
const EXAMPLE = "这 是 最好的 时代 这 是 最坏的 时代";
export const defaults = { text: EXAMPLE, row: 0, lr: 0.001, training: "" };

const OPTIMIZERS = { adamw: "AdamW", sgd: "SGD" };
const POLL = 2000; // milliseconds between two looks at a run that goes on

/** The mean of the losses, as the model's training takes it. */
export const meanLoss = (rows) => rows.reduce((sum, row) => sum + row.loss, 0) / rows.length;

/** The row whose label surprised the model most. */
export const hardest = (rows) => rows.reduce((worst, row) => (row.loss > worst.loss ? row : worst));

/** Points of one metric of a run: [step, value], only what was written and is finite. */
export const points = (metrics, key) => metrics.filter((row) => Number.isFinite(row[key])).map((row) => [row.step, row[key]]);

export function View({ model, params, setParams, t }) {
  const able = model?.has_weights && model.has_tokenizer;
  return html`<${ViewFrame} id=${id} title=${t("teaching.title")} about=${t("teaching.about")}>
    ${able
      ? html`<${Flows} key=${model.id} ...${{ model, params, setParams, t }} /><${RealStep} key="${model.id}/step" ...${{ model, params, setParams, t }} />`
      : html`<${Notice} testid="teaching-needs">${t("teaching.needs")}<//>`}
    <${Live} ...${{ params, setParams, t }} />
  <//>`;
}

// --- one text, both flows ---

/** The API's teaching, with what was generated as pieces: a token may be part of a character. */
async function taught(model, text, signal) {
  const flow = await api.post(`/api/models/${model.id}/teaching`, { text }, signal);
  const ids = [flow.prefill, ...flow.steps].map((step) => step.token.id);
  const { pieces } = await api.post(`/api/models/${model.id}/tokens`, { ids }, signal);
  return { ...flow, generated: pieces };
}

function Flows({ model, params, setParams, t }) {
  const { text, row } = params.value;
  const [attempt, setAttempt] = useState(0);
  const found = useAsync((signal) => taught(model, text, signal), [model.id, text, attempt]);
  return html`
    <div class="toolbar">
      <${TextField} label=${t("teaching.text")} value=${text} onChange=${(value) => value.trim() && setParams({ text: value, row: 0 })} testid="teaching-text" />
    </div>
    <${Loaded} of=${found} name="teaching" label=${t("teaching.computing")} again=${() => setAttempt(attempt + 1)}>${(flow) => html`
      <div class="pair">
        <${Training} ...${{ flow, row, setParams, t }} />
        <${Generation} ...${{ flow, t }} />
      </div>
      <${Savings} savings=${flow.savings} t=${t} />`}
    <//>`;
}

function Training({ flow, row, setParams, t }) {
  const rows = flow.rows.map((one, i) => ({ ...one, key: i, in: pieceLabel(one.input), out: pieceLabel(one.label) }));
  const worst = hardest(rows);
  const at = Math.min(Math.max(0, row), rows.length - 1);
  const columns = [
    { key: "position", label: t("teaching.train.position"), format: "int" },
    { key: "in", label: t("teaching.train.input"), align: "left" },
    { key: "out", label: t("teaching.train.label"), align: "left" },
    { key: "p", label: t("teaching.train.p"), format: "percent", align: "right" },
    { key: "loss", label: t("teaching.train.loss"), format: "float" },
  ];
  const seen = rows.slice(0, at + 1).map((one) => one.in).join(" ");
  return html`<${Section} title=${t("teaching.train.title")} testid="training">
    <p class="sentence" data-testid="train-sentence" data-loss=${flow.total.loss}>${t("teaching.train.sentence", { rows: rows.length, forward: flops(flow.total.forward_flops), flops: flops(flow.total.flops), loss: float(flow.total.loss), label: worst.out, input: worst.in, worst: float(worst.loss) })}</p>
    <${DataTable} columns=${columns} rows=${rows} caption=${t("teaching.train.caption")} name="teacher-forcing" testid="train-rows" selected=${at} onRow=${(one) => setParams({ row: one.key })} />
    <h3>${t("teaching.mask.title", { n: at })}</h3>
    <${Mask} at=${at} labels=${rows.map((one) => one.in)} />
    <p class="sentence" data-testid="mask-sentence">${t("teaching.mask.sentence", { n: at, label: rows[at].out, seen })}</p>
  <//>`;
}

/** The inputs of a pass: those that a row sees, and those that the mask hides from it. */
const Mask = ({ labels, at }) => html`<ol class="mask" data-testid="mask">
  ${labels.map((label, i) => html`<li key=${i} class=${i > at ? "hidden-token" : i === at ? "on" : ""}>${label}</li>`)}
</ol>`;

function Generation({ flow, t }) {
  const { prefill } = flow;
  const steps = [prefill, ...flow.steps];
  const all = sums(steps.map((step) => ({ ...step, flops: step.flops_with })));
  const rows = steps.map((step, i) => ({
    ...step, key: i, step: i, in: i === 0 ? t("teaching.gen.tokens", { n: prefill.tokens }) : pieceLabel(flow.generated[i - 1]), out: pieceLabel(flow.generated[i]),
  }));
  const columns = [
    { key: "step", label: t("teaching.gen.step"), format: (i) => (i === 0 ? t("teaching.gen.prefill") : int(i)), align: "left" },
    { key: "in", label: t("teaching.gen.in"), align: "left" },
    { key: "out", label: t("teaching.gen.out"), align: "left" },
    { key: "flops_with", label: t("teaching.gen.flops"), format: "flops", align: "right" },
    { key: "flops_without", label: t("teaching.gen.flops_without"), format: "flops", align: "right" },
    { key: "ms", label: t("teaching.gen.ms"), format: "float" },
  ];
  return html`<${Section} title=${t("teaching.gen.title")} testid="generation">
    <p class="sentence" data-testid="gen-sentence">${t("teaching.gen.sentence", { prompt: prefill.tokens, steps: flow.steps.length, with: flops(all.flops), without: flops(all.flops_without), times: times(all.flops_without, all.flops) })}</p>
    <${DataTable} columns=${columns} rows=${rows} caption=${t("teaching.gen.caption")} name="generation" testid="gen-rows" />
  <//>`;
}

function Savings({ savings, t }) {
  if (!savings?.length) return null;
  const [last, seen] = [savings.at(-1), savings.findLast((row) => Number.isFinite(row.measured))];
  const said = (row) => ({ length: row.length, predicted: float(row.predicted, 3), measured: row.measured && float(row.measured, 3) });
  const sentences = [seen && t("teaching.savings.sentence", said(seen)), last !== seen && t("teaching.savings.predicted.only", said(last))];
  const series = ["predicted", "measured"].map((key) => ({ label: t(`teaching.savings.${key}`), points: savings.map((row) => [row.length, row[key] ?? null]), dashed: key === "predicted" }));
  return html`<${Section} title=${t("teaching.savings.title")} testid="savings">
    <${LineChart} series=${series} x=${{ label: t("teaching.savings.length"), format: int }} y=${{ label: t("teaching.savings.y"), format: (v) => float(v, 3), log: true }}
      title=${t("teaching.savings.caption")} name="cache-savings" testid="savings-chart" sentence=${sentences.filter(Boolean).join(" ")} />
  <//>`;
}

// --- one step of an optimizer ---

function RealStep({ model, params, setParams, t }) {
  const { text, lr } = params.value;
  const [state, setState] = useState({ value: null, error: null, loading: false });
  useEffect(() => setState({ value: null, error: null, loading: false }), [text, lr]);
  const take = async () => {
    setState({ value: null, error: null, loading: true });
    try {
      setState({ value: await api.post(`/api/models/${model.id}/optimizer_step`, { text, lr }), error: null, loading: false });
    } catch (error) {
      setState({ value: null, error, loading: false });
    }
  };
  return html`<${Section} title=${t("teaching.step.title")} note=${t("teaching.step.about")} testid="optimizer">
    <div class="toolbar">
      <${NumberField} label=${t("teaching.step.lr")} value=${lr} min=${0} max=${1} step="any" onChange=${(value) => setParams({ lr: value })} testid="optimizer-lr" />
      <${Button} kind="primary" onClick=${take} disabled=${state.loading} testid="optimizer-step">${t("teaching.step.do")}<//>
    </div>
    ${state.loading && html`<${Loading} label=${t("teaching.step.doing")} />`}
    ${state.error && html`<${Failed} error=${state.error} testid="optimizer-error" />`}
    ${state.value && html`<${Outcome} found=${state.value} lr=${lr} t=${t} />`}
  <//>`;
}

function Outcome({ found, lr, t }) {
  const rows = found.before.map((row, i) => ({
    key: i, position: row.position, label: pieceLabel(row.label), before: row.p, after: found.after[i].p,
    loss_before: row.loss, loss_after: found.after[i].loss, change: found.after[i].loss - row.loss,
  }));
  const up = rows.filter((row) => row.after > row.before).length;
  const columns = [
    { key: "position", label: t("teaching.train.position"), format: "int" },
    { key: "label", label: t("teaching.train.label"), align: "left" },
    { key: "before", label: t("teaching.step.before"), format: "percent", align: "right" },
    { key: "after", label: t("teaching.step.after"), format: "percent", align: "right" },
    { key: "loss_before", label: t("teaching.step.loss_before"), format: "float" },
    { key: "loss_after", label: t("teaching.step.loss_after"), format: "float" },
    { key: "change", label: t("teaching.step.change"), format: "float" },
  ];
  const grads = [
    { key: "name", label: t("teaching.grads.name"), align: "left" },
    { key: "l2", label: t("teaching.grads.l2"), format: "float" },
    { key: "update_l2", label: t("teaching.grads.update"), format: "float" },
  ];
  const memory = Object.entries(found.memory).map(([name, value]) => ({ key: name, name: t(`teaching.memory.${name}`), bytes: value }));
  return html`
    <p class="sentence" role="status" data-testid="optimizer-sentence">${t("teaching.step.sentence", { optimizer: OPTIMIZERS[found.optimizer] ?? found.optimizer, lr: exact(lr), before: float(meanLoss(found.before)), after: float(meanLoss(found.after)), up, rows: rows.length })}</p>
    <${DataTable} columns=${columns} rows=${rows} caption=${t("teaching.step.table")} name="optimizer-step" testid="optimizer-rows" />
    <${DataTable} columns=${grads} rows=${found.grads.map((row) => ({ ...row, key: row.name }))} caption=${t("teaching.grads.caption")} name="gradients" testid="optimizer-grads" height=${420} />
    <${DataTable} columns=${[{ key: "name", label: t("teaching.memory.name"), align: "left" }, { key: "bytes", label: t("teaching.memory.bytes"), format: "bytes", align: "right" }]}
      rows=${memory} caption=${t("teaching.memory.caption")} name="optimizer-memory" testid="optimizer-memory" />`;
}

// --- the loss of a run folder ---

function Live({ params, setParams, t }) {
  const { training } = params.value;
  const [attempt, setAttempt] = useState(0);
  const runs = useAsync(async (signal) => (await api.get("/api/training", signal)).runs, [attempt]);
  return html`<${Section} title=${t("teaching.live.title")} note=${t("teaching.live.about")} testid="live">
    <${Loaded} of=${runs} name="live" again=${() => setAttempt(attempt + 1)}>${(found) => html`
      <div class="toolbar">
        ${found.length > 0 && html`<${Choice} label=${t("teaching.live.run")} value=${training} most=${0} testid="live-run" onChange=${(name) => setParams({ training: name })}
          options=${[{ value: "", label: t("teaching.live.choose") }, ...found.map(({ name }) => ({ value: name, label: name }))]} />`}
        <${Button} kind="quiet" onClick=${() => setAttempt(attempt + 1)} testid="live-refresh">${t("teaching.live.refresh")}<//>
      </div>
      ${found.length === 0 && html`<p class="note" data-testid="live-none">${t("teaching.live.none")}</p>`}`}
    <//>
    ${training && html`<${Curve} key=${training} name=${training} t=${t} />`}
  <//>`;
}

/** Asks for what is new every two seconds, as long as the run goes on and the page is looked at. */
function useMetrics(name) {
  const [state, setState] = useState({ metrics: [], info: null, error: null });
  useEffect(() => {
    const giveUp = new AbortController();
    let [after, timer] = [-1, 0];
    const look = async () => {
      if (document.hidden) return void (timer = setTimeout(look, POLL));
      try {
        const found = await api.get(`/api/training/${encodeURIComponent(name)}?after=${after}`, giveUp.signal);
        after = found.metrics.reduce((last, row) => Math.max(last, row.step), after);
        setState((old) => ({ metrics: [...old.metrics, ...found.metrics], info: found, error: null }));
        if (found.state === "running") timer = setTimeout(look, POLL);
      } catch (error) {
        if (!giveUp.signal.aborted) setState((old) => ({ ...old, error }));
      }
    };
    look();
    return () => {
      giveUp.abort();
      clearTimeout(timer);
    };
  }, [name]);
  return state;
}

function Curve({ name, t }) {
  const { metrics, info, error } = useMetrics(name);
  if (error) return html`<${Failed} error=${error} testid="live-error" />`;
  if (!info) return html`<${Loading} />`;
  const [train, valid] = [points(metrics, "loss"), points(metrics, "valid_loss")];
  const series = [{ label: t("teaching.live.train"), points: train }, ...(valid.length ? [{ label: t("teaching.live.valid"), points: valid, dashed: true }] : [])];
  const last = train[train.length - 1];
  return html`
    <p role="status" data-testid="live-state">${t("teaching.live.state", { name, state: t(`teaching.live.state.${info.state}`), step: info.step, steps: info.steps ?? "?" })}</p>
    ${train.length === 0 ? html`<p class="note" data-testid="live-empty">${t("teaching.live.empty")}</p>` : html`<${LineChart} series=${series}
      x=${{ label: t("teaching.live.x"), format: int }} y=${{ label: t("teaching.live.y"), format: (v) => float(v, 3) }} title=${t("teaching.live.title")} name="loss-${name}" testid="live-chart"
      sentence=${t("teaching.live.sentence", { step: last[0], steps: info.steps ?? "?", loss: float(last[1]), first: float(train[0][1]) })} />`}`;
}
