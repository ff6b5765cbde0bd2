/**
 * Runs answers: one per conversation at a time; an answer continues while another is shown.
 */

import { ApiError, streamChat } from "./api.js";
import { AnswerBuilder, hasOutput, newAnswer, requestMessages, shownAnswer } from "./answer.js";

const SAVE_MS = 2000; // a running answer is written this often, and when it ends
const PATIENCE_MS = 1000; // after this the page shows how much of the prompt is computed
const ANSWERING = "Answering…";
const ANNOUNCED_PERCENT = 25; // a screen reader announces it in steps of this size

/** A running answer: its status text before the first token, and for screen readers. */
function makeRun() {
  return {
    controller: new AbortController(),
    waiting: "",
    notice: ANSWERING,
    percent: null, // of the prompt that is computed
    announcedStep: null,
    isSlow: false, // the first token has taken longer than PATIENCE_MS
    savedAt: performance.now(),
    isLeft: false,
  };
}

/** The computed share of the prompt that is not in the server's cache; null if unknown. */
function percentRead(progress) {
  const { total, cache = 0, processed } = progress ?? {};
  const share = (processed - cache) / (total - cache);
  return Number.isFinite(share) ? Math.round(100 * Math.min(Math.max(share, 0), 1)) : null;
}

export class Chat {
  #server;
  #keyring;
  #store;
  #runs = new Map(); // conversation id -> run, see makeRun()
  #listener;

  /** The listener has grown(conversation), changed(conversation), ended(conversation, end). */
  constructor(server, keyring, store, listener) {
    this.#server = server;
    this.#keyring = keyring;
    this.#store = store;
    this.#listener = listener;
  }

  get runningIds() {
    return new Set(this.#runs.keys());
  }

  runOf(conversation) {
    return this.#runs.get(conversation.id) ?? null;
  }

  stop(conversation) {
    this.runOf(conversation)?.controller.abort();
  }

  /** The page is closed: a stream that breaks after this was interrupted by it. */
  leave() {
    for (const run of this.#runs.values()) run.isLeft = true;
  }

  /** Requests an answer to the conversation. `options`: model, sampling, tools. */
  async answer(conversation, options) {
    const turn = turnForAnswer(conversation);
    const answer = shownAnswer(turn);
    const earlier = conversation.turns.slice(0, -1);
    const run = makeRun();
    this.#runs.set(conversation.id, run);
    this.#listener.changed(conversation);
    const body = {
      ...options,
      messages: requestMessages(conversation.system, earlier),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      return_progress: true,
    };
    try {
      await this.#stream(conversation, run, answer, body);
    } catch (error) {
      answer.end = run.isLeft ? { kind: "interrupted" } : endOf(error);
      if (error instanceof ApiError) this.#server.check();
    } finally {
      this.#runs.delete(conversation.id);
    }
    this.#listener.ended(conversation, answer.end);
  }

  async #stream(conversation, run, answer, body) {
    const { signal } = run.controller;
    this.#wait(conversation, run, "Waiting for the model to start…");
    await this.#server.whenStarted(signal);
    this.#wait(conversation, run, "Waiting for the first token…");
    const builder = new AnswerBuilder(answer, performance.now());
    const timer = setTimeout(() => {
      run.isSlow = true;
      this.#tellProgress(conversation, run);
    }, PATIENCE_MS);
    try {
      for await (const chunk of this.#chunks(body, signal)) {
        builder.add(chunk, performance.now());
        run.percent = answer.stats ? null : percentRead(chunk.prompt_progress) ?? run.percent;
        this.#tellProgress(conversation, run);
        if (performance.now() - run.savedAt > SAVE_MS) {
          run.savedAt = performance.now();
          this.#store.save(conversation);
        }
      }
    } finally {
      clearTimeout(timer);
    }
    builder.finish();
  }

  /** Shows the progress of the prompt; the previous text stays until it is known. */
  #tellProgress(conversation, run) {
    if (run.percent === null) {
      run.notice = ANSWERING;
    } else if (run.isSlow) {
      run.waiting = `Reading prompt, ${run.percent}%`;
      const step = Math.floor(run.percent / ANNOUNCED_PERCENT);
      if (step !== run.announcedStep) run.notice = run.waiting;
      run.announcedStep = step;
    }
    this.#listener.grown(conversation);
  }

  #wait(conversation, run, words) {
    run.waiting = words;
    this.#listener.grown(conversation);
  }

  /** The chunks; if the server needs a key, asks the user and sends the request again. */
  async *#chunks(body, signal) {
    for (;;) {
      try {
        yield* streamChat(body, { key: this.#keyring.key, signal });
        return;
      } catch (error) {
        if (error.kind !== "unauthorized" || (await this.#keyring.ask()) === null) throw error;
      }
    }
  }
}

function endOf(error) {
  if (error.name === "AbortError") return { kind: "stopped" };
  if (!(error instanceof ApiError)) {
    console.error(error); // A fault of this page: the user must not be left waiting.
    const words = { kind: "page", message: "This page has failed.", retryAfter: null };
    return { kind: "failed", error: words };
  }
  const { kind, message, param, retryAfter } = error;
  const words = param && !message.includes(param) ? `${message} (${param})` : message;
  return { kind: "failed", error: { kind, message: words, retryAfter } };
}

/** The turn of the new answer: a new turn, or a new version in the last one. */
function turnForAnswer(conversation) {
  const last = conversation.turns.at(-1);
  if (last.role === "user") return appended(conversation);
  const answer = shownAnswer(last);
  const isEmpty = !hasOutput(answer) && !answer.reasoning;
  if (isEmpty) last.answers[last.shown] = newAnswer(); // A failed answer without text is replaced.
  else last.shown = last.answers.push(newAnswer()) - 1;
  return last;
}

/** Adds a turn with an empty answer, and returns it. */
export function appended(conversation) {
  const turn = { role: "assistant", answers: [newAnswer()], shown: 0 };
  conversation.turns.push(turn);
  return turn;
}
