/** Ledger: every tensor and every step of a model, folded, sorted, added up, and beside another model's. */
import { html, useEffect, useMemo, useState } from "../html.js";
import { api } from "../api.js";
import { bytes, count, float, flops, int, percent } from "../format.js";
import { has } from "../i18n.js";
import { openModel, report } from "../state.js";
import { Strip } from "../components/chart.js";
import { Choice, NumberField } from "../components/controls.js";
import { Section, useAsync, ViewFrame } from "../components/frame.js";
import { Loaded, quiet } from "../components/loaded.js";
import { DataTable } from "../components/table.js";

export const id = "ledger";
export const needs = "model";
export const defaults = { mode: "prefill", tokens: 12, past: 0, dtype: "", other: "", show: "tensors", sort: "", open: "" };

const DTYPES = ["fp32", "bf16", "fp16"];
const MODES = ["prefill", "decode", "train"];

/** "0-2,4" of [0, 1, 2, 4]. */
export function numbersInRuns(numbers) {
  const runs = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && n === last[1] + 1) last[1] = n;
    else runs.push([n, n]);
  }
  return runs.map(([first, end]) => (first === end ? `${first}` : `${first}–${end}`)).join(",");
}

/** The place of a row that already stands for several layers: "layers.0-27.attn.q.weight" → "layers.0-27". */
const placeOf = (row) => (row.layer === null ? (/^layers\.[^a-z]+(?=\.)/.exec(row.name)?.[0] ?? null) : null);

/**
 * Rows as a tree: what stands outside the layers by itself; layers whose rows are all alike as one branch, in it one
 * row for each of theirs with the sums of the measures, in that the layers' own rows.
 * @param {any[]} rows in the order of a pass, `layer` null outside the layers
 * @param {string[]} measures keys to add up
 * @param {(row: any) => string} likeness what must be equal for two layers' rows to be folded
 */
export function folded(rows, measures, likeness) {
  const layers = new Map();
  for (const row of rows) if (row.layer !== null) layers.set(row.layer, [...(layers.get(row.layer) ?? []), row]);
  const kinds = new Map(); // what a layer's rows are like → its layers
  for (const [layer, own] of layers) {
    const kind = own.map((row) => `${row.local} ${likeness(row)}`).join("\n");
    kinds.set(kind, [...(kinds.get(kind) ?? []), layer]);
  }
  const branches = [...kinds.values()].map((of) => unfolded(of, layers, measures));
  const tree = [];
  for (const row of rows) {
    const place = placeOf(row);
    if (row.layer !== null) tree.push(...branches.splice(0));
    else if (place === null) tree.push({ ...row, key: row.name });
    else if (tree.at(-1)?.key === place) tree.at(-1).children.push(times(row, measures));
    else tree.push({ name: place, key: place, times: row.times, layers: true, children: [times(row, measures)] });
  }
  return tree.map((row) => (row.layers ? { ...row, ...sumsOf(row.children, measures) } : row));
}

/** A row that the server has folded, with its measures for all of its layers. */
const times = (row, measures) => ({ ...row, key: row.name, ...Object.fromEntries(measures.map((key) => [key, row.times * row[key]])) });

function unfolded(of, layers, measures) {
  const place = `layers.${numbersInRuns(of)}`;
  const children = layers.get(of[0]).map((first, i) => {
    const each = of.map((layer) => layers.get(layer)[i]);
    const name = `${place}.${first.local}`;
    const leaf = { ...first, name, key: name, times: of.length, ...sumsOf(each, measures) };
    return of.length > 1 ? { ...leaf, children: each.map((row) => ({ ...row, key: row.name, times: 1 })) } : leaf;
  });
  return { name: place, key: place, times: of.length, layers: true, children };
}

const sumsOf = (rows, measures) => Object.fromEntries(measures.map((key) => [key, rows.reduce((sum, row) => sum + (row.tied ? 0 : row[key] ?? 0), 0)]));

/** Sum of a measure over the branches of a tree, tied rows left out. */
export const total = (tree, key) => sumsOf(tree, [key])[key];

/** Two trees as one whose rows have the measures of both, `other_KEY` for the second's; rows meet by place. */
export function beside(a, b, measures) {
  const mine = new Map(a.map((row) => [meeting(row), row]));
  const theirs = new Map(b.map((row) => [meeting(row), row]));
  const names = [...mine.keys(), ...[...theirs.keys()].filter((name) => !mine.has(name))];
  return names.map((name) => {
    const [x, y] = [mine.get(name), theirs.get(name)];
    const row = { ...(x ?? { ...y, ...Object.fromEntries([...measures, "shape", "letters"].map((key) => [key, null])) }), key: name };
    for (const key of [...measures, "shape"]) row[`other_${key}`] = y ? y[key] : null;
    const children = x?.children || y?.children ? beside(x?.children ?? [], y?.children ?? [], measures) : null;
    return children?.length ? { ...row, children } : { ...row, children: undefined };
  });
}

/** Layers meet whatever their number; what is in them by its local name; single layers by their number. */
function meeting(row) {
  if (row.layers) return "layers";
  return row.times > 1 ? row.local : row.name;
}

export function View({ model, params, setParams, t }) {
  const p = params.value;
  const query = new URLSearchParams({ mode: p.mode, ...(p.mode === "decode" ? { past: p.past, tokens: 1 } : { tokens: p.tokens }), ...(p.dtype && { dtype: p.dtype }) });
  const [attempt, setAttempt] = useState(0);
  const book = useAsync(async (signal) => {
    await quiet(100, signal);
    const other = p.other ? await openModel(p.other) : null;
    const ask = ({ id: of }) => api.get(`/api/models/${of}/ledger?${query}`, signal);
    return { own: await ask(model), other: other && { ...(await ask(other)), name: other.name }, name: model.name };
  }, [model.id, query.toString(), p.other, attempt]);
  return html`<${ViewFrame} id=${id} title=${t("ledger.title")} about=${t("ledger.about")} toolbar=${html`<${Workload} ...${{ model, p, setParams, t }} />`}>
    <${Loaded} of=${book} name="ledger" again=${() => setAttempt(attempt + 1)}>${(found) => html`<${Books} ...${{ found, p, setParams, t }} />`}<//>
  <//>`;
}

function Workload({ model, p, setParams, t }) {
  const [names, setNames] = useState([]);
  useEffect(() => { api.get("/api/state").then(({ models, available }) => setNames([...new Set([...models, ...available].map((one) => one.name))]), report); }, []);
  const others = names.filter((name) => name !== model.name);
  if (p.other && !others.includes(p.other)) others.unshift(p.other);
  return html`
    <${Choice} label=${t("ledger.mode")} value=${p.mode} options=${MODES.map((mode) => ({ value: mode, label: t(`ledger.mode.${mode}`) }))} onChange=${(mode) => setParams({ mode })} testid="ledger-mode" />
    ${p.mode !== "decode" && html`<${NumberField} label=${t("ledger.tokens")} value=${p.tokens} min=${1} max=${10_000_000} onChange=${(n) => setParams({ tokens: Math.floor(n) })} testid="ledger-tokens" />`}
    ${p.mode === "decode" && html`<${NumberField} label=${t("ledger.past")} value=${p.past} min=${0} max=${10_000_000} onChange=${(n) => setParams({ past: Math.floor(n) })} testid="ledger-past" />`}
    <${Choice} label=${t("ledger.dtype")} value=${p.dtype} options=${[{ value: "", label: t("ledger.dtype.own") }, ...DTYPES.map((name) => ({ value: name, label: name }))]} onChange=${(dtype) => setParams({ dtype })} testid="ledger-dtype" />
    <${Choice} label=${t("ledger.other")} value=${p.other} most=${0} options=${[{ value: "", label: t("ledger.other.none") }, ...others.map((name) => ({ value: name, label: name }))]} onChange=${(other) => setParams({ other })} testid="ledger-other" />`;
}

function Books({ found, p, setParams, t }) {
  const { own, other } = found;
  const held = { order: p.sort, onOrder: (sort) => setParams({ sort }), opened: p.open, onOpened: (open) => setParams({ open }) };
  return html`
    <${Totals} ...${{ found, t }} />
    <${Choice} label=${t("ledger.show")} value=${p.show} options=${["tensors", "steps", "memory"].map((show) => ({ value: show, label: t(`ledger.show.${show}`) }))} onChange=${(show) => setParams({ show, sort: "", open: "" })} testid="ledger-show" />
    ${p.show === "tensors" && html`<${Tensors} ...${{ own, other, name: found.name, held, t }} />`}
    ${p.show === "steps" && html`<${Steps} ...${{ own, other, name: found.name, held, t }} />`}
    ${p.show === "memory" && html`<${Memory} ...${{ own, other, name: found.name, held, t }} />`}`;
}

/** A text of the ledger's own in the page's language, where there is one; else as the ledger has it. */
const told = (t, key, words) => (has(`ledger.${key}`) ? t(`ledger.${key}`) : words);

/** A sentence of the ledger as the key of its translation. */
export const slug = (words) => words.toLowerCase().replace(/[^a-z0-9]+/g, "_").replace(/^_|_$/g, "");

/** The totals of a book, each under its own label, with what it counts and its unit. */
export function totalRows({ totals }) {
  const { params, definitions, ...rest } = totals;
  const counts = Object.entries(params).map(([name, value]) => ({ name, value, unit: "params", meaning: definitions[name] ?? "" }));
  const others = Object.entries(rest).map(([name, value]) => ({ name, value, unit: /flops/.test(name) ? "flops" : "bytes", meaning: null }));
  return [...counts, ...others].map((row) => ({ ...row, key: row.name }));
}

const withUnit = (value, { unit }) => (unit === "params" ? int(value) : `${int(value)} (${{ flops, bytes }[unit](value)})`);

function Totals({ found, t }) {
  const { own, other, name } = found;
  const theirs = new Map(other ? totalRows(other).map((row) => [row.name, row.value]) : []);
  const rows = totalRows(own).map((row) => ({ ...row, other: theirs.get(row.name) ?? null, label: told(t, `total.${row.name}`, row.name), meaning: told(t, `meaning.${row.name}`, row.meaning) }));
  const columns = [
    { key: "label", label: t("ledger.totals.name"), align: "left" },
    { key: "value", label: other ? name : t("ledger.totals.value"), format: withUnit, align: "right" },
    ...(other ? [{ key: "other", label: other.name, format: withUnit, align: "right" }] : []),
    { key: "meaning", label: t("ledger.totals.meaning"), align: "left", sort: false },
  ];
  const [mine, its] = [own, other].map((book) => book?.totals.params.total ?? 0);
  return html`<${Section} title=${t("ledger.totals.title")} testid="ledger-totals">
    ${other && html`<p class="sentence" data-testid="ledger-two">${t("ledger.two.sentence", { a: name, b: other.name, pa: int(mine), pb: int(its), times: mine ? float(its / mine, 3) : "–" })}</p>`}
    <${DataTable} columns=${columns} rows=${rows} caption=${t("ledger.totals.caption")} name="ledger-totals" testid="totals" height=${900} />
    <h3>${t("ledger.conventions")}</h3>
    <ul class="conventions" data-testid="conventions">${own.conventions.map((words) => html`<li key=${words}>${told(t, `said.${slug(words)}`, words)}</li>`)}</ul>
  <//>`;
}

const shapeText = (shape) => (shape ? shape.join(" × ") : "");
const named = (row, t) => (row.times > 1 ? `${row.name} ${t("ledger.times", { n: row.times })}` : row.name);

/** A tree's rows with the share of each in the whole, and the name as it is shown. */
function withShares(tree, key, whole, t) {
  return tree.map((row) => ({ ...row, label: named(row, t), share: whole && !row.tied ? row[key] / whole : null, children: row.children && withShares(row.children, key, whole, t) }));
}

const partOf = (tree, key) => tree.flatMap((row) => (row.layers ? row.children : [row])).reduce((best, row) => ((row.tied ? 0 : row[key]) > best[key] ? row : best), { [key]: -1, name: "" });

function Tensors({ own, other, name, held, t }) {
  const likeness = (row) => `${row.shape} ${row.bytes} ${row.kind} ${row.tied ?? ""}`;
  const measures = ["params", "bytes"];
  const [mine, theirs] = useMemo(() => [folded(own.tensors, measures, likeness), other && folded(other.tensors, measures, likeness)], [own, other]);
  const whole = total(mine, "params");
  const tree = withShares(theirs ? beside(mine, theirs, measures) : mine, "params", whole, t);
  const largest = partOf(mine, "params");
  const columns = [
    { key: "label", label: t("ledger.tensors.name"), align: "left" },
    { key: "shape", label: t("ledger.tensors.shape"), format: shapeText, align: "left", sort: false },
    ...(other ? [] : [{ key: "letters", label: t("ledger.tensors.letters"), format: (letters) => (letters ? letters.join(" × ") : ""), align: "left", sort: false }]),
    { key: "params", label: other ? `${t("ledger.tensors.params")}: ${name}` : t("ledger.tensors.params"), format: (value, row) => (row.tied ? t("ledger.tensors.tied", { name: row.tied }) : int(value)), align: "right" },
    ...(other ? [{ key: "other_params", label: `${t("ledger.tensors.params")}: ${other.name}`, format: "int" }, { key: "other_shape", label: t("ledger.tensors.shape"), format: shapeText, align: "left", sort: false }] : []),
    { key: "bytes", label: t("ledger.tensors.bytes"), format: (value, row) => bytes(row.tied ? null : value), align: "right" },
    { key: "share", label: t("ledger.tensors.share"), format: "percent", align: "right" },
    ...(other ? [] : [{ key: "kind", label: t("ledger.tensors.kind"), align: "left" }]),
  ];
  return html`<${Section} title=${t("ledger.show.tensors")} testid="ledger-tensors">
    <${Strip} parts=${mine.flatMap((row) => (row.tied ? [] : [{ label: row.name, value: row.params }]))} title=${t("ledger.shares.caption")} name="ledger-shares" testid="ledger-shares" format=${count}
      sentence=${t("ledger.tensors.sentence", { count: own.tensors.length, params: int(whole), bytes: bytes(total(mine, "bytes")), name: largest.name, share: percent(largest.params / whole) })} />
    <${DataTable} columns=${columns} rows=${tree} caption=${t("ledger.tensors.caption")} name="ledger-tensors" testid="tensors" ...${held} height=${640} />
  <//>`;
}

function Steps({ own, other, name, held, t }) {
  const likeness = (row) => `${row.shape} ${row.flops}`;
  const measures = ["flops", "bytes"];
  const [mine, theirs] = useMemo(() => [folded(own.steps, measures, likeness), other && folded(other.steps, measures, likeness)], [own, other]);
  const whole = total(mine, "flops");
  const tree = withShares(theirs ? beside(mine, theirs, measures) : mine, "flops", whole, t);
  const largest = partOf(mine, "flops");
  const columns = [
    { key: "label", label: t("ledger.steps.name"), align: "left" },
    ...(other ? [] : [{ key: "axes", label: t("ledger.steps.axes"), format: (axes) => (axes ? axes.join(", ") : ""), align: "left", sort: false }]),
    { key: "shape", label: t("ledger.steps.shape"), format: shapeText, align: "left", sort: false },
    { key: "flops", label: other ? `${t("ledger.steps.flops")}: ${name}` : t("ledger.steps.flops"), format: "int" },
    ...(other ? [{ key: "other_flops", label: `${t("ledger.steps.flops")}: ${other.name}`, format: "int" }] : []),
    { key: "share", label: t("ledger.steps.share"), format: "percent", align: "right" },
    { key: "bytes", label: t("ledger.steps.bytes"), format: "bytes", align: "right" },
  ];
  return html`<${Section} title=${t("ledger.show.steps")} testid="ledger-steps">
    <p class="sentence" data-testid="steps-sentence">${t("ledger.steps.sentence", { count: own.steps.length, flops: flops(whole), name: largest.name, share: percent(largest.flops / whole) })}</p>
    <${DataTable} columns=${columns} rows=${tree} caption=${t("ledger.steps.caption")} name="ledger-steps" testid="steps-table" ...${held} height=${640} />
  <//>`;
}

function Memory({ own, other, name, held, t }) {
  const theirs = new Map((other?.memory ?? []).map((row) => [row.name, row.bytes]));
  const rows = own.memory.map((row) => ({ ...row, key: row.name, label: told(t, `item.${row.name}`, row.name), meaning: told(t, `item.${row.name}.meaning`, row.meaning), other: theirs.get(row.name) ?? null }));
  const whole = own.memory.reduce((sum, row) => sum + row.bytes, 0);
  const largest = rows.reduce((best, row) => (row.bytes > best.bytes ? row : best), rows[0]);
  const columns = [
    { key: "label", label: t("ledger.memory.name"), align: "left" },
    { key: "bytes", label: other ? name : t("ledger.memory.bytes"), format: "bytes", align: "right" },
    ...(other ? [{ key: "other", label: other.name, format: "bytes", align: "right" }] : []),
    { key: "meaning", label: t("ledger.memory.meaning"), align: "left", sort: false },
  ];
  return html`<${Section} title=${t("ledger.show.memory")} testid="ledger-memory">
    <${Strip} parts=${rows.map((row) => ({ label: row.label, value: row.bytes }))} title=${t("ledger.memory.caption")} name="ledger-memory" testid="memory-strip" format=${bytes}
      sentence=${t("ledger.memory.sentence", { total: bytes(whole), name: largest?.label ?? "", share: percent(whole ? largest.bytes / whole : 0) })} />
    <${DataTable} columns=${columns} rows=${rows} caption=${t("ledger.memory.caption")} name="ledger-memory" testid="memory" ...${held} />
  <//>`;
}
