/** What every part of the page is written with: Preact, its hooks, signals, and htm's templates instead of JSX. */
import { h } from "./vendor/preact.module.js";
import htm from "./vendor/htm.module.js";

export const html = htm.bind(h);
export { Component, createContext, Fragment, h, render } from "./vendor/preact.module.js";
export {
  useCallback,
  useContext,
  useEffect,
  useId,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "./vendor/hooks.module.js";
export { batch, computed, effect, signal, untracked, useComputed, useSignal } from "./vendor/signals.module.js";
