/** Files for the person to keep: PNG, CSV, JSON, made in the browser. */

/** A name that every file system takes. */
export const fileName = (name, extension) => `${name.replace(/[^\w.-]+/g, "_").slice(0, 80) || "openbook"}.${extension}`;

/** @param {Blob} blob @param {string} name */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** One cell of a CSV file (RFC 4180). Text that a spreadsheet would take for a formula gets a quote before it. */
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(String(value)) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** @param {any[][]} rows the first has the columns' names */
export const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

export const saveCsv = (rows, name) => save(new Blob([csv(rows)], { type: "text/csv;charset=utf-8" }), fileName(name, "csv"));

/** Numbers that JSON lacks become the strings "NaN", "Infinity", "-Infinity". */
export function json(value) {
  return JSON.stringify(value, (_, v) => (typeof v === "number" && !Number.isFinite(v) ? String(v) : v), 1);
}

export const saveJson = (value, name) => save(new Blob([json(value)], { type: "application/json" }), fileName(name, "json"));

/** @param {HTMLCanvasElement} canvas */
export const savePng = (canvas, name) => canvas.toBlob((blob) => save(blob, fileName(name, "png")), "image/png");

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "font-weight", "text-anchor", "opacity"];

/** An SVG drawing on the page as a PNG of twice its size, with the colours it has there. @param {SVGSVGElement} svg */
export function saveSvgPng(svg, name) {
  const copy = /** @type {SVGSVGElement} */ (svg.cloneNode(true));
  const [from, to] = [svg.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    for (const property of DRAWN) to[i].setAttribute(property, style.getPropertyValue(property));
  });
  const { width, height } = svg.getBoundingClientRect();
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const source = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * width, 2 * height];
    const context = canvas.getContext("2d");
    context.fillStyle = getComputedStyle(document.body).backgroundColor;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    URL.revokeObjectURL(source);
    savePng(canvas, name);
  };
  image.src = source;
}
