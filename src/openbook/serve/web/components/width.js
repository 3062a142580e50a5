/** How wide a drawing may be. */
import { useLayoutEffect, useState } from "../html.js";

/** The width in px of the element in `box`, as the window changes; `atFirst` until it is known, never below `least`. */
export function useWidth(box, atFirst = 0, least = 0) {
  const [width, setWidth] = useState(atFirst);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(() => setWidth(Math.max(least, box.current.clientWidth)));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return width;
}
