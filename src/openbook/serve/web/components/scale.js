/** Colour scales that people with any kind of colour vision can read, for both themes. */

const SEQUENTIAL = {
  // from paper to ink: zero is the page, much is dark
  light: ["#fcfbf4", "#d8ecd2", "#9ad4c4", "#52b0bd", "#2c83b0", "#2b5696", "#2e2a72", "#1f0f45"],
  // viridis
  dark: ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"],
};
const DIVERGING = {
  light: ["#0b3c73", "#2166ac", "#67a9cf", "#c7dfec", "#fbfaf7", "#f6d5bf", "#e98d63", "#b93327", "#6f0d1d"],
  dark: ["#b9e0ff", "#74b8ea", "#3a83bb", "#264f70", "#1b1f23", "#6b3a2b", "#bd6239", "#f09a5f", "#ffdcb8"],
};

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const tables = new Map();

/** 256 colours of a scale, as bytes r, g, b. @param {"sequential" | "diverging"} scale @param {"light" | "dark"} shade */
export function colours(scale, shade) {
  const key = `${scale}/${shade}`;
  if (!tables.has(key)) {
    const stops = (scale === "diverging" ? DIVERGING : SEQUENTIAL)[shade].map(rgb);
    const table = new Uint8ClampedArray(256 * 3);
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (stops.length - 1);
      const before = Math.min(stops.length - 2, Math.floor(place));
      for (let c = 0; c < 3; c++) table[3 * i + c] = stops[before][c] + (place - before) * (stops[before + 1][c] - stops[before][c]);
    }
    tables.set(key, table);
  }
  return tables.get(key);
}

/** The ends of a scale: those given, else those of the finite numbers; a diverging one has 0 in its middle. */
export function ends(data, scale, low, high) {
  let [least, most] = [Infinity, -Infinity];
  if (low === undefined || high === undefined) {
    for (const value of data) {
      if (!Number.isFinite(value)) continue;
      if (value < least) least = value;
      if (value > most) most = value;
    }
    if (least > most) [least, most] = [0, 0];
  }
  [least, most] = [low ?? least, high ?? most];
  if (scale === "diverging") {
    const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
    return [-size, size];
  }
  return most > least ? [least, most] : [least, least + (Math.abs(least) || 1)];
}

/** Where a number lies on 256 steps. */
export const stepOf = (value, [low, high]) => Math.max(0, Math.min(255, Math.round((255 * (value - low)) / (high - low))));

/** Is this colour so dark that white text belongs on it? */
export const isDark = (table, step) => 0.299 * table[3 * step] + 0.587 * table[3 * step + 1] + 0.114 * table[3 * step + 2] < 140;
