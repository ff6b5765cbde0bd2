/**
 * Runs answers: one per conversation at a time, each goes on when another conversation is shown.
 */

import { ApiError, streamChat } from "./api.js";
import { AnswerBuilder, hasOutput, newAnswer, requestMessages, shownAnswer } from "./answer.js";

const SAVE_MS = 2000; // a running answer is written this often, and when it ends
const PATIENCE_MS = 1000; // after it the reader is told how much of the prompt has been read
const ANSWERING = "Answering…";
const ANNOUNCED_PERCENT = 25; // a screen reader says so in steps of this size

/** A running answer: words for the reader while there is no token, and for screen readers. */
function makeRun() {
  return {
    controller: new AbortController(),
    waiting: "",
    notice: ANSWERING,
    percent: null, // of the prompt, while it is read
    announcedStep: null,
    isSlow: false, // the first token has taken longer than anyone waits without a word
    savedAt: performance.now(),
    isLeft: false,
  };
}

/** How much of what is not in the server's cache has been read; null if that is not known. */
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

  /** The page goes away: what breaks from now on was broken by that. */
  leave() {
    for (const run of this.#runs.values()) run.isLeft = true;
  }

  /** Asks for an answer to what the conversation ends with. `options`: model, sampling, tools. */
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

  /** Says what has been read of the prompt; until that is known the words before it stay. */
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

  /** The chunks; where the server wants a key, the reader is asked and the request sent again. */
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
    console.error(error); // A fault of this page: the reader must not be left waiting all the same.
    const words = { kind: "page", message: "This page has failed.", retryAfter: null };
    return { kind: "failed", error: words };
  }
  const { kind, message, param, retryAfter } = error;
  const words = param && !message.includes(param) ? `${message} (${param})` : message;
  return { kind: "failed", error: { kind, message: words, retryAfter } };
}

/** The turn whose shown answer is to be filled: a new one, or a new version of the last. */
function turnForAnswer(conversation) {
  const last = conversation.turns.at(-1);
  if (last.role === "user") return appended(conversation);
  const answer = shownAnswer(last);
  const isEmpty = !hasOutput(answer) && !answer.reasoning;
  if (isEmpty) last.answers[last.shown] = newAnswer(); // What failed empty is not worth keeping.
  else last.shown = last.answers.push(newAnswer()) - 1;
  return last;
}

/** Adds a turn with an empty answer, and gives it. */
export function appended(conversation) {
  const turn = { role: "assistant", answers: [newAnswer()], shown: 0 };
  conversation.turns.push(turn);
  return turn;
}
