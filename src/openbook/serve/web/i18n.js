/** The page's language: which one, its texts, and `t`. No text a person reads stands in the code. */
import { signal } from "./html.js";
import { noAnswer } from "./api.js";
import { setLocale } from "./format.js";
import * as format from "./format.js";

export const LANGUAGES = ["en", "zh-CN"];

/** @type {import("./html.js").Signal} the language in use; setting it through `setLanguage` only */
export const language = signal("en");
const texts = new Map(); // "en/shell" → {key: text}
let plurals = new Intl.PluralRules("en");

/** `?lang=` in the address, else what was chosen before, else what the browser asks for. */
export function preferredLanguage() {
  const asked = [new URLSearchParams(location.search).get("lang"), stored("language"), ...navigator.languages];
  for (const tag of asked) {
    if (LANGUAGES.includes(tag)) return tag;
    const same = LANGUAGES.find((known) => tag && known.split("-")[0] === tag.split("-")[0]);
    if (same) return same;
  }
  return "en";
}

/** A value kept by the browser for this page, or null; browsers may forbid it. */
export function stored(key, value) {
  try {
    if (value !== undefined) localStorage.setItem(`openbook.${key}`, value);
    return localStorage.getItem(`openbook.${key}`);
  } catch {
    return value ?? null;
  }
}

/** Fetches the texts of some parts ("shell", or a view's id), in one language, once. */
export async function loadTexts(parts, tag = language.value) {
  await Promise.all(
    parts.filter((part) => !texts.has(`${tag}/${part}`)).map(async (part) => {
      const response = await fetch(`./i18n/${tag}/${part}.json`);
      texts.set(`${tag}/${part}`, response.ok ? await response.json() : {});
    }),
  );
}

/** Changes the language of everything on the page. `parts`: those whose texts are on it. */
export async function setLanguage(tag, parts) {
  await loadTexts(parts, tag);
  setLocale(tag);
  plurals = new Intl.PluralRules(tag);
  document.documentElement.lang = tag;
  language.value = tag;
  Object.assign(noAnswer, { what: t("shell.no_answer"), why: t("shell.no_answer_why"), next: t("shell.no_answer_next") });
  document.title = t("shell.title");
}

function look(key) {
  const dot = key.indexOf(".");
  const found = texts.get(`${language.value}/${key.slice(0, dot)}`)?.[key.slice(dot + 1)];
  return found ?? key;
}

/** Is there such a text? */
export const has = (key) => look(key) !== key;

/**
 * The text "part.key" in the page's language. `{name}` in it becomes `values.name`, numbers in the language's
 * spelling; of a text given as `{one, other}` the form that `values.n` needs is taken. A list stays a list.
 * @param {string} key @param {Record<string, any>} [values]
 */
export function t(key, values = {}) {
  let text = look(key);
  if (Array.isArray(text)) return text.map((one) => filled(one, values));
  if (typeof text === "object") text = text[plurals.select(Number(values.n ?? 0))] ?? text.other;
  return filled(text, values);
}

function filled(text, values) {
  return text.replace(/\{(\w+)\}/g, (whole, name) => {
    const value = values[name];
    if (typeof value === "number") return Number.isInteger(value) ? format.int(value) : format.float(value);
    return value ?? whole;
  });
}
