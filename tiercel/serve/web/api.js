/**
 * Client of the server that sent this page: OpenAI's routes and their event streams.
 *
 * Every failure becomes one ApiError whose `kind` decides what the page offers:
 * unreachable (no response), broken (the stream ended early), unauthorized (401), busy (429),
 * unavailable (503), refused (other 4xx), failed (a fault of the server).
 */

const MAX_MESSAGE_CHARACTERS = 1000;

export class ApiError extends Error {
  constructor(kind, message, { code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.kind = kind;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter; // seconds
  }
}

/** URLs are relative to the page, so that it also works under a proxy's path. */
function address(path) {
  return new URL(path, document.baseURI);
}

function kindOfStatus(status) {
  const kinds = { 401: "unauthorized", 429: "busy", 503: "unavailable" };
  return kinds[status] ?? (status < 500 ? "refused" : "failed");
}

function errorOfObject(kind, object, fallback, retryAfter = null) {
  const found = object !== null && typeof object === "object" ? object : {};
  const words = typeof found.message === "string" && found.message ? found.message : fallback;
  return new ApiError(kind, words.slice(0, MAX_MESSAGE_CHARACTERS), {
    code: typeof found.code === "string" ? found.code : null,
    param: typeof found.param === "string" ? found.param : null,
    retryAfter,
  });
}

async function errorOfResponse(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // A proxy may respond with a page of its own: the status is enough.
  }
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const fallback = `The server answered with status ${response.status}.`;
  const retryAfter = Number.isFinite(seconds) ? seconds : null;
  return errorOfObject(kindOfStatus(response.status), body?.error, fallback, retryAfter);
}

async function request(path, { key = "", signal, body } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(address(path), {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("unreachable", "The server does not answer.");
  }
}

/** Asks whether the model can be used: {status, progress}; status "ready" when it can. */
export async function readReady(signal) {
  const response = await request("ready", { signal });
  if (response.status !== 503) return { status: "ready", progress: 1 };
  let body = null;
  try {
    body = await response.json();
  } catch {
    // A proxy before the server responds with 503: the server is not ready.
  }
  const progress = Number(body?.progress);
  return {
    status: typeof body?.status === "string" ? body.status : "loading",
    progress: Number.isFinite(progress) ? Math.min(Math.max(progress, 0), 1) : null,
  };
}

/** Lists the served models: [{id, contextTokens, samplingDefaults}]. */
export async function readModels(key, signal) {
  const response = await request("v1/models", { key, signal });
  if (!response.ok) throw await errorOfResponse(response);
  const body = await response.json();
  const models = Array.isArray(body?.data) ? body.data : [];
  return models
    .filter((model) => typeof model?.id === "string")
    .map((model) => ({
      id: model.id,
      contextTokens: Number.isInteger(model.max_model_len) ? model.max_model_len : null,
      samplingDefaults: numbersOf(model.sampling_defaults),
    }));
}

/** The server's default of a field that a request leaves out; defaults are numbers. */
function numbersOf(object) {
  const entries = object !== null && typeof object === "object" ? Object.entries(object) : [];
  return new Map(entries.filter(([, value]) => Number.isFinite(value)));
}

/** Sends an object and reads the object of the response. */
export async function sendJson(path, body, { key, signal }) {
  const response = await request(path, { key, signal, body });
  if (!response.ok) throw await errorOfResponse(response);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw brokenStream();
  }
}

/** Yields the chunks of one chat completion; ends normally only if the answer is complete. */
export async function* streamChat(body, { key, signal }) {
  const response = await request("v1/chat/completions", { key, signal, body });
  if (!response.ok) throw await errorOfResponse(response);
  let isWhole = false;
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = parseChunk(data);
    if (chunk.error) throw errorOfObject("failed", chunk.error, "The server broke off the answer.");
    isWhole ||= Boolean(chunk.choices?.[0]?.finish_reason);
    yield chunk;
  }
  if (!isWhole) throw brokenStream();
}

function parseChunk(data) {
  try {
    const chunk = JSON.parse(data);
    if (chunk !== null && typeof chunk === "object") return chunk;
  } catch {
    // Falls through: a chunk that is no object is a broken stream too.
  }
  throw brokenStream();
}

function brokenStream() {
  return new ApiError("broken", "The connection was lost before the answer was complete.");
}

/** Yields the data of each server-sent event; lines may end in LF, CR LF or CR. */
async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await readPiece(reader);
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // The consumer has left: this closes the connection.
  }
}

async function readPiece(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw brokenStream();
  }
}
