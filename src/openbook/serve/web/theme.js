/** Light or dark, and the colours in use, for what is drawn on a canvas. */
import { signal } from "./html.js";
import { stored } from "./i18n.js";

export const THEMES = ["auto", "light", "dark"];

/** What the person chose: "auto" follows the system. */
export const theme = signal("auto");
/** What is shown now: "light" | "dark". Whoever draws with `colour` reads it to be drawn again. */
export const shade = signal("light");

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(theme.peek()));

export function setTheme(name) {
  theme.value = THEMES.includes(name) ? name : "auto";
  stored("theme", theme.value);
  shade.value = theme.value === "auto" ? (dark.matches ? "dark" : "light") : theme.value;
  document.documentElement.dataset.theme = shade.value;
}

/** The value of a CSS variable: colour("--text"). */
export const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/** Does the person want no motion? */
export const stillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
