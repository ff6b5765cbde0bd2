/**
 * Answers as data: chunks assembled into an answer, its measurements, the messages of a request.
 *
 * A conversation is {id, title, isNamed, created, updated, system, turns}; a turn is
 * {role: "user", content} or {role: "assistant", answers, shown}: regenerating adds to `answers`.
 * An answer's `end` is null while it runs, then {kind, ...}: "done" (with the server's reason),
 * "stopped" (by the user), "interrupted" (the page was closed), "failed" (with error).
 */

const MIN_SPAN_S = 0.05; // a shorter time is that of buffers, not of the model
const NO_RESULT = "No result was given.";

export function newAnswer() {
  return { content: "", reasoning: "", toolCalls: [], end: null, stats: null };
}

/** Adds chunks to an answer and measures it. Times are milliseconds of performance.now(). */
export class AnswerBuilder {
  #answer;
  #calls = new Map(); // index in the stream -> call
  #started;
  #first = null; // {at, tokens} of the first chunk with output
  #last = null;
  #tokens = null;
  #reason = null;

  constructor(answer, now) {
    this.#answer = answer;
    this.#started = now;
  }

  add(chunk, now) {
    const tokens = chunk.usage?.completion_tokens;
    if (Number.isInteger(tokens)) this.#tokens = tokens;
    const choice = chunk.choices?.[0];
    if (choice && this.#addDelta(choice.delta ?? {})) {
      this.#first ??= { at: now, tokens: this.#tokens };
      this.#last = now;
    }
    if (typeof choice?.finish_reason === "string") this.#reason = choice.finish_reason;
    this.#answer.stats = this.#measure();
  }

  finish() {
    this.#answer.end = { kind: "done", reason: this.#reason ?? "stop" };
  }

  #addDelta(delta) {
    let hasOutput = false;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (typeof reasoning === "string" && reasoning) {
      this.#answer.reasoning += reasoning;
      hasOutput = true;
    }
    if (typeof delta.content === "string" && delta.content) {
      this.#answer.content += delta.content;
      hasOutput = true;
    }
    for (const piece of Array.isArray(delta.tool_calls) ? delta.tool_calls : []) {
      this.#addCall(piece);
      hasOutput = true;
    }
    return hasOutput;
  }

  #addCall(piece) {
    const index = piece.index ?? 0;
    let call = this.#calls.get(index);
    if (!call) {
      call = { id: `call_${index}`, name: "", arguments: "", result: "" };
      this.#calls.set(index, call);
      this.#answer.toolCalls.push(call);
    }
    if (typeof piece.id === "string") call.id = piece.id;
    if (typeof piece.function?.name === "string") call.name += piece.function.name;
    if (typeof piece.function?.arguments === "string") call.arguments += piece.function.arguments;
  }

  #measure() {
    if (!this.#first) return null;
    const seconds = (this.#last - this.#first.at) / 1000;
    // The first chunk may hold several tokens: the speed counts only the tokens after it.
    const later = this.#tokens === null ? 0 : this.#tokens - (this.#first.tokens ?? 1);
    return {
      tokens: this.#tokens,
      firstTokenMs: Math.round(this.#first.at - this.#started),
      tokensPerSecond: later > 0 && seconds >= MIN_SPAN_S ? later / seconds : null,
    };
  }
}

/** Whether an answer holds anything but thoughts. */
export function hasOutput(answer) {
  return Boolean(answer.content || answer.toolCalls.length);
}

/** Whether a tool call is complete: one that was cut can neither be run nor sent again. */
export function isWhole(call) {
  try {
    return call.name !== "" && typeof JSON.parse(call.arguments || "{}") === "object";
  } catch {
    return false;
  }
}

/** The visible answer of an assistant's turn. */
export function shownAnswer(turn) {
  return turn.answers[turn.shown];
}

/** The messages of a request that continues `turns`. */
export function requestMessages(system, turns) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") addUserMessage(messages, turn.content);
    else addAnswerMessages(messages, shownAnswer(turn));
  }
  return messages;
}

function addUserMessage(messages, content) {
  const last = messages.at(-1);
  // After a failed answer two questions are adjacent, and many templates need alternating roles.
  if (last?.role === "user") last.content += `\n\n${content}`;
  else messages.push({ role: "user", content });
}

function addAnswerMessages(messages, answer) {
  const calls = answer.toolCalls.filter(isWhole);
  if (!calls.length) {
    if (answer.content) messages.push({ role: "assistant", content: answer.content });
    return;
  }
  messages.push({
    role: "assistant",
    content: answer.content || null,
    // Within a chain of calls models expect their reasoning; elsewhere it is dropped.
    ...(answer.reasoning ? { reasoning_content: answer.reasoning } : {}),
    tool_calls: calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments || "{}" },
    })),
  });
  for (const call of calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: call.result || NO_RESULT });
  }
}
