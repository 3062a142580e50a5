/**
 * The server's HTTP API. Whatever goes wrong is thrown as an `ApiError` with its three parts; the page shows it.
 *
 * A run is kept on the server for a while only. A request below `/api/runs/ID` that finds it gone asks
 * `api.onRunGone` (set by state.js) to make it anew, and is sent again under the new id.
 */

export class ApiError extends Error {
  /** @param {{what: string, why?: string, next?: string}} parts @param {number} status HTTP status, 0: no answer */
  constructor({ what, why = "", next = "" }, status = 0) {
    super(what);
    Object.assign(this, { what, why, next, status });
  }
}

/** What the page says when nothing answers; i18n.js puts the person's language here. */
export const noAnswer = { what: "The server does not answer.", why: "", next: "" };

async function answer(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(noAnswer);
  }
  if (response.ok) return response;
  const parts = await response.json().then((body) => body.error, () => null);
  throw new ApiError(parts ?? { what: `${response.status} ${response.statusText}` }, response.status);
}

async function request(path, options) {
  try {
    return await answer(path, options);
  } catch (error) {
    const gone = /^\/api\/runs\/([^/?]+)/.exec(path);
    if (!(error instanceof ApiError) || error.status !== 404 || !gone || !api.onRunGone) throw error;
    const id = await api.onRunGone(gone[1]);
    if (!id) throw error;
    return answer(path.replace(gone[1], encodeURIComponent(id)), options);
  }
}

const posting = (body, signal) => ({
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export const api = {
  /** Makes a run anew: old id → new id, or null. @type {null | ((id: string) => Promise<string | null>)} */
  onRunGone: null,

  /** @returns {Promise<any>} the JSON @param {string} path @param {AbortSignal} [signal] */
  get: async (path, signal) => (await request(path, { signal })).json(),

  /** @returns {Promise<any>} the JSON @param {string} path @param {object} body @param {AbortSignal} [signal] */
  post: async (path, body, signal) => (await request(path, posting(body, signal))).json(),

  /** @param {string} path */
  delete: async (path) => void (await request(path, { method: "DELETE" })),

  /** @returns {Promise<{buffer: ArrayBuffer, meta: any}>} bytes, and what `X-Openbook-Meta` says of them */
  binary: async (path, signal) => {
    const response = await request(path, { signal });
    const meta = JSON.parse(response.headers.get("X-Openbook-Meta") ?? "{}");
    return { buffer: await response.arrayBuffer(), meta };
  },

  /**
   * Posts and calls `onLine` with each object of the answer's lines (application/x-ndjson) as it arrives.
   * @param {string} path @param {object} body @param {(line: any) => void} onLine @param {AbortSignal} [signal]
   */
  stream: async (path, body, onLine, signal) => {
    const response = await request(path, posting(body, signal));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop();
      for (const line of lines) if (line.trim()) onLine(JSON.parse(line));
      if (done) return;
    }
  },
};

const KEPT_SLICES = 96;
/** @type {Map<string, Promise<Slice>>} the least recently used first */
const slices = new Map();

/**
 * @typedef {object} Slice
 * @property {Float32Array} data row-major
 * @property {number[]} shape of `data`: one or two axes
 * @property {number[]} full_shape of the tensor it was cut from
 * @property {string[]} axes the letters of the axes that are left
 * @property {number} low @property {number} high of the finite numbers
 * @property {number[]} block how many of the tensor's rows and columns one number stands for
 */

/**
 * A slice of one step's tensor, from the server or from the last 96 asked for.
 * @param {{id: string}} run @param {string} name
 * @param {{at?: string, max?: number, reduce?: "mean" | "absmax" | "none"}} [cut]
 * @returns {Promise<Slice>}
 */
export function tensorSlice(run, name, { at = "", max = 256, reduce = "mean" } = {}) {
  const query = new URLSearchParams({ at, max: String(max), reduce });
  const path = `/api/runs/${run.id}/tensors/${encodeURIComponent(name)}?${query}`;
  const known = slices.get(path);
  slices.delete(path);
  const slice = known ?? api.binary(path).then(({ buffer, meta }) => ({ ...meta, data: new Float32Array(buffer) }));
  slices.set(path, slice);
  slice.catch(() => slices.delete(path));
  if (slices.size > KEPT_SLICES) slices.delete(slices.keys().next().value);
  return slice;
}
