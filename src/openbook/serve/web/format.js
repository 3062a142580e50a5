/** Numbers, bytes and shapes as text, in the person's language. All functions are pure but for `setLocale`. */

let locale = "en";
const formats = new Map();

/** @param {string} language "en" | "zh-CN" */
export function setLocale(language) {
  locale = language;
  formats.clear();
}

function formatted(value, key, options) {
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat(locale, options));
  return formats.get(key).format(value);
}

/** What is no finite number: JSON's null is either of the three, as a tensor's slice still tells them apart. */
function unusual(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  return null;
}

/** 134515008 → "134,515,008" */
export const int = (value) => unusual(value) ?? formatted(value, "int", { maximumFractionDigits: 0 });

/** A number with 4 significant digits, very large and small ones with a power of ten: 0.6214, 1.205e-7. */
export function float(value, digits = 4) {
  const odd = unusual(value);
  if (odd) return odd;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(digits - 1).replace("-", "−").replace("e+", "e");
  const decimals = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const options = { minimumFractionDigits: Math.min(decimals, 7), maximumFractionDigits: Math.min(decimals, 7) };
  return formatted(value, `float${decimals}`, options).replace("-", "−");
}

/** The shortest text that gives the same float32: for exports and where exact is meant. */
export function exact(value) {
  const odd = unusual(value);
  if (odd) return odd;
  for (let digits = 6; digits < 9; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === Math.fround(value)) return String(Number(text));
  }
  return String(Number(value.toPrecision(9)));
}

/** 0.6214 → "62.1 %" */
export function percent(value, most = 1) {
  const odd = unusual(value);
  if (odd) return odd;
  if (value > 0 && value < 0.0005) return `< ${formatted(0.1, "percent", { maximumFractionDigits: 1 })} %`;
  const decimals = value >= 0.99995 || value === 0 ? 0 : most;
  return `${formatted(100 * value, `percent${decimals}`, { minimumFractionDigits: decimals, maximumFractionDigits: decimals })} %`;
}

function scaled(value, base, units) {
  const odd = unusual(value);
  if (odd) return odd;
  let power = 0;
  let number = value;
  while (Math.abs(number) >= (power ? base - 0.5 : base) && power < units.length - 1) {
    number /= base;
    power++;
  }
  const decimals = power === 0 ? 0 : Math.abs(number) < 10 ? 2 : Math.abs(number) < 100 ? 1 : 0;
  return `${formatted(number, `scaled${decimals}`, { maximumFractionDigits: decimals })} ${units[power]}`.trim();
}

/** 4718592 → "4.5 MiB" */
export const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]);

/** 1.35e8 → "135 M"; B is 10⁹, T 10¹² */
export const count = (value) => scaled(value, 1000, ["", "K", "M", "B", "T"]);

/** 2.9e9 → "2.9 GFLOP" */
export const flops = (value) => scaled(value, 1000, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);

/** 0.00123 s → "1.23 ms" */
export function seconds(value) {
  const odd = unusual(value);
  if (odd) return odd;
  if (value === 0) return "0 s";
  const [factor, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const number = value * factor;
  const decimals = number < 10 ? 2 : number < 100 ? 1 : 0;
  return `${formatted(number, `scaled${decimals}`, { maximumFractionDigits: decimals })} ${unit}`;
}

/** 12.5 ms → "12.5 ms" */
export const milliseconds = (value) => seconds(value === null || value === undefined ? value : value / 1000);

/** ["B", "T"], [1, 12] → {letters: "[B, T]", numbers: "[1, 12]"} */
export function shape(axes, sizes) {
  return { letters: `[${axes.join(", ")}]`, numbers: `[${sizes.join(", ")}]` };
}

/** The formats by name, as tables take them. */
export const byName = { int, float, exact, percent, bytes, count, flops, seconds, milliseconds, text: (value) => String(value ?? "–") };

/**
 * A token's text as one can see it: blanks become ␣, line breaks ⏎, tabs ⇥; other control characters their code.
 * @param {string} text
 */
export function visible(text) {
  return text
    .replace(/ /g, "␣")
    .replace(/\n/g, "⏎")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (c) =>
      `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
